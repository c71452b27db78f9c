"""Reads the input of the preprocess tool: JSON lines, plain text and Parquet, the first two also compressed.

The name of a file says what it is: ``.parquet``; ``.txt`` (the file is one document); any other file has one JSON
object per line. ``.gz`` or ``.zst`` may follow all but ``.parquet``. Every document is passed on as a line of JSON in
UTF-8, so one encoder serves all kinds; many lines make one block of bytes, which only the process that tokenizes it
parses.

Promises: documents come in the order of the files and of each file's lines or rows; at most one block, ROWS rows or one
text file is in memory at a time; reading can begin after any block that was read before.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.preprocess.zstd_frames import CheckedFrames

PACKAGES = {".parquet": ("pyarrow.parquet", "pyarrow"), ".zst": ("zstandard", "zstandard")}
"""Suffix of a file -> (module, package) needed to read it."""
ZSTD_WINDOW_MAX = 1 << 31
"""The largest window of zstandard's own command, with --ultra --long=31."""
ROWS = 1024
"""Number of rows of a Parquet file that are decoded at once."""


class ReadPosition(NamedTuple):
    """Where a block ends and the next one begins."""

    file: int = 0
    """Index of the file among the input files, from 0."""
    offset: int = 0
    """Bytes of the (decompressed) file before this position; 0 in a Parquet file."""
    items: int = 0
    """Lines or rows of the file before this position."""


@dataclass(frozen=True)
class Block:
    """Some documents of one file."""

    source: str
    """Name of the file, for messages."""
    unit: str
    """What messages count in the file: 'line', 'row', or '' where the file is one document."""
    first: int
    """Number in the file of the block's first line or row, from 1."""
    data: bytes
    """Lines of JSON in UTF-8."""
    end: ReadPosition

    def where(self, at: int) -> str:
        """What messages call line ``at`` of the block, counted from 0: 'line 7 of corpus.jsonl'."""
        return f"{self.unit} {self.first + at} of {self.source}" if self.unit else self.source


def inputs_of(words: Sequence[str]) -> list[Path]:
    """The files that ``words`` name: those of a directory and the matches of a pattern, both sorted by name."""
    files: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            files += sorted(one for one in path.iterdir() if one.is_file())
        elif path.is_file():
            files.append(path)
        else:
            files += sorted(Path(one) for one in glob.glob(word) if Path(one).is_file())
    return files


def check_inputs(words: Sequence[str]) -> None:
    """ConfigError where a word names no file, or a file needs a package that is not installed."""
    for word in words:
        found = inputs_of([word])
        if not found:
            raise ConfigError(f"--input {word} does not exist; give a file with one JSON object per line")
        for path in found:
            if path.suffix in PACKAGES:
                _module(path)


