"""A clock that stands still while its owner does. Pure: the time comes in as an argument.

Whoever judges others by their silence must not count time in which it did not listen itself: it was stopped, got no CPU
time, or its host slept. Its owner reads the clock whenever it receives or looks. Where two readings are further apart
than usual, the excess does not count.
"""

from __future__ import annotations

import math


class AwakeClock:
    """The time of one process without its pauses."""

    def __init__(self, now_s: float, gap_s: float) -> None:
        self.gap_s = gap_s
        """Time between two readings up to which all of it counts."""
        self.woke_s = -math.inf
        """When the last pause ended, by this clock; minus infinity where there was none."""
        self._read_s, self._paused_s = now_s, 0.0

    def at(self, now_s: float) -> float:
        """Read the clock at ``now_s``, a time that does not stand still."""
        excess_s = now_s - self._read_s - self.gap_s
        self._read_s = max(self._read_s, now_s)
        if excess_s > 0:
            self._paused_s += excess_s
            self.woke_s = now_s - self._paused_s
        return now_s - self._paused_s

    def real(self, at_s: float) -> float:
        """The time of ``at_s`` by the clock that does not stand still; later than it was where a pause lies between."""
        return at_s + self._paused_s
