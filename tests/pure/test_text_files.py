"""Inputs of the preprocess tool: whatever the blocks, wherever reading begins anew, nothing is lost or twice."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
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


LINES = [json.dumps({"text": f"document {n} " + "word " * (n % 50)}) for n in range(1000)]


def zst(lines: list[str], frames: int = 5, **options: object) -> bytes:
    """The lines in several frames, as parallel compressors write them."""
    zstandard = pytest.importorskip("zstandard")
    size = -(-len(lines) // frames)
    parts = ["".join(line + "\n" for line in lines[at : at + size]).encode() for at in range(0, len(lines), size)]
    return b"".join(zstandard.ZstdCompressor(**options).compress(part) for part in parts)


def read_lines(path: Path, size: int = 1000) -> list[bytes]:
    return [line for block in blocks([path], KEYS, size, ReadPosition()) for line in block.data.splitlines()]


@pytest.mark.parametrize("options", [{}, {"write_checksum": True}, {"write_content_size": False, "level": 1}], ids=str)
def test_frames_behind_each_other_are_one_file(tmp_path: Path, options: dict[str, object]) -> None:
    path, skipped = tmp_path / "a.jsonl.zst", b"\x57\x2a\x4d\x18\x03\x00\x00\x00abc"
    empty = zst([""], 1, **options)
    path.write_bytes(skipped + zst(LINES, **options) + skipped + empty)
    assert [line.decode() for line in read_lines(path)] == [*LINES, ""]


def test_a_zst_file_cut_anywhere_but_between_frames_is_one_sentence(tmp_path: Path) -> None:
    path, frames = tmp_path / "a.jsonl.zst", [zst(LINES[at : at + 10], 1, write_checksum=True) for at in (0, 10, 20)]
    whole, starts = b"".join(frames), {len(b"".join(frames[:n])) for n in (1, 2, 3)}
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        if cut in starts:
            assert len(read_lines(path)) in (10, 20, 30)
            continue
        with pytest.raises(ConfigError) as error:
            read_lines(path)
        frame = 1 + sum(start <= cut for start in starts)
        assert f"{path} is cut off: it ends at byte {cut}, inside its zstandard frame number {frame};" in str(
            error.value
        )


@pytest.mark.parametrize("junk", [b"\0", b"junk behind it", b"\x28\xb5\x2f\xfe", b"\x1f\x8b\x08"], ids=bytes.hex)
def test_junk_behind_the_last_frame_is_one_sentence(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zst(LINES) + junk)
    with pytest.raises(ConfigError, match=f"{path} has the bytes {junk[:4].hex(' ')} behind 5 whole zstandard frames"):
        read_lines(path)
    path.write_bytes(junk + zst(LINES))
    with pytest.raises(ConfigError, match="is not in zstandard's format: it begins with the bytes"):
        read_lines(path)


def test_a_file_of_the_largest_window_is_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress("\n".join(LINES).encode()) + compressor.flush())
    assert [line.decode() for line in read_lines(path)] == LINES


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "txt.gz", "txt.zst", "parquet"])
def test_a_damaged_file_is_named_among_others(tmp_path: Path, kind: str) -> None:
    files = write(tmp_path, kind)
    raw = files[1].read_bytes()
    for damaged in (b"", raw[: len(raw) // 2], raw[:-1], bytes(byte ^ 0x5A for byte in raw)):
        files[1].write_bytes(damaged)
        with pytest.raises(ConfigError) as error:
            list(blocks(files, KEYS, 64, ReadPosition()))
        reported = str(error.value)
        assert reported.startswith(f"{files[1]} ")
        assert "; " in reported
        assert "\n" not in reported


def test_a_parquet_column_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [None, b"bytes"]}), path)
    with pytest.raises(ConfigError, match=f"row 2 of {path} has bytes under 'text', not text; convert the column"):
        read_lines(path)
    wrong = pyarrow.array([b"fine", b"\xff\xfe"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": wrong}), path)
    with pytest.raises(ConfigError, match=f"row 2 of {path} is not UTF-8: invalid start byte at byte 0"):
        read_lines(path)


def test_text_that_is_no_utf_8_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"gr\xf6\xdfe")
    with pytest.raises(ConfigError, match=f"{path} is not UTF-8: .* at byte 2; convert the file"):
        read_lines(path)
