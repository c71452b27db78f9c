"""How much a donor keeps of one offer, and what it says when a learner does not keep up. Pure: time and sizes are
arguments.

A learner that can keep up at all has had the state before more results come up than the state's own size: they come no
faster than it takes them, so in the time of the state's transfer they are no more bytes than the state. The budget is
twice that, because the learner begins late and its first steps are slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spare_megatron.config.byte_units import in_bytes
from spare_megatron.config.plural import counted
from spare_megatron.planning.return_memory import most_result_bytes


@dataclass(frozen=True)
class OfferBudget:
    """The limits of one offer on one rank of a donor."""

    step: int
    """Of the state."""
    parts: int
    """Donors of the offer, each of which gives as much."""
    state_bytes: int
    """Of this donor's part of the state."""
    began_s: float
    """When the offer was opened; the copies of results begin with the step in flight then."""

    def most_bytes(self, result_bytes: int) -> int:
        """The bytes of results that may be kept, of parts of ``result_bytes`` each."""
        return int(most_result_bytes(self.state_bytes, result_bytes))

    def too_much(
        self,
        kept: Mapping[int, int],
        given_bytes: int,
        result_bytes: int,
        step: int,
        now_s: float,
        most_snapshot_shards: int,
    ) -> str:
        """Why the result of ``step`` is not to be kept too; empty where it may.

        Args:
            kept: the bytes of each snapshot shard that the learner has not taken, by step.
            given_bytes: what this rank has given of the offer so far.
            result_bytes: of this donor's part of the result.
            most_snapshot_shards: how many snapshot shards may be kept, however small they are.
        """
        results = [size for at, size in kept.items() if at > self.step]
        if len(kept) < most_snapshot_shards and sum(results) + result_bytes <= self.most_bytes(result_bytes):
            return ""
        passed_s = max(now_s - self.began_s, 1e-3)
        step_s = passed_s / max(1, step - self.step)
        whole = result_bytes * self.parts
        return (
            f"the learner has not taken {counted(len(results), 'result')}, {in_bytes(sum(results))} here; it cannot "
            f"keep up with the steps: a result of {in_bytes(whole)} each {step_s:.3g} s needs "
            f"{in_bytes(whole / step_s)}/s at each position, and about "
            f"{in_bytes(given_bytes * self.parts / passed_s)}/s were had"
        )
