"""Makes control_pb2.py and its types, control_pb2.pyi, from control.proto.

    python -m spare_megatron.control_plane.generate

Needs grpcio-tools.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = "spare_megatron/control_plane/control.proto"
GENERATED = (Path(__file__).with_name("control_pb2.py"), Path(__file__).with_name("control_pb2.pyi"))


def generated_texts() -> tuple[str, ...]:
    """The texts that the files of ``GENERATED`` should have."""
    from grpc_tools import protoc

    # protobuf's global pool knows the file by its path from the repository's root: a bare name could be taken.
    with tempfile.TemporaryDirectory() as scratch:
        if protoc.main(["protoc", f"-I{ROOT}", f"--python_out={scratch}", f"--pyi_out={scratch}", PROTO]) != 0:
            raise RuntimeError("protoc failed on control.proto")
        texts = ((Path(scratch) / PROTO).with_name(path.name).read_text() for path in GENERATED)
        # the types of the numbers of fields, one for each field, are left out: nobody reads a number
        return tuple(re.sub(r" +\w+_FIELD_NUMBER: .*\n", "", text) for text in texts)


if __name__ == "__main__":
    for path, text in zip(GENERATED, generated_texts(), strict=True):
        path.write_text(text)
        sys.stdout.write(f"wrote {path.name}\n")
