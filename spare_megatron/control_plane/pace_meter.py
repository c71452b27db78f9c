"""Measures how fast a group begins its tickets. Pure: the time comes in as an argument."""

from __future__ import annotations

from spare_megatron.control_plane.reports import Pace


class PaceMeter:
    """Of the step in flight, by what the first stage says. While it fills its pipeline it takes tickets faster than it
    can go on, and the next one waits for the pipeline's first result; these do not count for its pace."""

    def __init__(self, filling: int) -> None:
        """``filling``: how many tickets fill a pipeline."""
        self._filling = filling
        self._step = self._begun = 0
        self._began_s = self._at_s = 0.0
        """When the first and the last ticket of the step were begun."""
        self._full: tuple[int, float] | None = None
        """(tickets begun, when) at the first word behind the filling."""
        self._piece_s = 0.0
        self._rested = False
        """Whether there was a time in this step without a ticket to begin."""

    def note(self, step: int, begun: int, now_s: float) -> None:
        """So many tickets of the step are begun."""
        if step != self._step:
            self._step, self._begun, self._full, self._rested = step, 0, None, False
            self._began_s = self._at_s = now_s
        if begun <= self._begun:
            return
        self._begun, self._at_s = begun, now_s
        if self._full is not None:
            self._piece_s = (now_s - self._full[1]) / (begun - self._full[0])
        elif begun > self._filling + 1:
            self._full = begun, now_s

    def rest(self, now_s: float) -> None:
        """There is no ticket to begin by now: that time counts for nothing."""
        self._at_s, self._full, self._rested = now_s, None, True

    def pace(self, now_s: float) -> Pace:
        """By now. Before two words behind the filling: that of the step before, or what the tickets so far took where
        that was longer."""
        piece_s = self._piece_s
        if piece_s and not self._rested and (self._full is None or self._begun == self._full[0]):
            piece_s = max(piece_s, (now_s - self._began_s) / max(1, self._begun))
        through = self._begun if self._rested else max(0, self._begun - self._filling)
        return Pace(self._step, through, now_s - self._at_s, piece_s)
