"""Estimates what every group has left of the step in flight, and so when slow ones should be relieved.

A leader's beat has the number of tickets that its group has begun, how long ago it began the last one, and how long one
takes. The estimate assumes that the group continues at that pace. A group that has just come, has reported no pace and
has nothing to do counts as a median one. Estimates only decide which group is asked for how many pieces; its leader
decides which it gives back. Pure: the time comes in as an argument.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from spare_megatron.control_plane.reports import Pace
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import RunningOut
from spare_megatron.protocol.relief import to_ask
from spare_megatron.protocol.view import Segments

AGAIN = 0.5
"""When a group runs out and nobody was asked, the next one is looked at after so many of the fastest group's pieces."""
AGAIN_S = 0.1
"""And not sooner: among a thousand groups a look takes a third of that."""
LATE = 2.0
"""A group that has begun nothing for more than so many of its pieces takes that long for one."""


def steady_s(
    piece_s: Mapping[int, float], own: Mapping[int, int], audits: Mapping[int, Segments], filling: int
) -> dict[int, float]:
    """Group -> seconds for a piece with a full pipeline, in a committed step.

    Args:
        piece_s: group -> seconds for its own pieces, each.
        own: group -> number of these.
        audits: group -> the pieces that it audited.
        filling: pieces of time in which a pipeline fills: stages - 1.
    """
    audited = {group: sum(map(len, segments)) for group, segments in audits.items()}
    return {
        group: one_s * own[group] / (own[group] + audited.get(group, 0) + filling) for group, one_s in piece_s.items()
    }


class Paces:
    """Follows all groups."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[int, float, Pace]] = {}
        """Group -> (its incarnation, when its last beat came, what that reported)."""
        self._looked: tuple[int, int] = (0, 0)
        """(step, epoch) in which nobody was asked when a group ran out last."""
        self._again_s = 0.0
        self._reported: dict[int, tuple[int, int]] = {}
        """Group -> (step, epoch) in which it last ran out of tickets."""

    def receive(self, group: int, incarnation: int, pace: Pace | None, now_s: float) -> None:
        """A leader's beat came."""
        if pace is not None:
            self._received[group] = incarnation, now_s, pace

    def runs_out(self, state: State, group: int, at: tuple[int, int], now_s: float) -> RunningOut | None:
        """The event that ``group`` runs out of tickets in this (step, epoch); None where nobody would be asked."""
        self._reported[group] = at
        if group not in state.holders:  # it could take nothing now, and who is asked answers only once
            return None
        if at == self._looked and now_s < self._again_s:
            return None
        return self._look(state, at, now_s)

    def holds(self, state: State, group: int, now_s: float) -> RunningOut | None:
        """The event that ``group`` has nothing to do, now that it holds the state and may take pieces; None where it
        has not run out of tickets, or nobody would be asked."""
        at = state.step_in_flight, state.epoch
        return self._look(state, at, now_s) if self._reported.get(group) == at else None

    def _look(self, state: State, at: tuple[int, int], now_s: float) -> RunningOut | None:
        if state.phase != "running" or at != (state.step_in_flight, state.epoch):
            return None
        loads = state.plan.loads().tolist()
        paces = [self._left(state, group, loads[group], now_s) for group in sorted(state.live)]
        known = [piece_s for *_, piece_s in paces if piece_s]
        if known and all(piece_s or not left for _, left, piece_s in paces):
            usual_s = statistics.median(known)
            event = RunningOut(*at, tuple((group, left, piece_s or usual_s) for group, left, piece_s in paces))
            if to_ask(state, event):
                return event
        self._looked, self._again_s = at, now_s + max(AGAIN_S, AGAIN * min(known, default=0.0))
        return None

    def left(self, state: State, now_s: float) -> dict[int, tuple[int, float]]:
        """Group -> (how many of its tickets of the step in flight it has not begun, seconds for one), of the members of
        which that is known."""
        if state.phase != "running":
            return {}
        loads = state.plan.loads().tolist()
        found = (self._left(state, group, loads[group], now_s) for group in state.live if group in self._received)
        return {group: (left, piece_s) for group, left, piece_s in found if piece_s}

    def _left(self, state: State, group: int, pieces: int, now_s: float) -> tuple[int, int, float]:
        """(group, how many tickets of its ``pieces`` and its audits it has not begun, seconds for one); 0 seconds where
        they are not known."""
        incarnation, received_s, pace = self._received.get(group, (-1, 0.0, Pace(0, 0, 0.0, 0.0)))
        planned = pieces + sum(map(len, state.audits.get(group, ())))
        if incarnation != state.live[group] or not pace.piece_s:
            return group, planned, 0.0
        if pace.step != state.step_in_flight:
            return group, planned, round(pace.piece_s, 4)
        stands = pace.since_s > LATE * pace.piece_s and pace.begun < planned
        piece_s = pace.since_s if stands else pace.piece_s
        more = (pace.since_s + now_s - received_s) / piece_s
        return group, max(0, math.ceil(planned - pace.begun - more)), round(piece_s, 4)
