"""Slow groups are relieved inside simulated steps by the protocol machine's own decisions (``--relief``).

The protocol machine decides who is asked for how much, and who takes it, as in a job. What its shell and the leaders do
is modelled: a group reports that it runs out when half of its pieces are begun and again when all are, and says both
anew in a new epoch; the coordinator looks at once, and where nobody is asked not again for half a piece; groups answer
at once, with pieces that they have not begun. The coordinator knows how far everybody is, which in a job it estimates.

At a thousand groups a look takes a tenth of a second, so jobs of many steps are simulated with a model of the outcome
instead (:mod:`spare_megatron.simulator.balance`).
"""

from __future__ import annotations

import numpy as np

from spare_megatron.coordinator.paces import AGAIN, AGAIN_S
from spare_megatron.planning.endured import Floats
from spare_megatron.protocol.messages import GaveBack, RunningOut
from spare_megatron.protocol.rebalance import first_given, unbegun
from spare_megatron.protocol.relief import ROUNDS
from spare_megatron.simulator.balance import Ints
from spare_megatron.simulator.job_control import JobControl

EXACT = 1e-9
"""A share of a piece that counts as nothing."""


class RelievedSteps:
    """Follows the steps of one trial."""

    def __init__(self, control: JobControl) -> None:
        self._control = control
        self._at = (0, 0, 0)
        """(step, epoch, holders) in which was looked last."""
        self._since_s = -np.inf
        """When it began, or until when nobody is looked at again."""

    def next_s(self, now_s: float, total: Ints, finish: Floats, per_piece: Floats) -> float:
        """When the coordinator looks next; infinite where it asks nobody any more in this step.

        Args:
            total: [N] pieces of every group in this step.
            finish: [N] when they are computed, in seconds.
            per_piece: [N] seconds per piece.
        """
        state = self._control.state
        if state.relief.rounds >= ROUNDS:
            return np.inf
        at = state.step_in_flight, state.epoch, len(state.holders)
        reported_anew = at != self._at
        if reported_anew:
            self._at, self._since_s = at, now_s
        holders = list(state.holders)
        total, finish, per_piece = total[holders], finish[holders], per_piece[holders]
        half = finish - (total // 2 + 1) * per_piece
        words = np.concatenate([half, finish - per_piece])
        if reported_anew:
            return max(float(words.min()), self._since_s)
        later = words[words >= self._since_s]
        return float(later.min()) if len(later) else np.inf

    def look(self, at_s: float, total: Ints, finish: Floats, per_piece: Floats) -> None:
        """The coordinator looks; where pieces move, ``total`` and ``finish`` are changed."""
        control = self._control
        state = control.state
        left = np.minimum(np.floor(np.maximum(finish - at_s, 0.0) / per_piece + EXACT).astype(np.int64), total)
        paces = tuple((group, int(left[group]), float(per_piece[group])) for group in sorted(state.live))
        control.feed(RunningOut(state.step_in_flight, state.epoch, paces))
        asked = control.state.relief.asked
        if not asked:
            self._since_s = at_s + max(AGAIN_S, AGAIN * float(per_piece[list(state.live)].min()))
            return
        for group, ask in sorted(asked.items()):
            free = first_given(unbegun(state.segments_of(group), int(left[group])), state.job.pieces_per_shard)
            control.feed(GaveBack(group, state.live[group], state.step_in_flight, ask, tuple(free[: ask.pieces])))
        more = control.state.plan.loads() - total
        takers = more > 0
        finish[takers] = np.maximum(finish[takers], at_s)
        finish += more * per_piece
        total += more
