"""Watches whether the launcher of this process still lives: a rank must not outlive it.

The launcher need not be the parent (a preloaded parent forks ranks for it), so its process is watched, not
``getppid()``. A pidfd stands for one process, never for a later one with the same id.
"""

from __future__ import annotations

import os
import select


def has_ended(handle: int, timeout_s: float | None) -> bool:
    """Whether the process of a pidfd ends within ``timeout_s``; None: wait for that."""
    poll = select.poll()  # select.select() takes no descriptor above 1023
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class LauncherWatch:
    """Watches one process."""

    def __init__(self, pid: int) -> None:
        """``pid``: of the launcher, which lives now; 0: there is none that this process depends on."""
        self._gone = False
        self._handle: int | None = None
        if pid:
            try:
                self._handle = os.pidfd_open(pid)
            except OSError:
                self._gone = True

    def is_gone(self) -> bool:
        """Whether it has ended."""
        if self._handle is not None and not self._gone:
            self._gone = has_ended(self._handle, 0.0)
        return self._gone
