"""What a leader knows of its ranks from their beats, and the one beat that it sends for the group. Pure: time comes in
as an argument.

A group is as far as its last rank, and dead when one rank is. So the beat of a group names at most two ranks, whatever
the size of the group: the rank furthest behind, with how long it has stood still, and, if one is late, the rank that
has been silent for longest. Both durations are by the leader's clock and leave out its own pauses: a leader that was
stopped could not receive beats, and does not count that time as a rank's silence.
"""

from __future__ import annotations

import math

from spare_megatron.control_plane import reports
from spare_megatron.control_plane.group_aggregation import Tally
from spare_megatron.runtime.awake_clock import AwakeClock

GAP = 2
"""How many of its own intervals may lie between two things that a leader receives or does before it counts as a
pause."""
LATE = 2
"""A rank is late after a silence of so many heartbeat intervals. Fewer than the three that a heartbeat time-out lasts
at least, so that the coordinator learns of a silence before it is too long."""
_NOWHERE = (math.inf,)


class RankLedger:
    """The last beat of each rank of one group, when it came, and when the rank moved last. Beats cost O(1)."""

    def __init__(self, group_size: int, interval_s: float, own_interval_s: float, now_s: float) -> None:
        """``interval_s``: time between two beats of a rank; ``own_interval_s``: of the group."""
        self._clock = AwakeClock(now_s, GAP * own_interval_s)
        self._late_s = LATE * interval_s
        self._tally = Tally(group_size)
        self._received_s = [now_s] * group_size
        self._moved_s = [now_s] * group_size
        self._beats: list[reports.Beat | None] = [None] * group_size
        self._places: list[tuple[float, ...]] = [_NOWHERE] * group_size
        """How far each rank is, as a sort key. Of two at the same place the one that has stood still longer is
        behind."""
        self._waiting = 0

    def arrived(self, position: int, now_s: float) -> None:
        """A rank has connected, for the first time or again."""
        self._received_s[position] = self._clock.at(now_s)

    def receive(self, position: int, beat: reports.Beat, now_s: float) -> tuple[bool, bool]:
        """Take one rank's beat.

        Returns:
            Whether the group as a whole is further than before, and whether all its ranks are complete now.
        """
        at_s, known = self._clock.at(now_s), self._beats[position]
        self._received_s[position] = at_s
        if known is None or known.counter != beat.counter:
            self._moved_s[position] = at_s
        self._waiting += (beat.phase in reports.WAITING) - (known is not None and known.phase in reports.WAITING)
        self._beats[position] = beat
        moved_s = self._moved_s[position]
        self._places[position] = (beat.step, reports.PHASE_ORDER.get(beat.phase, 0), moved_s, beat.in_phase, position)
        return self._tally.add(position, beat.step, beat.pieces_done, beat.phase in reports.COMPLETE)

    def excuse(self, now_s: float) -> None:
        """What the ranks have not done until now was waiting for data: none has stood still. O(ranks)."""
        at_s = self._clock.at(now_s)
        self._moved_s = [at_s] * len(self._moved_s)
        self._places = [p if p is _NOWHERE else (*p[:2], at_s, *p[3:]) for p in self._places]

    def heartbeat(self, now_s: float) -> reports.Heartbeat:
        """The beat of the group. O(ranks)."""
        at_s = self._clock.at(now_s)
        received_s = min(self._received_s)
        late = (
            reports.LateRank(self._received_s.index(received_s), at_s - received_s)
            if at_s - received_s > self._late_s
            else None
        )
        return reports.Heartbeat(self._tally.step, self._tally.done, self._waiting, self._last(at_s), late)

    def _last(self, at_s: float) -> reports.LastRank | None:
        position = self._places.index(min(self._places))
        beat = self._beats[position]
        if beat is None:
            return None
        still_s = at_s - self._moved_s[position]
        return reports.LastRank(position, beat.step, beat.phase, beat.counter, beat.pieces_done, still_s)


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
        """(tickets begun, when) at the first report behind the filling."""
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

    def pace(self, now_s: float) -> reports.Pace:
        """By now. Before two reports behind the filling: that of the step before, or what the tickets so far took where
        that was longer."""
        piece_s = self._piece_s
        if piece_s and not self._rested and (self._full is None or self._begun == self._full[0]):
            piece_s = max(piece_s, (now_s - self._began_s) / max(1, self._begun))
        through = self._begun if self._rested else max(0, self._begun - self._filling)
        return reports.Pace(self._step, through, now_s - self._at_s, piece_s)
