"""The theory of jobs whose lost groups come back: each part against drawn numbers, the whole against the simulator."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import gamma, inf
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.planning.catching_up import commits_to_admission, mean_commits_to_admission, without_a_share_s
from spare_megatron.planning.choose import candidate, choose
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.planning.idle import without_work
from spare_megatron.planning.patched_step import at_random, evenly, patched_step
from spare_megatron.planning.ratio import binomial
from spare_megatron.planning.renewals import renewals
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case, run_one

SEED = 4_417
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "rejoin_table.json"


@pytest.mark.parametrize("shape", [0.5, 0.78, 1.0, 1.5])
def test_rings_of_a_new_clock(shape: float) -> None:
    rng = np.random.default_rng(SEED)
    times = np.cumsum(rng.weibull(shape, (100_000, 60)) / gamma(1 + 1 / shape), axis=1)
    for job_attempts in (0.005, 0.1, 0.85, 3.0, 7.0):
        drawn = (times <= job_attempts).sum(axis=1)
        error = 4 * drawn.std() / len(drawn) ** 0.5
        assert renewals(job_attempts, shape) == pytest.approx(drawn.mean(), rel=0.015, abs=error), (
            f"{job_attempts}, seed {SEED}"
        )


@pytest.mark.parametrize(("num_groups", "pieces", "mean"), [(200, 16, 2.5), (200, 16, 11.0), (300, 64, 6.0)])
def test_groups_without_work(num_groups: int, pieces: int, mean: float) -> None:
    """Played: a loss takes a full share from the plan, a return brings none unless the least largest load falls."""
    rng = np.random.default_rng(SEED)
    away = idle = 0
    spent: Counter[int] = Counter()

    def cap(lost: int) -> int:
        return -(-num_groups * pieces // (num_groups - lost))

    for wait in rng.exponential(1.0, 200_000):
        spent[idle] += wait / (mean + away)  # type: ignore[assignment]
        before = away
        away += 1 if rng.random() < mean / (mean + away) else -1
        if cap(away) != cap(before):
            idle = away
        elif away > before and cap(idle + 1) == cap(away):
            idle += 1
    total = sum(spent.values())
    played = sum(count * time for count, time in spent.items()) / total
    found = without_work(num_groups, pieces, binomial(num_groups, mean / num_groups)[:num_groups])
    assert found.sum() == pytest.approx(1.0)
    assert float((found * np.arange(num_groups)).sum()) == pytest.approx(played, rel=0.02), f"seed {SEED}"


@pytest.mark.parametrize("spread", [evenly(16, 5), at_random(16, 30)])
@pytest.mark.parametrize("rebuild", [0.0, 0.3])
def test_a_step_with_patches(spread: object, rebuild: float) -> None:
    rng = np.random.default_rng(SEED)
    jitter, losses, loads = 0.05, 0.4, ((1.0625, 30), (1.0, 160))
    found = patched_step(loads, 1.01, ((spread, 1.0),), losses, rebuild, jitter)
    own = np.concatenate([np.full(count, load) for load, count in loads])
    ends, failure_free = [], []
    for _ in range(6000):
        end = float((own * rng.normal(1, jitter, len(own))).max())
        failure_free.append(end)
        for moment in rng.random(rng.poisson(losses * found.failure_free)) * found.failure_free:
            for taken, count in spread.hosts:  # type: ignore[attr-defined]
                sizes, chances = zip(*taken, strict=True)
                shares = rng.choice(sizes, count, p=chances)
                done = np.where(shares > 0, max(1.01, moment) + shares * rng.normal(1, jitter, count), 0.0)
                end = max(end, float(done.max()), moment + rebuild)
        ends.append(end)
    assert found.failure_free == pytest.approx(np.mean(failure_free), abs=0.003), f"seed {SEED}"
    assert found.patched == pytest.approx(np.mean(ends), abs=0.006), f"seed {SEED}"


@pytest.mark.parametrize(
    ("transfer_s", "result_s", "left_s", "commits"),
    [
        (0.0, 0.0, 5.0, 1),
        (1.0, 0.0, 5.0, 2),
        (9.0, 0.0, 5.0, 2),
        (25.0, 0.0, 5.0, 3),
        (25.0, 0.0, 4.9, 4),
        (25.0, 5.0, 5.0, 5),
        (25.0, 5.0, 10.0, 4),
        (25.0, 9.0, 5.0, 21),
        (25.0, 10.0, 5.0, inf),
        (170.0, 0.0, 5.0, inf),
    ],
)
def test_commits_until_a_learner_is_admitted(transfer_s: float, result_s: float, left_s: float, commits: float) -> None:
    assert commits_to_admission(transfer_s, result_s, 10.0, left_s) == commits
    if 1 < commits < inf:
        held = transfer_s
        for step in range(2, 100):
            result_at_s = left_s + (step - 2) * 10.0
            held = max(held, result_at_s) + result_s
            if held <= result_at_s + 10.0:
                break
        assert step == commits


@pytest.mark.parametrize(("transfer_s", "result_s"), [(0.0, 0.0), (1.0, 0.5), (9.0, 3.0), (25.0, 0.0), (93.0, 7.0)])
def test_the_mean_over_the_moments_of_a_step(transfer_s: float, result_s: float) -> None:
    moments = np.linspace(0.0, 10.0, 20001)
    mean = np.mean([commits_to_admission(transfer_s, result_s, 10.0, left_s) for left_s in moments])
    assert mean_commits_to_admission(transfer_s, result_s, 10.0) == pytest.approx(mean, rel=1e-3)


def test_who_is_lost_while_it_learns_is_away_for_longer() -> None:
    failure_free = without_a_share_s(100.0, 50.0, 1.0, 10.0, 1e9)
    assert failure_free == pytest.approx(100.0 + 10.0 * mean_commits_to_admission(50.0, 1.0, 10.0))
    assert without_a_share_s(100.0, 50.0, 1.0, 10.0, 2000.0) > failure_free + 2
    assert without_a_share_s(100.0, 0.0, 0.0, 10.0, 2000.0) == 110.0


def figures(num_groups: int, rejoin_s: float, transfer_s: float, result_s: float, steps: int) -> ClusterFigures:
    return ClusterFigures(
        *(num_groups * 600, 600, 300.0, 3600.0, 60.0, 64.0, num_groups / 100),
        weibull_shape=0.78,
        rejoin_s=rejoin_s,
        transfer_s=transfer_s,
        result_s=result_s,
        steps=steps,
    )


@pytest.mark.parametrize(
    ("num_groups", "redundancy", "rejoin_s", "transfer_s", "result_s"),
    [(200, 6, 600.0, 0.0, 0.0), (200, 8, 1800.0, 300.0, 20.0)],
)
def test_theory_against_the_simulator(
    num_groups: int, redundancy: int, rejoin_s: float, transfer_s: float, result_s: float
) -> None:
    """Within 2%; benchmarks/rejoin_table.py has more."""
    found = candidate(figures(num_groups, rejoin_s, transfer_s, result_s, 1500), redundancy).outcome
    assert found is not None
    cluster = Cluster(
        num_groups, reduce_s=num_groups / 100, rejoin_s=rejoin_s, transfer_s=transfer_s, result_s=result_s
    )
    policy = Policy("microbatch", redundancy, 16, steps=1500, save_interval_s=found.interval_s)
    trial = run_one(Case(cluster, policy), SEED)
    print(f"seed {SEED}: theory {found.ratio:.4f}, simulated {trial.ratio}")
    assert found.ratio == pytest.approx(trial.ratio, rel=0.02)


def test_the_table_is_within_two_percent_and_of_this_theory() -> None:
    table = json.loads(TABLE.read_text())
    assert table["config"]["worst_off_percent"] < 2
    for row in table["results"]:
        back = (row["rejoin_s"], row["transfer_s"], row["result_s"])
        found = candidate(figures(row["groups"], *back, table["config"]["steps"]), row["r"]).outcome
        assert found is not None
        assert found.ratio == pytest.approx(row["theory"], abs=1e-4)


def test_a_slow_transfer_costs_and_one_that_never_ends_is_refused() -> None:
    at_once, slow = (choose(figures(200, 600.0, *back, 10_000)) for back in ((0.0, 0.0), (600.0, 40.0)))
    assert at_once.chosen.outcome is not None
    assert slow.chosen.outcome is not None
    assert slow.chosen.outcome.ratio > at_once.chosen.outcome.ratio
    assert "600 s to start, the state at once (its size is not given), admission" in at_once.reason
    assert "600 s for the state and 40 s for each result since, admission" in slow.reason
    with pytest.raises(ConfigError, match="a result takes 70 s on its way and a step 66 s"):
        choose(figures(200, 600.0, 210.0, 70.0, 10_000))
    with pytest.raises(ConfigError, match="the state takes 2000 s on its way, but donors keep 16 results"):
        choose(figures(200, 600.0, 2000.0, 20.0, 10_000))


@pytest.mark.parametrize("num_groups", [200, 600, 1000])
@pytest.mark.parametrize(("label", "jitter"), [("re-join", 0.05), ("re-join, no jitter", 0.0)])
def test_pieces_of_a_64th_against_the_published_cluster(num_groups: int, label: str, jitter: float) -> None:
    """benchmarks/reproduce_spare.py, whose jobs never save."""
    rows = json.loads((TABLE.parent / "reproduce_spare.json").read_text())["results"]
    [row] = [one for one in rows if (one["policy"], one["groups"]) == (label, num_groups)]
    cluster = replace(
        figures(num_groups, 600.0, 0.0, 0.0, 10_000), pieces_per_shard=row["pieces"], jitter=jitter, save_s=0.0
    )
    found = candidate(cluster, row["redundancy"]).outcome
    assert found is not None
    assert found.ratio == pytest.approx(row["ratio"], rel=0.01)