def blocks(files: Sequence[Path], keys: Sequence[str], size: int, start: ReadPosition) -> Iterator[Block]:
    """The documents after position ``start``, in blocks of about ``size`` bytes.

    ConfigError for a file that cannot be read to its end, whatever its library raises, with the path and the last line
    or row that was read.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        source = "the input" if len(files) == 1 else str(path)
        place = start if number == start.file else ReadPosition(number)
        try:
            for block in _of_file(path, source, keys, size, place):
                place = block.end
                yield block
        except ConfigError:
            raise
        except Exception as error:  # each library of a format has its own
            raise ConfigError(_unreadable(path, place.items, error)) from error


def _of_file(path: Path, source: str, keys: Sequence[str], size: int, place: ReadPosition) -> Iterator[Block]:
    if path.suffix == ".parquet":
        yield from _rows(path, source, keys, size, place)
    elif path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
        with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            line = json.dumps(dict.fromkeys(keys, text.read()))
        yield Block(source, "", 1, line.encode(), ReadPosition(place.file + 1))
    else:
        with _opened(path) as file:
            yield from _lines(file, source, size, place)


def _unreadable(path: Path, items: int, error: Exception) -> str:
    """The sentence about a file of which ``items`` lines or rows were read before its library raised ``error``."""
    if isinstance(error, UnicodeDecodeError):
        return f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert the file"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{path} cannot be read: {error.strerror}; check its rights and its disk"
    unit = "row" if path.suffix == ".parquet" else "line"
    where = f"behind {unit} {items}" if items else "from its beginning on"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{path} is damaged or cut off, and cannot be read {where}: {reason}; copy the file again, make it anew, or "
        "leave it out"
    )


def _lines(file: BinaryIO, source: str, size: int, place: ReadPosition) -> Iterator[Block]:
    """Blocks of a file of lines after ``place``: each ends at the end of a line, and a line longer than ``size`` bytes
    is not split."""
    if file.seekable():
        file.seek(place.offset)
    else:
        for skipped in _parts(place.offset, size):
            file.read(skipped)
    pending: list[bytes] = []
    while part := file.read(size):
        cut = part.rfind(b"\n") + 1
        if not cut:
            pending.append(part)
            continue
        data = b"".join([*pending, part[:cut]])
        pending = [part[cut:]]
        end = ReadPosition(place.file, place.offset + len(data), place.items + data.count(b"\n"))
        yield Block(source, "line", place.items + 1, data, end)
        place = end
    if last := b"".join(pending):
        yield Block(source, "line", place.items + 1, last, ReadPosition(place.file + 1))


def _parts(total: int, size: int) -> Iterator[int]:
    while total > 0:
        yield min(total, size)
        total -= size


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading its decompressed bytes."""
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        if path.suffix == ".gz":
            if not path.stat().st_size:
                raise EOFError("the file is empty, which no compressed file is")
            yield cast(BinaryIO, stack.enter_context(gzip.open(raw)))
        elif path.suffix == ".zst":
            unpacking = _module(path).ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX)
            checked = CheckedFrames(path, raw)
            reader = stack.enter_context(unpacking.stream_reader(checked, read_across_frames=True))
            yield cast(BinaryIO, stack.enter_context(io.BufferedReader(reader)))
        else:
            yield raw


def _rows(path: Path, source: str, keys: Sequence[str], size: int, place: ReadPosition) -> Iterator[Block]:
    with _module(path).ParquetFile(path) as file:
        missing = [key for key in keys if key not in file.schema_arrow.names]
        if missing:
            raise ConfigError(
                f"{path} has no column {missing[0]!r}, only {', '.join(file.schema_arrow.names)}; "
                "name the right ones with --json-keys"
            )
        pending: list[bytes] = []
        number = held = 0
        for group in file.iter_batches(batch_size=ROWS, columns=list(keys)):
            if number + len(group) <= place.items:
                number += len(group)
                continue
            for row in _decoded(path, group, number):
                number += 1
                if number <= place.items:
                    continue
                pending.append(_as_json(path, row, number))
                held += len(pending[-1])
                if held >= size:
                    end = ReadPosition(place.file, 0, number)
                    yield Block(source, "row", place.items + 1, b"\n".join(pending), end)
                    pending, held, place = [], 0, end
        if pending:
            yield Block(source, "row", place.items + 1, b"\n".join(pending), ReadPosition(place.file + 1))


def _decoded(path: Path, group: Any, before: int) -> list[dict[str, Any]]:
    """The rows of a batch, of which ``before`` rows of the file come first; ConfigError names a row that is no text."""
    try:
        return cast(list[dict[str, Any]], group.to_pylist())
    except UnicodeDecodeError:
        for at in range(len(group)):
            try:
                group.slice(at, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"row {before + at + 1} of {path} is not UTF-8: {error.reason} at byte {error.start}; correct it"
                ) from None
        raise


def _as_json(path: Path, row: dict[str, Any], number: int) -> bytes:
    try:
        return json.dumps(row).encode()
    except (TypeError, ValueError, RecursionError):
        key = next(key for key, value in row.items() if not isinstance(value, str))
        raise ConfigError(
            f"row {number} of {path} has {type(row[key]).__name__} under {key!r}, not text; convert the column to "
            "strings of UTF-8, or name the right one with --json-keys"
        ) from None


def _module(path: Path) -> Any:
    module, package = PACKAGES[path.suffix]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{path} needs the package {package}, which is not installed; pip install {package}"
        ) from None
