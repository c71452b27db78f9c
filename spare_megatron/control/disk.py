"""Disks that fail for a while: full, remounted, a server of theirs that does not answer.

Three kinds of files, three answers. What decisions stand on (the journal) makes the job wait: see
:mod:`spare_megatron.coordinator.backlog`. Records that nobody decides by are kept in memory and written later
(:class:`SideFiles`). What is read while a job runs is *not known now*, and is read again
(:func:`~spare_megatron.control.run_directory.glance`); only at the start, where nothing can be done without it, one
waits for it (:func:`patiently`).
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
"""How long a process that starts waits for a disk."""
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0
"""Between two attempts: the first pause, which doubles, and the longest."""
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
"""Errors that no waiting mends, when a process starts."""


def words(error: OSError) -> str:
    """What failed, for people: ``ENOSPC (No space left on device)``."""
    return f"{errno.errorcode.get(error.errno or 0, type(error).__name__)} ({error.strerror or error})"


def pauses() -> Callable[[], float]:
    """A function that tells the next pause."""
    next_s = FIRST_PAUSE_S / 2

    def pause_s() -> float:
        nonlocal next_s
        next_s = min(MOST_PAUSE_S, 2 * next_s)
        return next_s

    return pause_s


def patiently(work: Callable[[], T], patience_s: float = START_PATIENCE_S) -> T:
    """What ``work`` returns, tried again while the disk fails; raises its last error. Blocks: for the start alone."""
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
    """Files that nobody decides by. A write that fails is said once, and is tried again until it succeeds."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._open: dict[str, tuple[Callable[[], object], float]] = {}
        """What is not written yet, by name: how to write it, and since when it fails."""
        self._pause_s = pauses()
        self._timer: asyncio.TimerHandle | None = None

    def write(self, name: str, work: Callable[[], object]) -> None:
        """Write ``name`` now, or later; a newer ``work`` of that name takes the place of an older one."""
        since_s = self._open[name][1] if name in self._open else None
        try:
            work()
        except OSError as error:
            if since_s is None:
                self._say(f"{name} cannot be written: {words(error)}; the job goes on, and it is written later")
            self._open[name] = work, time.monotonic() if since_s is None else since_s
            self._try_later()
            return
        if since_s is not None:
            del self._open[name]
            self._say(f"{name} is written again, after {time.monotonic() - since_s:.1f} s")

    def retry(self) -> bool:
        """Try all that is not written; True when there is nothing left."""
        for name, (work, _) in list(self._open.items()):
            self.write(name, work)
        return not self._open

    def settle(self, patience_s: float) -> bool:
        """At the end: wait so long for the disk; True when everything is written. Blocks."""
        deadline_s, pause_s = time.monotonic() + patience_s, pauses()
        while not self.retry():
            if time.monotonic() > deadline_s:
                self._say(f"{', '.join(self._open)}: not written within {patience_s:g} s, and now left as they are")
                return False
            time.sleep(pause_s())
        return True

    def _try_later(self) -> None:
        """In a loop by itself; elsewhere with the next write, or at the end."""
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
