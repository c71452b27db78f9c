"""Work that needs the disk, done in order: while the disk fails the job waits, and then goes on.

The coordinator may say nothing that is not written down, and must not die of a disk that is full for a minute either.
So each piece of its work (an event to decide, an action to carry out) is a function that may raise OSError and has then
changed nothing. It stays first in line and is tried again; what comes meanwhile lines up behind it. Heartbeats are no
such work: they are heard meanwhile.

Pure but for the loop's timers. Any other exception is the end: it is the owner's to tell, and nothing more is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from spare_megatron.control.disk import pauses, words

Work = Callable[[], None]


class DiskFailedError(RuntimeError):
    """The disk failed for longer than the job can wait: another process is to go on from the journal."""


class Backlog:
    """All work of one coordinator, in one thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        failed: Callable[[Exception], None],
        resumed: Callable[[], None],
        limit_s: Callable[[], float],
    ) -> None:
        """``failed`` gets what ended the work; ``resumed`` is called when the disk is back and all is done;
        ``limit_s`` is how long to wait for it."""
        self._say, self._failed, self._resumed, self._limit_s = say, failed, resumed, limit_s
        self._works: deque[Work] = deque()
        self._working = self._over = False
        self._since_s: float | None = None
        self._moved_s = 0.0
        self._pause_s = pauses()

    @property
    def waiting(self) -> bool:
        """The disk fails, and the job waits for it."""
        return self._since_s is not None

    def do(self, work: Work) -> None:
        """Do it now, or after all that waits."""
        self._works.append(work)
        if not self.waiting:
            self._go_on()

    def do_next(self, works: Sequence[Work]) -> None:
        """From inside a work: what belongs to it, before all that waits."""
        self._works.extendleft(reversed(works))

    def _go_on(self) -> None:
        """Everything in line, in order, until the disk fails."""
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
            self._say(f"the disk is back after {time.monotonic() - self._since_s:.1f} s; the job goes on")
            self._since_s, self._pause_s = None, pauses()
            self._resumed()

    def _wait(self, error: OSError) -> None:
        """Try again, until the limit."""
        now_s = time.monotonic()
        what = f"{error.filename or 'a file of the run directory'} cannot be written: {words(error)}"
        if self._since_s is None:
            self._since_s = now_s
            self._say(f"WARNING: {what}; nothing is decided until it can, for at most {self._limit_s():.0f} s")
        waited_s = now_s - max(self._since_s, self._moved_s)
        if waited_s > self._limit_s():
            self._over = True
            self._failed(DiskFailedError(f"{what}, for {waited_s:.1f} s; free space, or look at the file system"))
            return
        asyncio.get_running_loop().call_later(self._pause_s(), self._go_on)
