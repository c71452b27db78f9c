"""The simulator: failures, restarts, joins and saves around the real controller; every invariant after each event."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.placement import build_placement
from spare_megatron.simulator.balance import STEP, Completion
from spare_megatron.simulator.cluster import Cluster, Policy, Reading
from spare_megatron.simulator.failures import failures_of, record
from spare_megatron.simulator.intervals import save_interval_s, save_interval_steps, time_to_wipe_out_s
from spare_megatron.simulator.pieces import PiecesEngine
from spare_megatron.simulator.policy_trial import RATIO_MAX, TrialResult
from spare_megatron.simulator.script import scripted
from spare_megatron.simulator.trials import ENGINES, Case, run_one

ROOT = Path(__file__).resolve().parents[2]
SMALL = Cluster(12, mtbf_s=400.0, reduce_s=2.0, restart_s=600.0)


def simulate(cluster: Cluster, policy: Policy, seed: int = 3, **options: object) -> TrialResult:
    return run_one(Case(cluster, policy, check=True, **options), seed)  # type: ignore[arg-type]


def test_without_failures_the_time_is_steps_and_saves() -> None:
    quiet = replace(SMALL, jitter=0.0)
    policy = Policy("microbatch", 3, 4, steps=20, save_interval_s=200.0)
    outcome = simulate(quiet, policy, trace=[])
    assert outcome.time_s == pytest.approx(20 * 66.0 + 4 * 60.0)  # a save at the first boundary 200 s after the last
    assert outcome.tally.failures == 0
    assert outcome.availability == 1.0


def test_a_death_in_a_step_costs_its_pieces_a_rebuild_and_nothing_else() -> None:
    quiet = replace(SMALL, jitter=0.0)
    policy = Policy("microbatch", 3, 4, steps=2, save_interval_s=1e9)
    outcome = simulate(quiet, policy, trace=[(65.0, 5)])
    # In the reduction: 4 pieces of 16 s on the 3 - 1 other hosts (2 each), then the reduction again; after it chains
    # spread the load of 48 pieces over 11 groups (5 at most).
    assert outcome.time_s == pytest.approx(65.0 + 2 * 16.0 + 2.0 + 5 * 16.0 + 2.0)
    assert (outcome.tally.masked, outcome.tally.wipe_outs, outcome.tally.steps_recomputed) == (1, 0, 0)


@pytest.mark.parametrize(
    ("spec", "more_s"),
    [
        ("sigkill:group=5,step=1,at=forward,n=2", 2 * 16.0),  # two pieces are done: hosts take two each after their own
        ("exception:group=5,step=1,at=reduce", 2 * 16.0 + 1.0),  # and half a reduction is done again
        ("sigkill:group=5,step=1,at=vote", 2 * 16.0 + 2.0),
    ],
)
def test_a_scripted_death_strikes_at_its_moment(spec: str, more_s: float) -> None:
    quiet = replace(SMALL, jitter=0.0)
    policy = Policy("microbatch", 3, 4, steps=2, save_interval_s=1e9, injections=scripted([spec], 12, 4))
    outcome = simulate(quiet, policy, trace=[])
    assert outcome.time_s == pytest.approx(66.0 + more_s + 5 * 16.0 + 2.0)
    assert outcome.tally.failures == 1


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_trial_is_a_function_of_its_seed(name: str) -> None:
    policy = Policy(name, 3, 4, steps=60)
    once, again = simulate(SMALL, policy), simulate(SMALL, policy)
    other = simulate(SMALL, policy, seed=4)
    assert once == again
    assert once.time_s != other.time_s


@pytest.mark.parametrize(
    "policy",
    [
        Policy("microbatch", 3, 4, steps=150, standby_groups=2),
        Policy("microbatch", 3, 4, steps=150, restart_after=3),
        Policy("microbatch", 3, 4, steps=150, adopt_s=50.0),
        Policy("microbatch", 12, 4, steps=150, restart_after=6, balance=True, async_save=True),
    ],
)
@pytest.mark.parametrize("rejoin_s", [None, 500.0])
def test_every_extension_keeps_every_invariant(policy: Policy, rejoin_s: float | None) -> None:
    outcome = simulate(replace(SMALL, rejoin_s=rejoin_s), policy)
    assert outcome.ratio is not None
    assert outcome.tally.failures > 20
    if (policy.adopt_s is not None and rejoin_s is not None) or policy.redundancy == 12:
        assert outcome.tally.steps_recomputed == 0, "else all groups may be gone at last"


def _adopting(
    trace: list[tuple[float, int]], rejoin_s: float | None, adopt_s: float = 50.0, **of_policy: Any
) -> PiecesEngine:
    """A job of 20 steps on 12 groups, two hosts for every shard, in which shards are adopted; after its run."""
    cluster = replace(SMALL, jitter=0.0, rejoin_s=rejoin_s)
    policy = Policy("microbatch", 2, 4, steps=20, save_interval_s=1e9, adopt_s=adopt_s, **of_policy)
    engine = PiecesEngine(cluster, policy, 0, trace, check=True)
    assert engine.run().tally.wipe_outs == 0
    return engine


SHARD_0 = build_placement(12, 2).hosts()[0].tolist()
"""The two hosts of shard 0."""
BOTH = [(10.0, SHARD_0[0]), (20.0, SHARD_0[1])]


def test_a_shard_without_a_host_is_adopted_and_its_hosts_come_back() -> None:
    engine = _adopting(BOTH, rejoin_s=300.0)
    assert (engine.tally.failures, engine.tally.joins, engine.tally.soft_wipe_outs) == (2, 2, 1)
    assert engine.alive.all()
    assert engine.control.state.live.keys() == set(range(12))
    assert {shard for shard, _ in engine.control.state.where.adopted} == {0}


def test_what_is_adopted_is_waited_for_once() -> None:
    at_once, later = (_adopting(BOTH, rejoin_s=None, adopt_s=adopt_s) for adopt_s in (0.0, 80.0))
    assert 0 < later.now_s - at_once.now_s <= 80.0


def test_a_group_at_the_door_is_called_where_nobody_adopts() -> None:
    cluster = replace(SMALL, jitter=0.0)
    policy = Policy("microbatch", 2, 4, steps=20, save_interval_s=1e9, standby_groups=1)
    engine = PiecesEngine(cluster, policy, 0, BOTH, check=True)
    assert engine.run().tally.wipe_outs == 0
    assert engine.tally.joins == 1, "a standby waited for an offer when the second host died"
    assert engine.alive[SHARD_0].tolist() == [True, False]


def test_standbys_join_after_an_adoption() -> None:
    later = _adopting([(20.0, group) for group in SHARD_0], rejoin_s=None, standby_groups=2)
    assert later.tally.joins == 2, "standbys take the places of those whose shard was adopted"


@pytest.mark.parametrize(
    ("trials", "seed", "asked"),
    [(7, 105, 2_000), pytest.param(500, 1000, 100_000, marks=[pytest.mark.full, pytest.mark.timeout(3000)])],
)
def test_random_failures_never_break_an_invariant(trials: int, seed: int, asked: int) -> None:
    """``--full`` makes 100,000 failures and more, in every part of the step."""
    failures = 0
    for number in range(seed, seed + trials):
        rng = np.random.default_rng(number)
        groups = int(rng.integers(3, 16))
        cluster = Cluster(
            groups,
            mtbf_s=float(rng.choice([30.0, 100.0, 300.0])),
            rejoin_s=float(rng.choice([0.0, 100.0, 400.0])),
            restart_s=100.0,
            rebuild_s=float(rng.choice([0.1, 20.0])),
        )
        policy = Policy(
            "microbatch",
            int(rng.integers(1, min(6, groups) + 1)),
            int(rng.integers(1, 5)),
            steps=200,
            standby_groups=int(rng.integers(0, 3)),
            adopt_s=10.0 if rng.random() < 0.5 else None,
        )
        outcome = simulate(cluster, policy, seed=number)
        failures += outcome.tally.failures
    reported = f"{failures} failures, seeds {seed} to {seed + trials - 1}"
    print(reported)
    assert failures >= asked, reported


def test_rings_do_not_depend_on_when_they_are_asked_for() -> None:
    at_once = record(SMALL, 7, 1e6)
    failures = failures_of(SMALL, 7)
    in_parts = [ring for until in np.linspace(0, 1e6, 41) for ring in failures.due(float(until))]
    assert at_once == in_parts
    assert len(at_once) == pytest.approx(1e6 / SMALL.mtbf_s, rel=0.1)


def test_balance_moves_pieces_only_to_hosts_with_time_left() -> None:
    placement = build_placement(3, 2)
    units = np.array([[4, 4, 4], [0, 0, 0]])
    per_piece = np.array([1.0, 1.0, 2.0])
    alive = np.ones(3, dtype=np.bool_)
    finish = 4 * per_piece
    # The slow group has two pieces left when the others are done; the one host of its shard takes one of them.
    assert Completion(finish, per_piece, alive, units, placement, 0.0).time_s() == pytest.approx(6.0, abs=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_the_time_of_balanced_pieces_is_the_same_wherever_it_is_looked_for_first(seed: int) -> None:
    random, groups = np.random.default_rng(seed), 24
    placement = build_placement(groups, 3)
    units = np.zeros((3, groups), dtype=np.int64)
    units[0] = 16
    per_piece = random.normal(1.0, 0.05, groups) * np.where(random.random(groups) < 0.1, 2.0, 1.0)
    alive = np.ones(groups, dtype=np.bool_)
    found = Completion(16 * per_piece, per_piece, alive, units, placement, 0.0)
    exact = STEP * float(np.median(per_piece))
    first = found.time_s()
    assert found.least_s <= first <= float((16 * per_piece).max()), f"seed {seed}"
    for near_s in (0.1, 0.5, 1.0, 3.0, 100.0):
        assert found.time_s(near_s) == pytest.approx(first, abs=exact * 1.01), f"seed {seed}"


def test_where_every_group_hosts_every_shard_the_job_ends_with_the_last_group() -> None:
    policy, cluster = Policy("microbatch", 8, 4, steps=1000), Cluster(8, mtbf_s=3000.0, restart_s=600.0)
    rings = np.random.default_rng(1).exponential(8 * 3000.0, (20_000, 8))
    assert time_to_wipe_out_s(cluster, policy) == pytest.approx(rings.max(axis=1).mean(), rel=0.02)
    saved = run_one(Case(cluster, policy), 0)
    never = run_one(Case(cluster, replace(policy, save_interval_s=1e9)), 0)
    assert saved.ratio is not None
    assert saved.ratio < 5 < RATIO_MAX
    assert never.ratio is None, "without saves every wipe-out starts from nothing"
    assert time_to_wipe_out_s(Cluster(1), Policy(redundancy=1)) == Cluster(1).mtbf_s
    assert time_to_wipe_out_s(cluster, replace(policy, restart_after=4)) == np.inf


@pytest.mark.parametrize("groups", [3, 40, 1000])
@pytest.mark.parametrize("rejoin_s", [0.0, 1.0, 600.0, 1e6])
def test_a_save_interval_is_a_number_of_seconds_for_every_return(groups: int, rejoin_s: float) -> None:
    cluster = Cluster(groups, rejoin_s=rejoin_s)
    times = [save_interval_s(cluster, Policy(redundancy=r)) for r in (1, 2, groups // 2, groups - 1, groups)]
    assert min(times) > cluster.save_s


def test_a_job_that_needs_no_save_has_an_interval_of_its_length() -> None:
    assert save_interval_steps(Cluster(20, rejoin_s=0.0), Policy("replication", 3, steps=70)) == 70


def _python_with_simgrid() -> str | None:
    for python in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        if (
            python
            and subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False).returncode == 0
        ):
            return python
    return None


@pytest.mark.parametrize(
    ("name", "redundancy", "mtbf_s"), [("checkpoint", 1, 20_000.0), ("replication", 3, 300.0), ("spare", 9, 300.0)]
)
def test_simgrid_agrees_to_a_thousandth(name: str, redundancy: int, mtbf_s: float, tmp_path: Path) -> None:
    python = _python_with_simgrid()
    if python is None:
        pytest.skip("SimGrid is not installed (Debian python3-simgrid or PyPI simgrid): no independent engine here")
    cluster = Cluster(200, mtbf_s=mtbf_s, jitter=0.0)
    rings = record(cluster, 5, 1e6)
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,node\n" + "".join(f"{at!r},{group}\n" for at, group in rings))
    policy = Policy(name, redundancy, steps=600)
    engine = ENGINES[name](cluster, policy, 5, rings)
    outcome = engine.run()
    offsets = ",".join(map(str, engine.control.spec.offsets))
    words = [name, str(trace), "200", str(redundancy), "600", str(engine.interval_steps), offsets]  # type: ignore[attr-defined]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    script = str(ROOT / "benchmarks" / "simgrid_rules.py")
    run = subprocess.run([python, script, *words], capture_output=True, text=True, check=True, env=environment)
    assert float(run.stdout) == pytest.approx(outcome.time_s, rel=1e-3)


@pytest.mark.parametrize(
    "reading",
    [
        Reading(restart_repeats=False),
        Reading(clocks_restart=True),
        Reading(masked_layers=1),
        Reading(replication_rebuilds=True),
        Reading(blocks=False),
        Reading(patch_jitter=True),
        Reading(patch_work=0.28),
        Reading(replans_at_once=False),
    ],
)
def test_every_assumption_of_the_reading_matters(reading: Reading) -> None:
    of_spare = reading.patch_jitter or reading.patch_work != 0.07 or not reading.replans_at_once
    name = "spare" if of_spare else "replication"
    policy = Policy(name, 3, steps=400)
    assert simulate(SMALL, policy).time_s != simulate(SMALL, replace(policy, reading=reading)).time_s
