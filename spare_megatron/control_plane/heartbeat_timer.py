"""Says when a heartbeat is sent: at its interval, and at once when all pieces of a run are done.

When a group dies, the pieces of its last report count as computed twice, so a group reports at once that its run is
complete. Before that only a group that may be relieved sends heartbeats sooner for single pieces, at most :data:`NEWS`
in an interval: each takes the processor from a training thread three times, in the rank, and for the coordinator.
"""

from __future__ import annotations

import asyncio

from spare_megatron.config.timeouts import Timeouts

BEATS_PER_S = 1000
"""The most heartbeats a second that all leaders together send the coordinator while there is no news. Most of its CPU
time goes into receiving them."""
BEATS_PER_TIMEOUT = 5
"""The fewest heartbeats of a leader in one heartbeat time-out."""
NEWS = 2
"""The most heartbeats in one interval while no run is complete."""


def leader_interval_s(times: Timeouts, num_groups: int) -> float:
    """Time between two heartbeats of a leader: that of its ranks, or longer where there are many groups."""
    rare_s = min(num_groups / BEATS_PER_S, times.heartbeat_timeout_s / BEATS_PER_TIMEOUT)
    return max(times.heartbeat_interval_s, rare_s)


class Pulse:
    """The timer of one rank's or leader's heartbeats; it belongs to one event loop."""

    def __init__(self, interval_s: float, eager: bool = False) -> None:
        """``eager``: pieces bring a heartbeat forward before the run is complete."""
        self._interval_s, self._last_s, self._eager = interval_s, -interval_s, eager
        self._fresh = self._complete = False
        self._changed = asyncio.Event()

    def wants(self, complete: bool) -> bool:
        """Whether :meth:`news` would bring the next heartbeat forward. From any thread: where it returns False, the
        news are in a heartbeat that is still to be filled in."""
        return complete > self._complete or (self._eager and not self._fresh)

    def news(self, complete: bool) -> None:
        """Note that more pieces are done; ``complete``: all of this run."""
        if self.wants(complete):
            self._fresh = True
            self._complete = self._complete or complete
            self._changed.set()

    async def due(self) -> None:
        """Return when the next heartbeat is due."""
        loop = asyncio.get_running_loop()
        while (left_s := self._last_s + self._gap_s() - loop.time()) > 0:
            self._changed.clear()
            timer = loop.call_later(left_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        self._last_s = loop.time()
        self._fresh = self._complete = False

    def _gap_s(self) -> float:
        if self._complete:
            return 0.0
        return self._interval_s / NEWS if self._fresh else self._interval_s
