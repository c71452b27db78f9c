"""Makes control_pb2.py from control.proto: ``python -m spare_megatron.control.generate``. Needs grpcio-tools."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = "spare_megatron/control/control.proto"
GENERATED = Path(__file__).with_name("control_pb2.py")


def generated_text() -> str:
    """The text that control_pb2.py should have."""
    from grpc_tools import protoc

    # protobuf's global pool knows the file by its path from the repository's root: a bare name could be taken.
    with tempfile.TemporaryDirectory() as scratch:
        if protoc.main(["protoc", f"-I{ROOT}", f"--python_out={scratch}", PROTO]) != 0:
            raise RuntimeError("protoc failed on control.proto")
        return (Path(scratch) / PROTO).with_name(GENERATED.name).read_text()


if __name__ == "__main__":
    GENERATED.write_text(generated_text())
    sys.stdout.write(f"wrote {GENERATED.name}\n")
