"""Standard output and standard error whose writes do not raise when the disk fails.

Both are files of the run directory in most processes of a job, and ``print`` raises where the disk is full: in a rank
that would end its group. Lines that cannot be written are lost, and a line before the next one that can be says so.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

LOST = b"[the lines before this one are lost: %s]\n"


class _Lenient(io.RawIOBase):
    """A file descriptor on which a write that fails counts as done."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lost = ""

    def fileno(self) -> int:
        return self._handle

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._handle)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if self._lost:
                os.write(self._handle, LOST % self._lost.encode())
                self._lost = ""
            done = 0
            while done < len(view):
                done += os.write(self._handle, view[done:])
        except OSError as error:
            self._lost = error.strerror or str(error)
        return len(view)


def outlive_the_disk() -> None:
    """From now on no write to standard output or standard error raises because the disk fails. Streams that a test or a
    user has put in their place stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        lenient = io.TextIOWrapper(  # type: ignore[type-var]
            _Lenient(stream.fileno()),
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)
