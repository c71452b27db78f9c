"""Standard output and standard error whose writes neither raise because the disk fails, or what is written is no text
of the locale, nor wait for whoever reads them.

Both are files of the run directory in most processes of a job, and ``print`` raises where the disk is full: in a rank
that would end its group. Lines that cannot be written are lost, and a line before the next one that can be says so.

Where they are a terminal or a pipe, a write waits for its reader, which may be for hours: Ctrl-S, a pager, a connection
that is dead and not known to be. A launcher or coordinator that waited would see no exit and take no signal meanwhile.
So a thread writes there, for which nobody waits longer than :data:`SLOW_S`. What it has not written is kept, up to
:data:`KEPT_BYTES`, and at the end of the process the reader has :data:`END_S` to take it.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

LOST = b"[the lines before this one are lost: %s]\n"
SLOW_S = 0.2
KEPT_BYTES = 1 << 20
END_S = 30.0


class _Lenient(io.RawIOBase):
    """A file descriptor on which a write that fails counts as done."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lost = ""
        waits = not stat.S_ISREG(os.fstat(handle).st_mode)
        self._beside = _Beside(self._write_out) if waits else None

    def fileno(self) -> int:
        return self._handle

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._handle)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._beside is None:
            self._write_out(view)
        else:
            self._beside.write(bytes(view))
        return len(view)

    def _write_out(self, view: bytes | memoryview) -> None:
        try:
            if self._lost:
                os.write(self._handle, LOST % self._lost.encode())
                self._lost = ""
            done = 0
            while done < len(view):
                done += os.write(self._handle, view[done:])
        except OSError as error:
            self._lost = error.strerror or str(error)


class _Beside:
    """Writes in a thread of its own. Nobody waits for what is written while an earlier write is slow."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write_out = write
        self._thread: threading.Thread | None = None
        self._slow = False
        """Whether somebody has waited in vain since all was written last."""
        self._full = False
        """Whether something was lost that no line says yet."""
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self._settle)

    def write(self, data: bytes) -> None:
        """Write, now or later. What does not fit into the room is lost, and so is all else until half of it is free."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spare-output", daemon=True)
                self._thread.start()
            room = KEPT_BYTES // 2 if self._full else KEPT_BYTES
            if self._kept + len(data) > room:
                self._full = True
                return
            if self._full:
                self._full = False
                data = LOST % b"nobody has read them" + data
            self._waiting.append(data)
            self._kept += len(data)
            self._changed.notify_all()
            if not self._slow:
                self._slow = not self._changed.wait_for(lambda: not self._waiting, SLOW_S)

    def _begin(self) -> None:
        """Also in a forked process, which has neither the thread nor what it has not written."""
        self._changed = threading.Condition()
        self._waiting = deque[bytes]()
        self._kept = 0
        self._slow = self._full = False
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                data = self._waiting[0]
            self._write_out(data)
            with self._changed:
                self._kept -= len(self._waiting.popleft())
                self._slow = self._slow and bool(self._waiting)
                self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, END_S)


def outlive_the_disk() -> None:
    """From now on no write to standard output or standard error raises because the disk fails or the locale lacks a
    character, or waits for a reader. Streams that a test or a user has put in their place stay as they are; those that
    were closed lead nowhere."""
    _fill_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w")  # noqa: SIM115 - for the lifetime of the process
            setattr(sys, name, stream)
            continue
        if stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        lenient = io.TextIOWrapper(  # type: ignore[type-var]
            _Lenient(stream.fileno()),
            stream.encoding,
            "backslashreplace" if stream.errors == "strict" else stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)


def _fill_closed() -> None:
    """Open the null device in the place of each standard stream that is closed: the next file that is opened would be
    it, and get what a library writes there."""
    for handle in range(3):
        with contextlib.suppress(OSError):
            os.fstat(handle)
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
        os.set_inheritable(opened, True)
