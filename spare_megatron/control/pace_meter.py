"""Measures how fast a group begins its tickets. Pure: the time comes in as an argument."""

from __future__ import annotations

from spare_megatron.control.reports import Pace


class PaceMeter:
    """Of the step in flight, by what the first stage says. While it fills its pipeline it begins tickets faster than it
    can go on; these do not count for its pace."""

    def __init__(self, filling: int) -> None:
        """``filling``: how many tickets fill a pipeline."""
        self._filling = filling
        self._step = self._begun = 0
        self._at_s = 0.0
        self._full: tuple[int, float] | None = None
        """(tickets begun, when) at the first word behind the filling."""
        self._piece_s = 0.0

    def note(self, step: int, begun: int, now_s: float) -> None:
        """So many tickets of the step are begun."""
        if step != self._step:
            self._step, self._begun, self._full, self._at_s = step, 0, None, now_s
        if begun <= self._begun:
            return
        self._begun, self._at_s = begun, now_s
        if self._full is not None:
            self._piece_s = (now_s - self._full[1]) / (begun - self._full[0])
        elif begun > self._filling:
            self._full = begun, now_s

    def pace(self, now_s: float) -> Pace:
        """By now."""
        return Pace(self._step, self._begun, now_s - self._at_s, self._piece_s)
