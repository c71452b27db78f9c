"""Inputs of the preprocess tool with wrong bytes: JSON lines, gzip, zstandard, Parquet. Where it ends with 0, the
tokens are counted by another path, which reads the whole file at once."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy
from hypothesis import strategies as st

from spare_megatron.data.data_files import check_file
from spare_megatron.data.preprocess import command
from spare_megatron.megatron_adapter.versions import release
from tests.fuzz import EDITS, Edit, edited, outcome

END = 1000
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(END + (release() >= (0, 18)))]
"""Which counts the end among its ids since megatron-core 0.18."""
ENDINGS = {"jsonl": "", "jsonl.gz": ".gz", "jsonl.zst": ".zst", "parquet": ".parquet"}

TEXT = st.lists(st.integers(0, 999), min_size=1, max_size=8).map(lambda ids: " ".join(map(str, ids)))
CASES = st.tuples(
    st.sampled_from(sorted(ENDINGS)),
    st.lists(st.lists(TEXT, min_size=1, max_size=8), min_size=1, max_size=4),
    EDITS,
    EDITS,
)
"""(kind, the documents of each frame, edits of the first frame's text, edits of the file)."""


def packed(kind: str, frames: list[list[str]], edits: list[Edit]) -> bytes:
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        buffer = io.BytesIO()
        texts = [text for frame in frames for text in frame]
        parquet.write_table(pyarrow.table({"text": texts}), buffer, row_group_size=3)
        return buffer.getvalue()
    raw = ["".join(json.dumps({"text": text}) + "\n" for text in frame).encode() for frame in frames]
    raw[0] = edited(raw[0], edits)
    if kind == "jsonl.gz":
        return b"".join(gzip.compress(part, mtime=0) for part in raw)
    if kind == "jsonl.zst":
        import zstandard

        return b"".join(zstandard.ZstdCompressor().compress(part) for part in raw)
    return b"".join(raw)


def unpacked(kind: str, raw: bytes) -> list[Any]:
    """The documents of a file, by calls that the tool does not make; ValueError where it is not whole."""
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        return [{"text": text} for text in parquet.read_table(pyarrow.BufferReader(raw)).column("text").to_pylist()]
    text = b""
    if kind == "jsonl.gz":
        while raw.strip(b"\0"):
            member = zlib.decompressobj(31)
            text += member.decompress(raw)
            if not member.eof:
                raise ValueError("cut off")
            raw = member.unused_data
    elif kind == "jsonl.zst":
        import zstandard

        while raw:
            frame = zstandard.ZstdDecompressor().decompressobj()
            text += frame.decompress(raw)
            if not frame.eof:
                raise ValueError("cut off")
            raw = frame.unused_data
    else:
        text = raw
    return [json.loads(line) for line in text.replace(b"\r", b"\n").split(b"\n") if line.strip()]


def examine(folder: Path, case: tuple[str, list[list[str]], list[Edit], list[Edit]]) -> None:
    kind, frames, of_text, of_file = case
    path = folder / f"in.{kind}"
    path.write_bytes(edited(packed(kind, frames, of_text), of_file))
    words = ["--input", str(path), "--output-prefix", str(folder / "out"), *NULL, "--append-eod"]
    code, _, reported = outcome(command.main, words)
    if code == 2:
        assert not list(folder.glob("out*")), reported
        assert of_text or of_file, reported
        return
    texts = [document["text"] for document in unpacked(kind, path.read_bytes())]
    lists = [text if isinstance(text, list) else [text] for text in texts]
    ids = [[int(word) for part in parts for word in part.split(" ")] + [END] for parts in lists if parts]
    file = check_file(str(folder / "out_text_document"))
    found = numpy.fromfile(folder / "out_text_document.bin", file.dtype).tolist()
    assert found == [one for document in ids for one in document]
