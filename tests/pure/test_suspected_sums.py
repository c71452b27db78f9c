"""A rank looks at its accumulators when a result is damaged, and before it sums again: others may have seen that first.

The training thread of one rank, with orders and sums of this test.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from spare_megatron.collectives.reduction import ReduceOutcome
from spare_megatron.protocol.member import Orders, first_orders, take_commit, take_tickets, take_view
from spare_megatron.protocol.messages import JobSpec, ReductionResult
from spare_megatron.protocol.tickets import Begin, Close, TicketStream
from spare_megatron.protocol.view import View
from spare_megatron.worker.step import StepRunner
from tests.pure.learner_world import RankEngine

SPEC = JobSpec(3, 4, (0, 1), "microbatch", 0, 9, 1, "f")
VIEW = View(1, 0, 1, 1, ((0, 0), (1, 0), (2, 0)), (0, 0), 1, ((),), ())
BEGUN = take_tickets(take_view(first_orders(1, 0), VIEW)[0], TicketStream(0, (Begin(1), Close(1))))[0]


def anew(orders: Orders) -> Orders:
    """The same members, in the next epoch."""
    newer = take_view(orders, replace(VIEW, epoch=2))[0]
    return take_tickets(newer, TicketStream(2, (Close(2),)))[0]


class CorruptError(Exception):
    """The group has reported that it is corrupt."""


class Rank:
    """Session, replicas and engine of one rank; a sum finds a newer epoch the first time where it is ``overtaken``."""

    spec, rows, tickets_low = SPEC, (0,), 0

    def __init__(self, damaged_results: int, damaged: bool, overtaken: bool) -> None:
        self.orders = BEGUN
        self.damaged_results, self.damaged, self.overtaken = damaged_results, damaged, overtaken
        self.looked: list[bool] = []
        """Whether the accumulators were suspected, of each look at them."""
        self.reported: list[ReductionResult] = []
        engine: Any = RankEngine(lambda mine: [mine])
        engine.step, engine.accumulators_fault, engine.result_fault = 0, self.accumulators_fault, self.result_fault
        self.runner = StepRunner(engine, self, self, lambda *_: None)  # type: ignore[arg-type]

    def progress(self, phase: str, step: int, pieces_done: int) -> None:
        pass

    def read_tickets(self, number: int) -> None:
        pass

    def accumulators_fault(self, *, suspected: bool) -> str:
        self.looked.append(suspected)
        return "the accumulator is damaged" if self.damaged and suspected else ""

    def result_fault(self, reduced: Any) -> str:
        self.damaged_results -= 1
        return "the result is damaged" if self.damaged_results >= 0 else ""

    def reduce(self, epoch: int, request: Any, stale: Any) -> ReduceOutcome:
        if self.overtaken:
            self.overtaken, self.orders = False, anew(self.orders)
            assert stale()
            return ReduceOutcome(ok=False, stale=True)
        return ReduceOutcome(ok=True, stale=False, tensors=(torch.zeros(1),))

    def reduced(self, result: ReductionResult, figures: Any, row: int) -> None:
        self.reported.append(result)

    def wait(self, version: int) -> Orders:
        """What follows a vote: a commit, or the next epoch. What follows a corrupt one is not played."""
        newest, orders = self.reported[-1], self.orders
        if newest.corrupt:
            raise CorruptError
        committed = newest.ok and take_commit(orders, 1, newest.epoch, leave=False)[0]
        self.orders = committed or anew(orders)
        return self.orders


def outcome(rank: Rank) -> list[tuple[int, bool, bool, str]]:
    """Epoch, ok, corrupt and detail of each of its reports."""
    with suppress(CorruptError):
        rank.runner.run(1)
    return [(one.epoch, one.ok, one.corrupt, one.detail) for one in rank.reported]


def test_nobody_looks_while_nothing_is_wrong() -> None:
    rank = Rank(damaged_results=0, damaged=False, overtaken=False)
    assert outcome(rank) == [(1, True, False, "")]
    assert rank.looked == [False]


def test_a_damaged_result_of_good_accumulators_is_reduced_once_more() -> None:
    rank = Rank(damaged_results=1, damaged=False, overtaken=False)
    assert outcome(rank) == [(1, False, False, "the result is damaged"), (2, True, False, "")]
    assert rank.looked == [False, True, True]


def test_the_rank_whose_accumulators_are_damaged_says_so() -> None:
    rank = Rank(damaged_results=1, damaged=True, overtaken=False)
    assert outcome(rank) == [(1, False, True, "the accumulator is damaged")]


def test_it_says_so_in_the_next_epoch_where_others_were_faster() -> None:
    """They have seen the damaged result and voted, and the next epoch ended this rank's sum before it could look."""
    rank = Rank(damaged_results=0, damaged=True, overtaken=True)
    assert outcome(rank) == [(2, False, True, "the accumulator is damaged")]
    assert rank.looked == [False, True]
