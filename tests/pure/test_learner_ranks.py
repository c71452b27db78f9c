"""The ranks of a group that comes back stay together, whenever each of them learns of what happens to its offers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spare_megatron.protocol.member import Orders, first_orders, take_view
from spare_megatron.protocol.view import Offer, View
from spare_megatron.transfer.transport import FetchError, SnapshotShard
from spare_megatron.worker.catch_up import CatchUp
from spare_megatron.worker.group_rounds import alone
from spare_megatron.worker.step import Joined
from tests.pure.learner_world import BACK, SPEC, THREE, LearnerWorld, RankEngine


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_go_through_offers_and_admission_together(size: int, seed: int) -> None:
    world = LearnerWorld(size, seed)
    assert world.run() == [SPEC.last_step] * size, world.reasons
    assert world.state.outcome == "finished", world.state.outcome_reason
    assert any("joins in epoch" in reason for reason in world.reasons)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("size", [1, 3])
def test_a_group_that_is_called_goes_on_with_the_state_that_it_holds(size: int, seed: int) -> None:
    """Group 2 dies at any moment, also when group 1 has just given up an offer whose state, t*, it holds."""
    world = LearnerWorld(size, seed, THREE)
    assert world.run() == [SPEC.last_step] * size, world.reasons
    assert world.state.outcome == "finished", world.state.outcome_reason


OFFER = Offer(BACK, 1, 5, ((0, 0),))
LEARNS = View(*BACK, 3, 1, ((0, 0), (2, 0)), (5, 2), 6, (), (), OFFER)


class CalledWhileItGivesUp:
    """A session and a transport: the state of the offer comes, then no result can be had, and the orders that the
    coordinator made before it received so come after the rank has reported it."""

    spec, rows = SPEC, (0,)

    def __init__(self, then: View) -> None:
        self.orders, self.then = take_view(first_orders(*BACK), LEARNS, "", ("",))[0], then
        self.reported: list[Any] = []

    def wait(self, version: int, timeout_s: float | None = None) -> Orders:
        assert "void" in self.reported, "nothing comes before"
        assert self.orders.view != self.then, "the rank waits for ever"
        self.orders = take_view(self.orders, self.then, "", ("",) * (self.then.offer is not None))[0]
        return self.orders

    def progress(self, phase: str, step: int, pieces_done: int) -> None:
        pass

    def ready(self) -> None:
        self.reported.append("ready")

    def caught_up(self, number: int, step: int, digest: str, row: int | None = None) -> None:
        self.reported.append((number, step))

    def void(self, number: int, detail: str) -> None:
        self.reported.append("void")

    def fetch(self, number: int, step: int, sources: Any, place: Any, over: Any) -> SnapshotShard:
        if step > 5:
            raise FetchError("donor 0 does not answer")
        return SnapshotShard(place(SnapshotShard({"state": torch.zeros(1)}, {})), {"step": step})


@pytest.mark.parametrize("offer", [None, OFFER], ids=["a holder at once", "a joiner that says again what it holds"])
def test_a_group_that_gave_its_offer_up_holds_the_state_that_it_has_said(offer: Offer | None) -> None:
    """It has said that it holds t*, and gives the offer up because no later result can be had. By the first of it the
    coordinator has made it a member, so it trains: t* may be held by nobody else."""
    called = replace(LEARNS, epoch=4, live=((0, 0), BACK), segments=((0, 1),), offer=offer)
    world: Any = CalledWhileItGivesUp(called)
    engine: Any = RankEngine(alone)
    catch_up = CatchUp(engine, world, world, alone, torch.device("cpu"), 1.0, lambda point, step, n: None, cold=False)
    assert catch_up.learn() == Joined(5, 1)
    assert world.reported == ["ready", (1, 5), "void"]
    assert engine.step == 5
