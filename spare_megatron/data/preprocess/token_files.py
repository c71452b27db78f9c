"""The data files that the preprocess tool writes, and the record from which it goes on after an interruption.

While it runs, each part of the output is ``PREFIX_KEY_document.partN.bin`` with two files of counts beside it, and
``PREFIX.progress``, the record, says how many bytes of each are good, and up to which position of the input they go.
It is replaced as a whole after the bytes that it counts are on the disk, so it is true at any moment. The next run
truncates the files to these sizes and reads on from that position; a run with other settings or changed input is
refused. The record is removed when every pair is ready to be renamed.

The finished pair is byte for byte what megatron-core's ``IndexedDatasetBuilder`` writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.data_files import DTYPES, HEADER
from spare_megatron.data.preprocess.encode import Encoded
from spare_megatron.data.preprocess.text_files import ReadPosition

WRITE_BYTES = 1 << 22
KINDS = ("bin", "lengths", "documents")
"""Suffixes of the files of a part: tokens; int32 tokens of each sequence; int32 sequences of each document."""


class PartFiles:
    """The three files of a part (KINDS), to which documents are appended.

    With ``sizes``, the good bytes of each according to the record, existing files are truncated to them; ConfigError
    where one is shorter. With None the files begin empty. ConfigError, too, while another run writes them.
    """

    def __init__(self, path: str, sizes: list[int] | None) -> None:
        self.paths = [Path(f"{path}.{kind}") for kind in KINDS]
        self.files: list[BinaryIO] = []
        for file_path, size in zip(self.paths, sizes or [0] * len(KINDS), strict=True):
            created = 0 if sizes else os.O_CREAT
            file = os.fdopen(os.open(file_path, os.O_RDWR | created, 0o666), "r+b", buffering=WRITE_BYTES)
            _refuse_another_writer(file, file_path)
            self.files.append(file)
            if file.seek(0, os.SEEK_END) < size:
                raise ConfigError(f"{file_path} is shorter than its .progress file says; remove both to begin anew")
            file.truncate(size)
            file.seek(size)

    def write(self, tokens: bytes, lengths: Any, documents: Any) -> None:
        for file, data in zip(self.files, (tokens, lengths, documents), strict=True):
            file.write(data)

    def sizes(self) -> list[int]:
        """Sync the files to the disk; returns the bytes of each."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        return [file.tell() for file in self.files]

    def close(self) -> None:
        for file in self.files:
            file.close()

    def remove(self) -> None:
        self.close()
        for path in self.paths:
            path.unlink(missing_ok=True)


def _refuse_another_writer(file: BinaryIO, path: Path) -> None:
    """Lock a file until it is closed; ConfigError where another process has it locked. Some file systems have no
    locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path} is being written by another run with this --output-prefix; wait for its end, or give another one"
        ) from None
    except OSError:
        pass


class Output:
    """The pair of files of one key: written in parts, and given its name by :meth:`publish` when it is finished."""

    def __init__(self, prefix: str, dtype: str, partitions: int, sizes: list[list[int]] | None = None) -> None:
        self.prefix, self.dtype, self.documents = prefix, np.dtype(dtype), 0
        self.parts = [PartFiles(f"{prefix}.part{n}", sizes[n] if sizes else None) for n in range(partitions)]

    def add(self, block: Encoded) -> None:
        """Append the documents of a block, dealt out to the parts in turn."""
        if len(self.parts) == 1:
            self.parts[0].write(block.tokens, block.lengths, block.parts)
        else:
            at, sequence = 0, 0
            for number, count in enumerate(block.parts):
                lengths = block.lengths[sequence : sequence + count]
                size = int(lengths.sum()) * self.dtype.itemsize
                part = self.parts[(self.documents + number) % len(self.parts)]
                part.write(block.tokens[at : at + size], lengths, block.parts[number : number + 1])
                at, sequence = at + size, sequence + count
        self.documents += len(block.parts)

    def prepare(self) -> None:
        """Join all parts into the pair, still under the name of the first part; no document can be added any more."""
        first = self.parts[0]
        for part in self.parts:
            part.sizes()
        for part in self.parts[1:]:
            for file, path in zip(first.files, part.paths, strict=True):
                with path.open("rb") as more:
                    shutil.copyfileobj(more, file, WRITE_BYTES)
        first.sizes()
        lengths, documents = (np.fromfile(path, np.int32) for path in first.paths[1:])
        write_index(Path(f"{self.prefix}.part0.idx"), self.dtype, lengths, documents)

    def publish(self) -> None:
        """Give the pair its name, the .bin first, and remove the other files of the parts."""
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for end in ("bin", "idx"):
            Path(f"{self.prefix}.part0.{end}").replace(f"{self.prefix}.{end}")
        self.remove()

    def close(self) -> None:
        """Close the files and leave them as they are."""
        for part in self.parts:
            part.close()

    def remove(self) -> None:
        """Remove the files of all parts."""
        for part in self.parts:
            part.remove()
        Path(f"{self.prefix}.part0.idx").unlink(missing_ok=True)


def write_index(path: Path, dtype: np.dtype[Any], lengths: Any, documents: Any, modes: Any = None) -> None:
    """Write the .idx file: header, tokens of each sequence, bytes before each sequence, the document boundaries as
    numbers of sequences (0 first), and the mode of each sequence where there are modes.

    Args:
        path: the file.
        dtype: of the tokens in the .bin file.
        lengths: int32 (sequences,), tokens of each sequence.
        documents: integers (documents,), sequences of each document.
        modes: int8 (sequences,), or None.
    """
    codes = {name: code for code, name in DTYPES.items()}
    sizes = lengths.astype(np.int64) * dtype.itemsize
    ends = np.concatenate(([0], np.cumsum(documents, dtype=np.int64)))
    with path.open("wb") as file:
        file.write(HEADER + struct.pack("<QBQQ", 1, codes[dtype.name], len(lengths), len(ends)))
        for column in (lengths, np.cumsum(sizes) - sizes, ends, *([] if modes is None else [modes])):
            column.tofile(file)
        file.flush()
        os.fsync(file.fileno())


@dataclass
class EncodingProgress:
    """The record of a run's progress; ``settings`` (from ``settings_of``) identifies the run."""

    settings: dict[str, Any]
    place: ReadPosition = field(default_factory=ReadPosition)
    dtype: str = ""
    documents: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, list[list[int]]] = field(default_factory=dict)
    """Key -> for each part, the sizes of its three files in bytes."""

    def keep(self, path: Path) -> None:
        """Replace the record in ``path`` atomically."""
        beside = path.with_name(f"{path.name}.new")
        with beside.open("w") as file:
            json.dump(vars(self), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def progress_of(path: Path, settings: dict[str, Any]) -> EncodingProgress | None:
    """The record that an interrupted run with these settings left in ``path``, or None where there is none.

    ConfigError where the record is unreadable or that run had other settings.
    """
    if not path.is_file():
        return None
    try:
        found = EncodingProgress(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} cannot be read as the record of an interrupted run; remove it") from None
    found.place = ReadPosition(*found.place)
    for name, value in settings.items():
        if found.settings.get(name) != value:
            raise ConfigError(
                f"{path} is the record of an interrupted run with {name} {found.settings.get(name)!r}, not {value!r}; "
                "give the earlier value to go on with that run, or remove the file to begin anew"
            )
    return found
