"""The simulator's bulk events stand for the single ones: same state, same last decision."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from spare_megatron.placement import build_placement
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step


def _job(granularity: str = "microbatch") -> m.JobSpec:
    return m.JobSpec(12, 3, build_placement(12, 3).offsets, granularity, 0, 50, 1, "job")


def _feed(state: State, *events: m.Event) -> tuple[State, m.Decision]:
    decision = m.Decision()
    for event in events:
        state, decision = step(state, event)
    return state, decision


def _same(left: State, right: State) -> None:
    for item in fields(State):
        if item.name not in ("standing", "plan", "placement", "votes"):
            assert getattr(left, item.name) == getattr(right, item.name), item.name
    assert dict(left.plan) == dict(right.plan)
    assert left.votes == right.votes
    for group in left.live if left.standing else ():
        assert left.standing_of(group) == right.standing_of(group)


@pytest.mark.parametrize("groups", [range(12), range(5), [3, 1, 2], [1, 1], [], [0, 99]])
@pytest.mark.parametrize("lost_first", [False, True])
def test_all_here_is_the_single_hellos(groups: list[int], lost_first: bool) -> None:
    start, _ = _feed(initial_state(), m.Opened(_job(), 1, 1))
    if lost_first:
        start, _ = _feed(start, m.Lost((m.Loss(1, 0, "exited"),)))
    arrivals = tuple((group, 1) for group in groups)
    bulk, decision = _feed(start, m.AllHere(arrivals))
    single, last = _feed(start, *(m.Hello(g, i, "job", 0) for g, i in arrivals))
    _same(bulk, single)
    if arrivals:
        assert decision.reason == last.reason
        assert list(decision.actions)[-len(last.actions) or len(decision.actions) :] == list(last.actions)


@pytest.mark.parametrize("granularity", ["microbatch", "shard"])
def test_all_voted_is_the_single_votes(granularity: str) -> None:
    seed = 7
    rng = random.Random(seed)
    state, _ = _feed(initial_state(), m.Opened(_job(granularity), 1, 1), m.AllHere(tuple((g, 0) for g in range(12))))
    for number in range(40):
        if rng.random() < 0.2 and len(state.live) > 9:
            victim = rng.choice(sorted(state.live))
            state, _ = _feed(state, m.Lost((m.Loss(victim, state.live[victim], "exited"),)))
        elif rng.random() < 0.4 and len(state.live) < 12:
            back = min(set(range(12)) - state.live.keys())
            state, _ = _feed(state, m.Hello(back, state.highest[back] + 1, "job", 0))
        for joiner in sorted(state.live.keys() - state.holders):
            state, _ = _feed(state, m.Applied(joiner, state.live[joiner], state.committed[0], state.epoch))
        t, e = state.step_in_flight, state.epoch
        bulk, decision = _feed(state, m.AllVoted(t, e))
        votes = [
            m.Vote(g, i, m.ReductionResult(t, e, True, tuple(p for segment in state.segments_of(g) for p in segment)))
            for g, i in state.live.items()
        ]
        single, last = _feed(state, *votes)
        assert bulk.committed == (t, e), f"seed {seed}, round {number}"
        _same(bulk, single)
        assert decision == last
        state = bulk


def test_bulk_events_have_process_nonces_and_digests() -> None:
    """A group that comes back is admitted by the same commit, with the same proof."""
    start, _ = _feed(initial_state(), m.Opened(_job(), 1, 1))
    bulk, _ = _feed(start, m.AllHere(tuple((g, 0) for g in range(12)), tuple(f"process nonce {g}" for g in range(12))))
    single, _ = _feed(start, *(m.Hello(g, 0, "job", 0, process_nonce=f"process nonce {g}") for g in range(12)))
    _same(bulk, single)
    lost = m.Lost((m.Loss(3, 0, "exited"),))
    learns = m.Hello(3, -1, "job", 0, process_nonce="a new process"), m.Ready(3, 1)
    bulk, single = _feed(bulk, lost, *learns)[0], _feed(single, lost, *learns)[0]
    for number in range(1, 7):
        t, e = bulk.step_in_flight, bulk.epoch
        digest = f"weights after {t - 1}"
        votes = [
            m.Vote(g, i, m.ReductionResult(t, e, True, bulk.plan.pieces(g), weights_digest=digest))
            for g, i in bulk.live.items()
        ]
        bulk, decision = _feed(bulk, m.AllVoted(t, e, digest))
        single, last = _feed(single, *votes)
        _same(bulk, single)
        assert decision == last
        if 3 in bulk.learners:
            held = m.CaughtUp(3, 1, 1, t, f"weights after {t}")
            bulk, single = _feed(bulk, held)[0], _feed(single, held)[0]
        assert (3 in bulk.live) == (number >= 2), "offered when it is ready, proved and admitted with the second commit"
    assert 3 in bulk.holders
