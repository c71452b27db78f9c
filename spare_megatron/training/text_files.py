"""Files of text for the preprocess tool: JSON lines, plain text and Parquet, plain or compressed.

What a file is follows from its name: ``.parquet``; ``.txt`` (a file is a document); anything else is JSON objects, one
a line. ``.gz`` and ``.zst`` may follow. Every document comes out as a line of JSON, so that one encoder serves all.

Promises: documents come in the order of the files, and of each file's lines or rows; one row group, or one text file,
is in memory at a time.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from spare_megatron.config.errors import ConfigError

PACKAGES = {".parquet": ("pyarrow.parquet", "pyarrow"), ".zst": ("zstandard", "zstandard")}
"""Ending -> (module, package) that reading it needs."""


def inputs_of(words: Sequence[str]) -> list[Path]:
    """The files that ``words`` name: a directory is its files, a pattern its matches, both sorted by name."""
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
    """ConfigError where a word names nothing, or a file needs a package that is not installed."""
    for word in words:
        found = inputs_of([word])
        if not found:
            raise ConfigError(f"--input {word} does not exist; give a file of JSON objects, one a line")
        for path in found:
            if path.suffix in PACKAGES:
                _module(path)


def documents(files: Sequence[Path], keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(where it comes from, a line of JSON) of every document. ConfigError for a file that cannot be read."""
    for path in files:
        where = "the input" if len(files) == 1 else str(path)
        if path.suffix == ".parquet":
            yield from _rows(path, where, keys)
        elif path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
            with _opened(path) as file:
                yield where, json.dumps(dict.fromkeys(keys, file.read()))
        else:
            with _opened(path) as file:
                # an empty line is no document
                yield from ((f"line {n} of {where}", line) for n, line in enumerate(file, 1) if line.strip())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with contextlib.ExitStack() as stack:
        if path.suffix == ".gz":
            yield stack.enter_context(gzip.open(path, "rt", encoding="utf-8"))
        elif path.suffix == ".zst":
            raw = stack.enter_context(path.open("rb"))
            reader = stack.enter_context(_module(path).ZstdDecompressor().stream_reader(raw, read_across_frames=True))
            yield io.TextIOWrapper(reader, encoding="utf-8")
        else:
            yield stack.enter_context(path.open(encoding="utf-8"))


def _rows(path: Path, where: str, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    with _module(path).ParquetFile(path) as file:
        missing = [key for key in keys if key not in file.schema_arrow.names]
        if missing:
            raise ConfigError(
                f"{path} has no column {missing[0]!r}, only {', '.join(file.schema_arrow.names)}; "
                "name the right ones with --json-keys"
            )
        number = 0
        for group in file.iter_batches(columns=list(keys)):
            for row in group.to_pylist():
                number += 1
                yield f"row {number} of {where}", json.dumps(row)


def _module(path: Path) -> Any:
    module, package = PACKAGES[path.suffix]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{path} needs the package {package}, which is not installed; pip install {package}"
        ) from None
