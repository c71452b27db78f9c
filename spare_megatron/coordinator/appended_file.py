"""Appends whole lines to a file, on a disk that may be full, slow or gone for a while.

An append is in the file as a whole or not at all: what a failed or short write left is cut off. A *durable* file can be
synced as well. After a failed fdatasync nobody knows which data are on the disk: the kernel may have dropped the pages
and marked them clean, and the next fdatasync then succeeds without having written them ("fsyncgate", PostgreSQL 2018).
So everything since the last successful sync is kept in memory, and is written again in place before a later sync
counts. It is written in place because the same bytes are there: a process that dies meanwhile leaves the file as it
was.

May assume: one writer. Promises: after an OSError the content of the file is that before the call; where it could not
be restored at once, the next call restores it first.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import sync_path

SLICE_BYTES = 65536
"""Size of one read when the end of the last whole line is searched."""


class AppendedFile:
    """The writing side."""

    def __init__(self, path: Path, place: str, durable: bool = False, durable_bytes: int | None = None) -> None:
        """Open ``path``, or create it. The first append or sync cuts off an unfinished line at its end.

        Args:
            place: the name of the file in failpoints.
            durable_bytes: how many bytes at the beginning of a durable file are known to be on the disk; None: all.
        """
        self._path, self._place, self._durable = path, place, durable
        failpoints.hit(f"{place}.open")
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            size = os.fstat(self._handle).st_size
            self._length = _whole_lines_bytes(self._handle, size)
            self._synced = self._length if durable_bytes is None else durable_bytes
            self._unsynced = [os.pread(self._handle, self._length - self._synced, self._synced)]
            self._in_doubt = self._length != size or self._synced != self._length
            if durable and size == 0:
                sync_path(path.parent)
        except OSError as error:
            os.close(self._handle)
            raise self._named(error) from None

    def append(self, data: bytes) -> None:
        """Append ``data``, whole lines. Raises OSError where that failed; the data do not count then."""
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
        """Return once all data are on the disk. After an OSError it is unknown which data since the last sync are."""
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
        """Undo the last append, which added ``size`` bytes."""
        self._length -= size
        self._synced = min(self._synced, self._length)
        self._unsynced = [b"".join(self._unsynced)[: self._length - self._synced]]
        self._in_doubt = True
        self._cut_now()

    def mend(self) -> None:
        """Return once the content is what it should be, also where a failed append could not be cut off at once. Raises
        OSError."""
        try:
            self._mend()
        except OSError as error:
            raise self._named(error) from None

    @property
    def length(self) -> int:
        """Length of the whole lines in the file."""
        return self._length

    def close(self) -> None:
        """Close the file; nothing may be written after it."""
        os.close(self._handle)

    def _mend(self) -> None:
        """Write the data again that may not be on the disk, and cut off what failed or undone appends left."""
        if not self._in_doubt:
            return
        self._write(b"".join(self._unsynced), self._synced)
        self._cut()
        self._in_doubt = False

    def _write(self, data: bytes, offset: int) -> None:
        """Write all of ``data``. A short write is no error: writing the rest either succeeds or raises the cause."""
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
        """Cut at once, for readers of the file; True where that succeeded. Else the next call does it first."""
        try:
            self._cut()
        except OSError:
            return False
        return True

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, error.filename or str(self._path))


def _whole_lines_bytes(handle: int, size: int) -> int:
    """How many bytes the whole lines of a file take."""
    end = size
    while end > 0:
        start = max(0, end - SLICE_BYTES)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
