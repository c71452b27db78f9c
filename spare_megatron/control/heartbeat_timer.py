"""When a heartbeat goes out: at its interval, and sooner when pieces were done.

What a group had last reported when it died is what counts as computed twice, so a group says at once that its share
is complete, and between that at most :data:`NEWS` times in an interval how far it is: at a thousand groups the
coordinator hears thousands of messages a second otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib

NEWS = 5
"""Heartbeats in one interval, at most, while nothing is complete."""


class Pulse:
    """Belongs to one event loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._last_s = interval_s, -interval_s
        self._fresh = self._complete = False
        self._changed = asyncio.Event()

    def news(self, complete: bool) -> None:
        """More pieces are done; ``complete``: all of this segment."""
        self._fresh = True
        self._complete = self._complete or complete
        self._changed.set()

    async def due(self) -> None:
        """Until the next heartbeat is due."""
        loop = asyncio.get_running_loop()
        while (left_s := self._last_s + self._gap_s() - loop.time()) > 0:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        self._last_s = loop.time()
        self._fresh = self._complete = False

    def _gap_s(self) -> float:
        if self._complete:
            return 0.0
        return self._interval_s / NEWS if self._fresh else self._interval_s
