"""Estimates how fast groups are in the step in flight, and so when slow ones should be relieved.

A group's beats tell how many pieces of a step all its ranks have done. Seconds for a piece are taken between the first
and the last beat of a step that told of more, so neither the filling of a pipeline nor a late start counts; before two
such beats, those of the step before. From the last beat on a group is taken to go on at its pace. Estimates only decide
who is asked: what a group gives back is its own leader's to say. Pure: the time comes in as an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spare_megatron.control.reports import Heartbeat
from spare_megatron.controller.machine import State
from spare_megatron.controller.messages import RunningOut
from spare_megatron.controller.relief import to_ask

AGAIN = 0.5
"""When a group runs out and nobody was asked, the next one is looked at after so many of its pieces."""


@dataclass
class _Group:
    """What is known of one incarnation of a group."""

    incarnation: int
    step: int
    began_s: float
    """When it was first heard in the step."""
    first: tuple[float, int]
    """(time, pieces done) of the first beat in the step that told of any."""
    last: tuple[float, int]
    piece_s: float = 0.0
    """Of the step before; 0: not known."""

    def pace_s(self, now_s: float) -> float:
        """Seconds for a piece; 0: not known."""
        (first_s, first), (last_s, last) = self.first, self.last
        if last > first > 0:
            return (last_s - first_s) / (last - first)
        if not last:  # the first one takes at least that long
            return max(self.piece_s, now_s - self.began_s) if self.piece_s else 0.0
        return self.piece_s or (last_s - self.began_s) / last


class Paces:
    """Follows all groups."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._looked: tuple[int, int] = (0, 0)
        """(step, epoch) in which nobody was asked when a group ran out last."""
        self._again_s = 0.0

    def heartbeat(self, group: int, incarnation: int, beat: Heartbeat, now_s: float) -> None:
        """A leader's beat came."""
        known, done = self._groups.get(group), beat.pieces_done
        if known is None or known.incarnation != incarnation:
            known = self._groups[group] = _Group(incarnation, beat.step, now_s, (now_s, 0), (now_s, 0))
        if beat.step != known.step:
            pace_s = known.pace_s(now_s) or known.piece_s
            self._groups[group] = known = _Group(incarnation, beat.step, now_s, (now_s, 0), (now_s, 0), pace_s)
        if done > known.last[1]:
            known.last = now_s, done
            if not known.first[1]:
                known.first = known.last

    def running_out(self, state: State, step: int, epoch: int, now_s: float) -> RunningOut | None:
        """The event that a group has no more tickets to issue; None where nobody would be asked."""
        if state.phase != "running" or (step, epoch) != (state.step_in_flight, state.epoch):
            return None
        if self._looked == (step, epoch) and now_s < self._again_s:
            return None
        paces = tuple(self._pace(state, group, now_s) for group in sorted(state.live))
        if any(not piece_s for _, _, piece_s in paces):
            return None
        event = RunningOut(step, epoch, paces)
        if to_ask(state, event):
            return event
        self._looked, self._again_s = (step, epoch), now_s + AGAIN * min(piece_s for *_, piece_s in paces)
        return None

    def _pace(self, state: State, group: int, now_s: float) -> tuple[int, int, float]:
        """(group, pieces that it has not done, seconds for a piece); 0 seconds where they are not known."""
        known, planned = self._groups.get(group), len(state.plan.pieces(group))
        if known is None or known.incarnation != state.live[group]:
            return group, planned, 0.0
        piece_s = known.pace_s(now_s)
        if known.step != state.step_in_flight or not piece_s:
            return group, planned, round(piece_s, 4)
        since_s, done = known.last if known.last[1] else (known.began_s, 0)
        more = min((now_s - since_s) / piece_s, planned - done)
        return group, max(0, math.ceil(planned - done - more)), round(piece_s, 4)
