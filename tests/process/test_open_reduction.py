"""Reductions that begin before their tensors are final, with the groups as threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spare_megatron.collectives.reduction import ReduceOutcome, Reduction
from spare_megatron.collectives.reduction_attempt import OpenReduction
from tests.process.test_replica import BOUND_S, Groups

SIZES = (3000, 2000)
"""Elements of two tensors: three and two buckets of 1024 elements at most."""
SCALARS = {"loss": 0.5, "tokens": 3.0}


@pytest.fixture
def three() -> Iterator[Groups]:
    groups = Groups(3)
    groups.view((0, 1, 2))
    yield groups
    groups.close()


def tensors_of(group: int) -> list[torch.Tensor]:
    return [torch.full((size,), float(group + 1)) for size in SIZES]


def never() -> bool:
    return False


def begin(three: Groups, group: int, tensors: list[torch.Tensor], **more: Any) -> OpenReduction:
    stale: Callable[[], bool] = more.pop("stale", never)
    return three.replicas[group].begin(three.epoch, Reduction(tensors, overlapped=True, **more), stale)


def until(opened: list[OpenReduction], true: Callable[[], bool]) -> None:
    """Let the reductions go on until ``true()``, as hooks of a backward pass do."""
    until_s = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < until_s, "the buckets stand still"
        for one in opened:
            one.advance()
        time.sleep(0.001)


def finish_all(three: Groups, opened: list[OpenReduction], tensors: list[list[torch.Tensor]]) -> list[ReduceOutcome]:
    futures = [three.pool.submit(one.finish, mine, SCALARS) for one, mine in zip(opened, tensors, strict=True)]
    return [future.result(BOUND_S) for future in futures]


def test_what_is_final_travels_at_once_in_the_order_of_the_layout(three: Groups) -> None:
    tensors = [tensors_of(group) for group in range(3)]
    seen: list[int] = []
    opened = [begin(three, 0, tensors[0], on_bucket=lambda done, total: seen.append(done))]
    opened += [begin(three, group, tensors[group]) for group in (1, 2)]
    for one in opened:
        one.ready(0, 2500)
    until(opened, lambda: seen == [1, 2])
    for mine in tensors:
        mine[0][:2000] = 99.0  # has left: what is sent is a copy
        mine[0][2900:] = 7.0  # has not: the bucket is not whole
    for one in opened:
        one.ready(1, 0)
    until(opened, lambda: seen == [1, 2, 3])
    for outcome in finish_all(three, opened, tensors):
        assert outcome.ok, outcome.error
        assert outcome.early >= 2
        assert torch.equal(outcome.tensors[0][:2000], torch.full((2000,), 6.0))
        assert torch.equal(outcome.tensors[0][2900:], torch.full((100,), 21.0))
        assert torch.equal(outcome.tensors[1], torch.full((2000,), 6.0))
        assert outcome.scalars == {"loss": 1.5, "tokens": 9.0}
    assert seen == [1, 2, 3, 4, 5]


def test_members_need_not_agree_on_when_they_begin(three: Groups) -> None:
    """A group that has no piece left reduces everything at once while others still compute."""
    tensors = [tensors_of(group) for group in range(3)]
    opened = [begin(three, group, tensors[group]) for group in (0, 1)]
    late = three.start(2, three.epoch, Reduction(tensors[2], SCALARS, overlapped=True))
    opened[0].ready(0, 1100)
    outcomes = [*finish_all(three, opened, tensors[:2]), late.result(BOUND_S)]
    assert all(outcome.ok and torch.equal(outcome.tensors[1], torch.full((2000,), 6.0)) for outcome in outcomes)


def test_a_newer_epoch_makes_it_void_and_everything_is_reduced_anew(three: Groups) -> None:
    """What the accumulators got meanwhile is in the new sums; what had left of the old epoch is in none."""
    tensors = [tensors_of(group) for group in range(3)]
    opened = [begin(three, group, tensors[group]) for group in range(3)]
    for one in opened:
        one.ready(0, 1100)
    three.view((0, 1))
    for group in (0, 1):
        opened[group].ready(0, 2500)
        assert opened[group].finish(tensors[group], SCALARS).stale
        tensors[group][0] += 10.0
        assert opened[group].finish(tensors[group], SCALARS).stale, "it stays void"
    again = [begin(three, group, tensors[group]) for group in (0, 1)]
    again[1].ready(1, 2000)
    for outcome in finish_all(three, again, tensors[:2]):
        assert outcome.ok, outcome.error
        assert torch.equal(outcome.tensors[0], torch.full((3000,), 23.0))


def test_stale_ends_it_at_once(three: Groups) -> None:
    over = threading.Event()
    opened = begin(three, 0, tensors_of(0), stale=over.is_set)
    opened.ready(1, 2000)
    waiting = three.pool.submit(opened.finish, tensors_of(0), SCALARS)
    over.set()
    assert waiting.result(BOUND_S).stale


def test_what_was_not_final_after_all_is_a_failed_reduction(three: Groups) -> None:
    opened = begin(three, 0, tensors_of(0))
    opened.ready(0, 2000)
    opened.spoil("the gradient of w came late")
    outcome = opened.finish(tensors_of(0), SCALARS)
    assert (outcome.ok, outcome.stale, outcome.corrupt, outcome.links) == (False, False, False, ())
    assert outcome.error == "the gradient of w came late"


def test_what_a_hook_raises_comes_out_of_the_middle_of_the_backward_pass(three: Groups) -> None:
    def hook(done: int, total: int) -> None:
        raise ValueError("injected")

    tensors = [tensors_of(group) for group in range(3)]
    opened = [begin(three, 0, tensors[0], on_bucket=hook)]
    opened += [begin(three, group, tensors[group]) for group in (1, 2)]
    for one in opened:
        one.ready(0, 2000)
    with pytest.raises(ValueError, match="injected"):
        until(opened, lambda: False)


def test_groups_with_other_scalars_are_notified(three: Groups) -> None:
    tensors = [tensors_of(group) for group in range(3)]
    opened = [begin(three, group, tensors[group]) for group in range(3)]
    scalars = [SCALARS, SCALARS, {"loss": 1.0}]
    futures = [three.pool.submit(opened[group].finish, tensors[group], scalars[group]) for group in range(3)]
    for future in futures:
        outcome = future.result(BOUND_S)
        assert not outcome.ok
        assert "do not reduce the same scalars" in outcome.error
