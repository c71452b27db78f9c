"""Inputs of the preprocess tool: whatever the blocks, wherever reading begins anew, nothing is lost or twice."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from spare_megatron.data.preprocess.text_files import ReadPosition, blocks

KEYS = ("text",)
TEXTS = [["a", "größe\n", "x" * 700, ""], ["b" * n for n in range(40)], ["last, with no line's end"]]


def write(folder: Path, kind: str) -> list[Path]:
    files = []
    for number, texts in enumerate(TEXTS):
        rows = [{"text": text, "other": n} for n, text in enumerate(texts)]
        raw = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
        raw = raw if number == 2 else raw + b"\n\n"
        path = folder / f"{number}.{kind}"
        if kind.endswith("gz"):
            raw = gzip.compress(raw)
        elif kind.endswith("zst"):
            raw = pytest.importorskip("zstandard").ZstdCompressor().compress(raw)
        if kind == "parquet":
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif kind == "txt":
            path.write_text(texts[0])
        else:
            path.write_bytes(raw)
        files.append(path)
    return files


def documents(files: list[Path], size: int, start: ReadPosition) -> list[tuple[str, bytes]]:
    """(what it is called, line) of every document."""
    found = blocks(files, KEYS, size, start)
    return [(one.where(at), line) for one in found for at, line in enumerate(one.data.splitlines()) if line]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
@pytest.mark.parametrize("size", [1, 64, 1000, 1 << 20])
def test_reading_goes_on_behind_any_block(tmp_path: Path, kind: str, size: int) -> None:
    files = write(tmp_path, kind)
    whole = documents(files, 1 << 20, ReadPosition())
    texts = [texts[0] for texts in TEXTS] if kind == "txt" else [text for texts in TEXTS for text in texts]
    assert [json.loads(line)["text"] for _, line in whole] == texts
    assert documents(files, size, ReadPosition()) == whole
    read = 0
    for block in blocks(files, KEYS, size, ReadPosition()):
        read += sum(map(bool, block.data.splitlines()))
        assert documents(files, size, block.end) == whole[read:]


def test_a_block_names_its_lines(tmp_path: Path) -> None:
    files = write(tmp_path, "jsonl")
    for block in blocks(files, KEYS, 64, ReadPosition()):
        for at, line in enumerate(block.data.splitlines()):
            number = files.index(Path(block.source))
            assert files[number].read_bytes().splitlines()[block.first + at - 1] == line
            assert block.where(at) == f"line {block.first + at} of {files[number]}"
