"""The simulator's model of relief beside the decisions of a job, and groups that are slow in all steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import lasting_slowness
from benchmarks.relief_model import compared
from spare_megatron.protocol import messages as m
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.job_control import JobControl
from spare_megatron.simulator.pieces import PiecesEngine
from spare_megatron.simulator.trials import Case, run_one

STEPS = 8
OFF_PERCENT = 3.0


@pytest.mark.parametrize(
    ("groups", "redundancy", "pieces", "jitter", "slow"),
    [(4, 2, 16, 0.2, 0), (8, 3, 16, 0.05, 1), (50, 2, 64, 0.2, 0), (50, 4, 64, 0.05, 1), (200, 6, 64, 0.05, 0)],
)
def test_a_step_ends_when_the_decisions_of_a_job_would_end_it(
    groups: int, redundancy: int, pieces: int, jitter: float, slow: int
) -> None:
    found = compared(groups, redundancy, pieces, jitter, slow, STEPS)
    assert abs(found["model_off_percent"]) < OFF_PERCENT, found
    assert found["gain"] < 1


def test_lasting_stragglers_cost_little_where_they_are_relieved() -> None:
    cluster = Cluster(60, reduce_s=0.6, rejoin_s=600.0, stragglers=1)
    policy = Policy("microbatch", 6, 64, steps=60, async_save=True, balance=True)

    def ratio(cluster: Cluster, policy: Policy) -> float:
        found = run_one(Case(cluster, policy), 0).ratio
        assert found is not None
        return found

    failure_free = ratio(replace(cluster, stragglers=0), policy)
    assert ratio(cluster, replace(policy, balance=False)) > 1.8
    assert failure_free < ratio(cluster, policy) < 1.03 * failure_free
    fixed = replace(cluster, jitter=0.0, straggler_slowdown=1.5, rejoin_s=None, mtbf_s=1e9, weibull_shape=1.0)
    assert ratio(fixed, replace(policy, balance=False)) == pytest.approx(1.5, rel=0.01)


def test_shares_by_speed_take_most_of_what_lasting_stragglers_cost() -> None:
    found = lasting_slowness.compared(200, 4)
    assert found["cost_relieved"] > 0.03
    assert found["cost_by_speed"] < 0.02


def test_the_simulated_job_measures_its_stragglers_and_shares_out_by_it() -> None:
    cluster = Cluster(60, reduce_s=0.6, rejoin_s=600.0, mtbf_s=600.0, stragglers=3, jitter=0.05)
    policy = Policy("microbatch", 6, 64, steps=60, async_save=True, balance=True)
    engine = PiecesEngine(cluster, policy, 3, check=True)
    assert engine.run().ratio is not None
    state = engine.control.state
    slow = {group for group, factor in enumerate(engine._slowness) if factor > 1}
    assert len(slow) == 3
    assert state.slowness.keys() <= slow
    assert len(state.slowness) >= 2, "a lost one that is back is measured anew"
    assert state.standing is not None
    loads = state.standing.assignment.loads
    assert all(30 <= known <= 35 and loads[group] <= 35 for group, known in state.slowness.items())


def test_steps_that_the_controller_relieves_end_nearly_as_the_model_has_it() -> None:
    """With losses and jitter, and every invariant checked: patches are relieved too."""
    cluster = Cluster(30, reduce_s=0.3, rejoin_s=600.0, mtbf_s=300.0, jitter=0.05)
    policy = Policy("microbatch", 4, 32, steps=60, async_save=True)
    alone = run_one(Case(cluster, policy), 1)
    model = run_one(Case(cluster, replace(policy, balance=True)), 1)
    decided = run_one(Case(cluster, replace(policy, relief=True), check=True), 1)
    assert alone.ratio is not None
    assert model.ratio is not None
    assert decided.ratio is not None
    assert decided.tally.failures > 10
    assert decided.ratio == pytest.approx(model.ratio, rel=0.02)
    assert decided.ratio < 0.92 * alone.ratio


def test_who_comes_takes_pieces_of_the_step_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(12, mtbf_s=1e12, reduce_s=0.1, rejoin_s=100.0, transfer_s=5.0, result_s=1.0, jitter=0.0)
    engine = PiecesEngine(cluster, Policy("microbatch", 3, 16, steps=8, relief=True), 0, [(10.0, 5)], check=True)
    loads = dict[int, list[list[int]]]()
    feed = JobControl.feed

    def watched(control: JobControl, event: m.Event) -> m.Decision:
        decision = feed(control, event)
        if control.state.phase == "running":
            loads.setdefault(control.state.step_in_flight, []).append(control.state.plan.loads().tolist())
        return decision

    monkeypatch.setattr(JobControl, "feed", watched)
    assert engine.run().tally.joins == 1
    empty = [step for step, plans in loads.items() if plans[0][5] == 0]
    first, last = loads[empty[-1]][0], loads[empty[-1]][-1]
    assert len(empty) >= 2, "it is away for some steps"
    assert last[5] > 0, f"step {empty[-1]}, which begins when it joins"
    assert max(last) < max(first) == 18
