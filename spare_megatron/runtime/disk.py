"""How a job survives a disk that fails for a while: it is full or remounted, or its server does not answer.

There are three kinds of files. The job waits for the journal, on which decisions are based:
:mod:`spare_megatron.coordinator.backlog`. Records on which no decision is based are kept in memory and written later
(:class:`SideFiles`). A file that cannot be read while the job runs counts as *not known now*, and is read again later
(:func:`~spare_megatron.runtime.run_directory.glance`); only a process that starts waits for it, because it can do
nothing without it (:func:`with_retries`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

START_PATIENCE_S = 30.0
"""How long a process that starts waits for a disk that fails."""
END_PATIENCE_S = 30.0
"""How long a job that is over waits for a disk that fails to take its last records."""
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0
"""The first pause between two attempts, and the longest; each pause is twice the one before."""
_LASTING = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENOTSUP,
        errno.EADDRINUSE,
    }
)
"""Errors for which a process that starts does not wait, because they do not go away."""


def words(error: OSError) -> str:
    """The error as text for users: ``ENOSPC (No space left on device)``."""
    fix = "; raise the limit: ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{errno.errorcode.get(error.errno or 0, type(error).__name__)} ({error.strerror or error}{fix})"


def pauses() -> Callable[[], float]:
    """A function that returns the length of the next pause, in seconds, at each call."""
    next_s = FIRST_PAUSE_S / 2

    def pause_s() -> float:
        nonlocal next_s
        next_s = min(MOST_PAUSE_S, 2 * next_s)
        return next_s

    return pause_s


def with_retries(work: Callable[[], T], patience_s: float = START_PATIENCE_S) -> T:
    """What ``work`` returns; while the disk fails it is tried again, and at last its error is raised. Blocks, so it is
    only for the start of a process."""
    deadline_s, pause_s = time.monotonic() + patience_s, pauses()
    while True:
        try:
            return work()
        except (OSError, json.JSONDecodeError) as error:
            lasting = isinstance(error, OSError) and error.errno in _LASTING
            if lasting or time.monotonic() > deadline_s:
                raise
        time.sleep(pause_s())


class SideFiles:
    """Files on which no decision is based. A write that fails is reported once, and tried again until it succeeds."""

    def __init__(self, announce: Callable[[str], object]) -> None:
        self._announce = announce
        self._open: dict[str, tuple[Callable[[], object], float]] = {}
        """Name of each file that is not written yet -> (how to write it, since when that fails)."""
        self._pause_s = pauses()
        self._timer: asyncio.TimerHandle | None = None

    def write(self, name: str, work: Callable[[], object]) -> None:
        """Write the file ``name`` by calling ``work``, now or later; a newer ``work`` of a name replaces the older
        one."""
        since_s = self._open[name][1] if name in self._open else None
        try:
            work()
        except OSError as error:
            if since_s is None:
                self._announce(f"{name} cannot be written: {words(error)}; the job goes on, and it is written later")
            self._open[name] = work, time.monotonic() if since_s is None else since_s
            self._try_later()
            return
        if since_s is not None:
            del self._open[name]
            self._announce(f"{name} is written again, after {time.monotonic() - since_s:.1f} s")

    def retry(self) -> bool:
        """Try to write all files that are not written yet; True when none is left."""
        for name, (work, _) in list(self._open.items()):
            self.write(name, work)
        return not self._open

    def settle(self, patience_s: float) -> bool:
        """Wait for the disk for at most ``patience_s``, at the end of a process; True when everything is written.
        Blocks."""
        deadline_s, pause_s = time.monotonic() + patience_s, pauses()
        while not self.retry():
            if time.monotonic() > deadline_s:
                self._announce(
                    f"{', '.join(self._open)}: not written within {patience_s:g} s, and now left as they are"
                )
                return False
            time.sleep(pause_s())
        return True

    def _try_later(self) -> None:
        """Retry by a timer if this thread runs an event loop; if not, :meth:`retry` or :meth:`settle` must be
        called."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._timer is None:
            self._timer = loop.call_later(self._pause_s(), self._again)

    def _again(self) -> None:
        self._timer = None
        if self.retry():
            self._pause_s = pauses()
