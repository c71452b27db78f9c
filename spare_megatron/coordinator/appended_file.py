"""A file that grows by whole lines, on a disk that may be full, slow or gone for a while.

An append is in the file whole, or not at all: what a failed or short write left is cut off. A *durable* file can be
synced as well. After a failed fdatasync nobody knows what of the data is on the disk: the kernel may have thrown the
pages away and called them clean, and the next fdatasync then succeeds for nothing ("fsyncgate", PostgreSQL 2018). So
everything since the last sync that succeeded is kept in memory, and is written again, in place, before a later sync
counts. In place, because the same bytes stand there: whoever dies meanwhile leaves the file as it was.

May assume: one writer. Promises: after an OSError the file counts as it was before the call, and the next call first
makes it so where that failed.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from spare_megatron import failpoints
from spare_megatron.control.run_directory import sync_directory

SLICE_BYTES = 65536
"""Read at once when the end of the last whole line is looked for."""


class AppendedFile:
    """The writing side."""

    def __init__(self, path: Path, place: str, durable: bool = False, settled_bytes: int | None = None) -> None:
        """Open ``path``, or make it. The end of a line that was never finished is cut off by the first append.

        Args:
            place: its name in failpoints.
            settled_bytes: of a durable file, how much at its beginning is known to be on the disk; None: all of it.
        """
        self._path, self._place, self._durable = path, place, durable
        failpoints.hit(f"{place}.open")
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            size = os.fstat(self._handle).st_size
            self._length = _whole_lines_bytes(self._handle, size)
            self._synced = self._length if settled_bytes is None else settled_bytes
            self._unsynced = [os.pread(self._handle, self._length - self._synced, self._synced)]
            self._in_doubt = self._length != size or self._synced != self._length
            if durable and size == 0:
                sync_directory(path.parent)
        except OSError as error:
            os.close(self._handle)
            raise self._named(error) from None

    def append(self, data: bytes) -> None:
        """Add ``data``, whole lines. Raises OSError where it is not in the file."""
        try:
            self._mend()
            try:
                self._write(data, self._length)
            except OSError:
                self._in_doubt = not self._cut_now()
                raise
        except OSError as error:
            raise self._named(error) from None
        self._length += len(data)
        if self._durable:
            self._unsynced.append(data)

    def sync(self) -> None:
        """Returns once all of it is on the disk. Raises OSError: nobody knows what is, since the last sync."""
        try:
            self._mend()
            self._in_doubt = True
            failpoints.hit(f"{self._place}.sync")
            os.fdatasync(self._handle)
            failpoints.hit(f"{self._place}.synced")
            self._in_doubt = False
        except OSError as error:
            raise self._named(error) from None
        self._synced = self._length
        self._unsynced.clear()

    def take_back(self, size: int) -> None:
        """The last ``size`` bytes, which one append added, do not count after all."""
        self._length -= size
        self._synced = min(self._synced, self._length)
        self._unsynced = [b"".join(self._unsynced)[: self._length - self._synced]]
        self._in_doubt = True
        self._cut_now()

    def close(self) -> None:
        """Nothing is written any more."""
        os.close(self._handle)

    def _mend(self) -> None:
        """Write again what may not be on the disk, and cut off what does not count."""
        if not self._in_doubt:
            return
        self._write(b"".join(self._unsynced), self._synced)
        self._cut()
        self._in_doubt = False

    def _write(self, data: bytes, offset: int) -> None:
        """A short write is no error yet: the write of the rest says why, or succeeds."""
        done = 0
        while done < len(data):
            written = os.pwrite(self._handle, failpoints.cut(f"{self._place}.write", data[done:]), offset + done)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
            done += written
        failpoints.hit(f"{self._place}.written")

    def _cut(self) -> None:
        failpoints.hit(f"{self._place}.cut")
        os.ftruncate(self._handle, self._length)

    def _cut_now(self) -> bool:
        """For readers of the file. Where it fails, the next call does it before anything else."""
        try:
            self._cut()
        except OSError:
            return False
        return True

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, error.filename or str(self._path))


def _whole_lines_bytes(handle: int, size: int) -> int:
    """How much of a file its whole lines are."""
    end = size
    while end > 0:
        start = max(0, end - SLICE_BYTES)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
