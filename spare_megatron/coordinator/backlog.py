"""Does work that needs the disk, in order: while the disk fails, the work waits.

The coordinator may announce only what is written down, but must survive a disk that is full for a minute. So each item
of its work (an event to decide, an action to carry out) is a function that may raise OSError and has then changed
nothing. Such an item stays first in the queue and is tried again, and later items queue behind it. Heartbeats are not
such work: they are processed meanwhile.

Pure but for the event loop's timers. After any other exception nothing more is done, and the owner is called.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from spare_megatron.runtime.disk import pauses, words

Work = Callable[[], None]


class DiskFailedError(RuntimeError):
    """The disk failed for longer than the job can wait; another process should continue from the journal."""


class Backlog:
    """The queue of one coordinator's work, used in one thread."""

    def __init__(
        self,
        announce: Callable[[str], None],
        failed: Callable[[Exception], None],
        resumed: Callable[[], None],
        limit_s: Callable[[], float],
    ) -> None:
        """``failed`` gets the exception that ended the work; ``resumed`` is called when the disk works again and the
        queue is empty; ``limit_s`` returns how long to wait for the disk."""
        self._announce, self._failed, self._resumed, self._limit_s = announce, failed, resumed, limit_s
        self._works: deque[Work] = deque()
        self._working = self._over = False
        self._since_s: float | None = None
        self._moved_s = 0.0
        self._pause_s = pauses()

    @property
    def waiting(self) -> bool:
        """True while the disk fails and the job waits for it."""
        return self._since_s is not None

    def do(self, work: Work) -> None:
        """Do ``work`` now, or after all work that is in the queue."""
        self._works.append(work)
        if not self.waiting:
            self._go_on()

    def do_next(self, works: Sequence[Work]) -> None:
        """Called from inside a work: put ``works``, which belong to it, at the head of the queue."""
        self._works.extendleft(reversed(works))

    def _go_on(self) -> None:
        """Do everything in the queue, in order, until the disk fails."""
        if self._working or self._over:
            return
        self._working = True
        try:
            while self._works:
                work = self._works.popleft()
                try:
                    work()
                except OSError as error:
                    self._works.appendleft(work)
                    self._wait(error)
                    return
                self._moved_s = time.monotonic()
        except Exception as error:
            self._over = True
            self._failed(error)
            raise
        finally:
            self._working = False
        if self._since_s is not None:
            self._announce(f"the disk is back after {time.monotonic() - self._since_s:.1f} s; the job goes on")
            self._since_s, self._pause_s = None, pauses()
            self._resumed()

    def _wait(self, error: OSError) -> None:
        """The disk failed: try again after a pause, or give up at the limit."""
        now_s = time.monotonic()
        what = f"{error.filename or 'a file of the run directory'} cannot be written: {words(error)}"
        if self._since_s is None:
            self._since_s = now_s
            self._announce(f"WARNING: {what}; nothing is decided until it can be, for at most {self._limit_s():.0f} s")
        waited_s = now_s - max(self._since_s, self._moved_s)
        if waited_s > self._limit_s():
            self._over = True
            self._failed(DiskFailedError(f"{what}, for {waited_s:.1f} s; free space, or look at the file system"))
            return
        asyncio.get_running_loop().call_later(self._pause_s(), self._go_on)
