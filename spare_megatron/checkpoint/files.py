"""Writes the files of a checkpoint and takes their sizes and checksums meanwhile.

A file that ``create`` opened is on the disk (fsync) when its ``with`` block ends. Its entry in :attr:`Files.entries` is
computed from the bytes in memory, so damage by a disk or a network shows when the file is read again.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import sync_path

_CHUNK_BYTES = 1 << 22

Create = Callable[[str], contextlib.AbstractContextManager[BinaryIO]]
"""Opens a file of a checkpoint, by name, for writing."""

ManifestEntry = Mapping[str, int]
"""``{"bytes": size, "crc32": checksum}`` of one file, as the checkpoint manifest has it."""


class Files:
    """The files that one rank writes into one directory, and their manifest entries. Not thread-safe."""

    def __init__(self, directory: Path, moved: Callable[[], None] = lambda: None) -> None:
        """``moved`` is called whenever the disk has taken something."""
        self.directory, self._moved = directory, moved
        self.entries: dict[str, ManifestEntry] = {}

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open file ``name`` for writing, front to back; OSError as from any file."""
        with (self.directory / name).open("wb") as file:
            checked = _Checked(file, self._moved)
            yield cast(BinaryIO, checked)
            file.flush()
            failpoints.hit("checkpoint.file")
            os.fsync(file.fileno())
        self._moved()
        self.entries[name] = {"bytes": checked.position, "crc32": checked.crc}


class _Checked(io.RawIOBase):
    """A file that is written from front to back, with the size and checksum of what was written so far."""

    def __init__(self, file: BinaryIO, moved: Callable[[], None]) -> None:
        self._file, self._moved = file, moved
        self.crc, self.position = 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.position += size
        self._moved()
        return size

    def tell(self) -> int:
        return self.position


def sync_files(directory: Path) -> None:
    """Wait until the files below ``directory``, and their names, are on the disk."""
    for path in (directory, *directory.rglob("*")):
        sync_path(path)


def entry_of(path: Path) -> ManifestEntry:
    """The manifest entry of an existing file; OSError when it cannot be read."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return {"bytes": size, "crc32": crc}


def entries_of(directory: Path) -> dict[str, ManifestEntry]:
    """The manifest entries of all files below ``directory``, by relative name."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): entry_of(path) for path in paths}
