"""Who is slow for long, what is made of it, and what people read of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.coordinator.paces import steady_s
from spare_megatron.coordinator.status_figures import status_figures
from spare_megatron.monitor.speed_texts import SHOWN_MAX, speed_lines
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.lasting_paces import LastingPaces
from spare_megatron.protocol.speeds import slowness_after
from spare_megatron.protocol.state import State
from tests.pure.scripted_job import ScriptedJob

SPEC = m.JobSpec(4, 16, (0, 1, 2), "microbatch", 0, 99, 1, "f")
W = 6


def measured(state: State, paces: Mapping[int, tuple[float, float]], steps: int = 1) -> m.SpeedsMeasured:
    reported = tuple((group, state.live.get(group, 0), *halves) for group, halves in paces.items())
    return m.SpeedsMeasured(state.committed[0], steps, reported)


def loads(job: ScriptedJob) -> list[int]:
    assert job.state.standing is not None
    return [int(load) for load in job.state.standing.assignment.loads]


def played(job: ScriptedJob, paces: LastingPaces, piece_s: list[float]) -> m.SpeedsMeasured | None:
    """A step, and what follows from how long it took."""
    job.step()
    return paces.committed(job.state, dict(enumerate(piece_s)))


# -------------------------------------------------------------------------------------------------- what is made of it


def test_a_slow_group_has_a_smaller_share_from_the_commit_after_next_on() -> None:
    job = ScriptedJob(SPEC)
    job.step()
    job.tell(measured(job.state, {1: (2.0, 2.0)}))
    assert job.state.epoch == 1, "nothing but the state has changed"
    assert loads(job) == [16, 16, 16, 16]
    job.step()
    assert (job.state.epoch, job.state.live) == (2, {0: 0, 1: 0, 2: 0, 3: 0})
    assert loads(job) == [19, 9, 17, 19]
    assert [len(job.state.plan.pieces(group)) for group in range(4)] == [16, 16, 16, 16]
    job.step()
    assert job.state.epoch == 2
    assert len(job.state.plan.pieces(1)) == 9


@pytest.mark.parametrize(
    ("known", "halves", "then"),
    [
        ({}, (1.2, 1.3), {1: 20}),
        ({}, (1.14, 3.0), {}),
        ({}, (3.0, 1.0), {}),
        ({1: 32}, (2.05, 1.95), {1: 32}),
        ({1: 32}, (2.06, 2.06), {1: 32}),
        ({1: 32}, (2.12, 2.12), {1: 34}),
        ({1: 32}, (1.5, 1.5), {1: 24}),
        ({1: 32}, (1.12, 1.12), {1: 32}),
        ({1: 32}, (1.0, 1.12), {1: 32}),
        ({1: 32}, (1.09, 0.9), {}),
        ({}, (99.0, 99.0), {1: 256}),
    ],
)
def test_noise_changes_nothing(known: dict[int, int], halves: tuple[float, float], then: dict[int, int]) -> None:
    state = replace(ScriptedJob(SPEC).state, slowness=known, slowness_step=-1)
    assert slowness_after(state, measured(state, {1: halves})) == then


def test_what_is_stale_or_of_others_is_not_used() -> None:
    job = ScriptedJob(SPEC)
    job.step()
    event = measured(job.state, {1: (2.0, 2.0)})
    assert slowness_after(job.state, event) == {1: 32}
    for useless in (
        replace(event, step=0),
        replace(event, steps=2),
        replace(event, paces=((1, 1, 2.0, 2.0), (7, 0, 2.0, 2.0))),
    ):
        assert slowness_after(job.state, useless) == {}
    for state in (
        replace(job.state, leave="SIGTERM"),
        replace(job.state, phase="ending"),
        replace(job.state, spec=replace(SPEC, granularity="shard")),
        replace(job.state, spec=replace(SPEC, pieces_per_shard=1)),
    ):
        assert slowness_after(state, event) == {}


def test_a_group_that_is_lost_is_forgotten_and_one_that_stays_is_not() -> None:
    job = ScriptedJob(SPEC)
    job.step()
    job.tell(measured(job.state, {1: (2.0, 2.0), 2: (1.5, 1.5)}))
    assert job.state.slowness == {1: 32, 2: 24}
    job.lose(1)
    assert job.state.slowness == {2: 24}
    assert loads(job)[2] < loads(job)[0]
    job.tell(m.DrainRequested((2,), "maintenance"))
    epoch = job.state.epoch
    job.step()
    assert job.state.slowness == {}
    assert job.state.epoch == epoch + 1, "it has left, and nothing else was to change"


def test_a_loss_is_patched_by_the_time_that_is_left() -> None:
    job = ScriptedJob(SPEC)
    job.step()
    job.tell(measured(job.state, {1: (2.0, 2.0)}))
    job.step()
    job.step()
    before = [len(job.state.plan.pieces(group)) for group in range(4)]
    job.lose(3)
    after = [len(job.state.plan.pieces(group)) for group in range(3)]
    assert (before, after) == ([19, 9, 17, 19], [22, 14, 28]), "shard 3 has the hosts 1, 2 and 3"
    assert after[1] * 2 == after[2]


# ------------------------------------------------------------------------------------------------------- who is slow


def test_a_group_is_slow_for_long_when_it_was_in_both_halves_of_the_steps() -> None:
    job, paces = ScriptedJob(SPEC), LastingPaces(W)
    for step in range(1, W):
        assert played(job, paces, [1.0, 2.0, 1.0, 1.1]) is None, step
    event = played(job, paces, [1.0, 2.4, 1.0, 1.1])
    assert event == m.SpeedsMeasured(W, W, ((1, 0, 2.0, 2.0),))
    job.tell(event)
    assert job.state.slowness == {1: 32}
    for step in range(1, W):
        assert played(job, paces, [1.0, 1.0, 1.0, 1.1]) is None, step
    event = played(job, paces, [1.0, 1.0, 1.0, 1.1])
    assert event is not None
    assert event.paces == ((1, 0, 1.0, 1.0),)
    job.tell(event)
    assert job.state.slowness == {}


def test_a_short_disturbance_is_not_lasting() -> None:
    job, paces = ScriptedJob(SPEC), LastingPaces(W)
    for slow in (1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0):
        assert played(job, paces, [1.0, 1.0, 1.0 + slow, 1.0]) is None


def test_of_two_groups_the_faster_one_is_the_usual_one() -> None:
    job, paces = ScriptedJob(replace(SPEC, num_groups=2, offsets=(0, 1))), LastingPaces(2)
    assert played(job, paces, [3.0, 1.5]) is None
    event = played(job, paces, [3.0, 1.5])
    assert event is not None
    assert event.paces == ((0, 0, 2.0, 2.0),)


def test_steps_without_figures_other_processes_and_other_job_attempts_are_not_mixed() -> None:
    job, paces = ScriptedJob(SPEC), LastingPaces(2)
    slow = [1.0, 1.0, 1.0, 2.0]
    assert played(job, paces, slow) is None
    job.step()
    assert paces.committed(job.state, {}) is None
    assert played(job, paces, slow) is None, "one of the last two steps has no figures"
    job.step()
    assert played(job, paces, slow) is None, "a step was not reported"
    job.open(SPEC, 2)
    assert played(job, paces, slow) is None, "another job attempt"
    assert played(job, paces, slow) is not None
    job.lose(3)
    assert played(job, paces, slow) is None, "it is no member"
    assert LastingPaces(2).committed(replace(job.state, phase="ending"), {3: 2.0}) is None


def test_a_new_process_of_a_group_is_measured_anew() -> None:
    job, paces = ScriptedJob(SPEC), LastingPaces(W)
    for _ in range(W - 1):
        assert played(job, paces, [1.0, 2.0, 1.0, 1.0]) is None
    job.state = replace(job.state, live={**job.state.live, 1: 5}, highest={**job.state.highest, 1: 5})
    known = dict(enumerate([1.0, 2.0, 1.0, 1.0]))
    job.step()
    assert paces.committed(job.state, known) is None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_jitter_alone_is_no_slowness(seed: int) -> None:
    draws = np.random.default_rng(seed)
    job, paces = ScriptedJob(SPEC), LastingPaces()
    for _ in range(40):
        assert played(job, paces, (1 + 0.05 * draws.standard_normal(4)).tolist()) is None, f"seed {seed}"


def test_the_filling_of_a_pipeline_and_audits_are_no_slowness() -> None:
    """Pieces take 2 s in group 0 and 1 s in group 1; 4 stages; group 0 has 5 pieces of its own and audits one."""
    spent_s, own = {0: 2.0 * (5 + 1 + 3) / 5, 1: 1.0 * (16 + 3) / 16}, {0: 5, 1: 16, 2: 0}
    assert steady_s(spent_s, own, {0: ((4,),)}, 3) == pytest.approx({0: 2.0, 1: 1.0})


# ------------------------------------------------------------------------------------------------- what people read


def test_the_status_says_who_is_slow_for_long_and_its_share() -> None:
    job = ScriptedJob(SPEC)
    assert status_figures(job.state)["slow_for_long"] == {}
    job.step()
    job.tell(measured(job.state, {1: (2.0, 2.0)}))
    job.step()
    reported = status_figures(job.state)["slow_for_long"]
    assert reported == {"1": {"slowness": 2.0, "share": 9, "since": 1}}
    status = {"phase": "running", "live": {"1": 0}, "slow_for_long": reported}
    assert list(speed_lines(status)) == [
        "group 1 is slow for long (2.00 times as long for a piece), its share is 9 pieces"
    ]
    many = {str(group): {"slowness": 1.5, "share": 9, "since": 1} for group in range(SHOWN_MAX + 2)}
    assert list(speed_lines({**status, "slow_for_long": many}))[-1] == "2 more groups slow for long"
