"""The data files that the preprocess tool writes, and what it keeps beside them to go on after it was interrupted.

While it runs, each part of the output is ``PREFIX_KEY_document.partN.bin`` with two files of counts beside it, and
``PREFIX.progress`` says how far they are good: how many bytes of each were written, and where in the input that was.
The record is replaced as a whole after what it counts is on the disk, so at any moment it is true of the files. The
next run cuts the files to it and reads on from there; one with other settings or changed input is refused. It is
removed when every pair lies ready to be renamed.

The finished pair is byte for byte what megatron-core's ``IndexedDatasetBuilder`` writes.
"""

from __future__ import annotations

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
"""Files of a part: tokens; int32 tokens of each sequence; int32 sequences of each document."""


class PartFiles:
    """Documents one behind the other, in files that only grow; ``sizes`` (bytes of each) cuts them to what is good."""

    def __init__(self, path: str, sizes: list[int] | None) -> None:
        self.paths = [Path(f"{path}.{kind}") for kind in KINDS]
        self.files: list[BinaryIO] = []
        for file_path, size in zip(self.paths, sizes or [0] * len(KINDS), strict=True):
            file = file_path.open("r+b" if sizes else "wb", buffering=WRITE_BYTES)
            self.files.append(file)
            if file.seek(0, os.SEEK_END) < size:
                raise ConfigError(f"{file_path} is shorter than its record says; remove it and its record, begin anew")
            file.truncate(size)
            file.seek(size)

    def write(self, tokens: bytes, lengths: Any, documents: Any) -> None:
        for file, data in zip(self.files, (tokens, lengths, documents), strict=True):
            file.write(data)

    def sizes(self) -> list[int]:
        """After everything is on the disk."""
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


class Output:
    """The pair of files of one key, collected in parts; it takes its names when it is finished."""

    def __init__(self, prefix: str, dtype: str, partitions: int, sizes: list[list[int]] | None = None) -> None:
        self.prefix, self.dtype, self.documents = prefix, np.dtype(dtype), 0
        self.parts = [PartFiles(f"{prefix}.part{n}", sizes[n] if sizes else None) for n in range(partitions)]

    def add(self, block: Encoded) -> None:
        """The documents of a block, dealt out to the parts in turn."""
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
        """Make the pair under the first part's name, from which nothing can be gone on with any more."""
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
        """Give the pair its name, the .bin first, and remove the rest."""
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for end in ("bin", "idx"):
            Path(f"{self.prefix}.part0.{end}").replace(f"{self.prefix}.{end}")
        self.remove()

    def close(self) -> None:
        """The files, as they are."""
        for part in self.parts:
            part.close()

    def remove(self) -> None:
        """The parts."""
        for part in self.parts:
            part.remove()
        Path(f"{self.prefix}.part0.idx").unlink(missing_ok=True)


def write_index(path: Path, dtype: np.dtype[Any], lengths: Any, documents: Any, modes: Any = None) -> None:
    """The .idx file: header, tokens of each sequence, bytes before each, sequences before and behind each document, and
    the mode of each sequence where there are modes.

    ``lengths`` int32 (sequences,); ``documents`` integers (documents,), sequences of each; ``modes`` int8 (sequences,).
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
    """How far a run is; ``settings`` says of which run."""

    settings: dict[str, Any]
    place: ReadPosition = field(default_factory=ReadPosition)
    dtype: str = ""
    documents: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, list[list[int]]] = field(default_factory=dict)
    """Key -> sizes of the files of each part."""

    def keep(self, path: Path) -> None:
        """Replace the record."""
        beside = path.with_name(f"{path.name}.new")
        with beside.open("w") as file:
            json.dump(vars(self), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def progress_of(path: Path, settings: dict[str, Any]) -> EncodingProgress | None:
    """What an interrupted run with these settings left; None: nothing. ConfigError where it was another run."""
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
                f"{path} is of an interrupted run with {name} {found.settings.get(name)!r}, not {value!r}; "
                "give what it had and it goes on, or remove that file to begin anew"
            )
    return found
