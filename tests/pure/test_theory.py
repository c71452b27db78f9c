"""Theory against simulated losses of the real placement and against the protocol machine's own plans."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from math import acos, comb, gamma, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from spare_megatron.placement import build_placement
from spare_megatron.planning import depth, endured, published, ratio, rejoin
from spare_megatron.planning.choose import candidate
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.planning.shortage import short_on_ring, short_sets, triangles_per_shard
from spare_megatron.protocol.assign import Assignment, assign, first_assignment

SEED = 7_141


@lru_cache
def simulated_endured(num_groups: int, redundancy: int, orders: int) -> float:
    """Straight from the definition: the last host of the first shard that loses all."""
    rng = np.random.default_rng((SEED, num_groups, redundancy))
    hosts = build_placement(num_groups, redundancy).hosts()
    return float(np.mean([rng.permutation(num_groups)[hosts].max(axis=1).min() for _ in range(orders)]))


@pytest.mark.parametrize(
    ("num_groups", "redundancy", "orders"),
    [
        *((64, 2, 20000), (64, 5, 6000), (64, 8, 4000), (200, 3, 10000), (200, 9, 2000), (200, 13, 1500)),
        *((600, 2, 10000), (600, 8, 1500), (600, 20, 800), (1000, 4, 3000), (1000, 12, 800), (4000, 14, 200)),
    ],
)
def test_losses_endured(num_groups: int, redundancy: int, orders: int) -> None:
    """Within 1.5%, the simulation's own standard error (at most 0.6%) included."""
    print(f"seed {SEED}")
    found = endured.endured(num_groups, build_placement(num_groups, redundancy).offsets)
    assert found.mean == pytest.approx(simulated_endured(num_groups, redundancy, orders), rel=0.015)
    assert found.survival[0] == 1.0
    assert (np.diff(found.survival) <= 1e-12).all()
    assert found.survival[1:].sum() == pytest.approx(found.mean, rel=2e-3)


def test_every_or_one_host() -> None:
    assert endured.endured(8, range(8)).mean == 7
    assert endured.endured(8, (0,)).mean == 0


def test_replicated_blocks() -> None:
    rng = np.random.default_rng(SEED)
    blocks = np.arange(200) // 3
    fatal = []
    for _ in range(4000):
        turn = rng.permutation(200)
        fatal.append(min(int(turn[blocks == block].max()) for block in range(67)))
    print(f"seed {SEED}")
    assert endured.replication(200, 3).mean == pytest.approx(np.mean(fatal), rel=0.02)


@pytest.mark.parametrize(("num_groups", "redundancy"), [(64, 2), (64, 3), (64, 6), (64, 12), (200, 4), (200, 9)])
@pytest.mark.parametrize(("granularity", "pieces", "tolerance"), [("shard", 1, 0.006), ("microbatch", 16, 0.02)])
def test_work_against_the_controllers_plans(
    num_groups: int, redundancy: int, granularity: str, pieces: int, tolerance: float
) -> None:
    """What the plans take above the bound, times the bound's mean over all orders: most of the noise is common."""
    rng = np.random.default_rng((SEED, num_groups, redundancy))
    placement = build_placement(num_groups, redundancy)
    sums = []
    for _ in range(40 if num_groups == 64 else 20):
        taken = bound = 0.0
        order = rng.permutation(num_groups)
        plan: object = first_assignment(placement, pieces, granularity)
        lost = 0
        while isinstance(plan, Assignment):
            taken += plan.load_max / pieces
            bound += published.load_bound(num_groups, lost, pieces)
            lost += 1
            plan = assign(placement, np.sort(order[lost:]).tolist(), pieces, granularity, plan)
        sums.append((taken, bound))
    took, least_took = np.array(sums).T
    simulated = took.sum() / least_took.sum()
    error = (took - simulated * least_took).std() / least_took.mean() / len(sums) ** 0.5
    lifetimes = endured.endured(num_groups, placement.offsets)
    found = depth.work(num_groups, placement.offsets, pieces, lifetimes)
    states = np.arange(len(found.after))
    least = float(np.average(depth.bounds(num_groups, states, pieces), weights=lifetimes.survival[states]))
    print(f"seed {SEED}: plans {simulated:.4f} +- {error:.4f} x bound, theory {found.mean / least:.4f}")
    assert found.mean / least == pytest.approx(simulated, abs=tolerance * simulated + 2 * error)


def test_rings_are_counted_exactly() -> None:
    """Every way to lose k of 11 groups on a ring, no two neighbours: how many have a run of n live groups whose n + 1
    shards do not fit."""
    num_groups, units = 11, 4
    for cap in range(units, 2 * units + 1):
        for lost in range(1, 6):
            runs = [
                [(b - a) % num_groups or num_groups for a, b in zip(gone, (*gone[1:], gone[0]), strict=True)]
                for gone in combinations(range(num_groups), lost)
            ]
            kept = [run for run in runs if min(run) > 1]
            short = [run for run in kept if any(gap * units > (gap - 1) * cap for gap in run)]
            found = short_on_ring(num_groups, np.array([lost]), units, cap)
            assert found[0] == pytest.approx(len(short) / len(kept)), f"cap {cap}, {lost} lost"
    assert short_on_ring(num_groups, np.array([0]), units, units).tolist() == [0.0]


@pytest.mark.parametrize(("redundancy", "num_groups"), [(3, 61), (4, 61), (4, 401), (5, 200)])
def test_triangles_are_counted(redundancy: int, num_groups: int) -> None:
    """Three shards any two of which share a group of their own, in a real placement."""
    placement = build_placement(num_groups, redundancy)
    hosts = [set(row) for row in placement.hosts().tolist()]
    shards = range(num_groups)
    near = {a: {b for b in shards if b != a and hosts[a] & hosts[b]} for a in shards}
    triples = {frozenset((a, b, c)) for a in shards for b in near[a] for c in near[a] & near[b]}
    triangles = [one for one in triples if not set.intersection(*(hosts[shard] for shard in one))]
    assert len(triangles) == triangles_per_shard(num_groups, placement.offsets) * num_groups
    assert len(triangles) >= comb(redundancy, 3) * num_groups
    corners = [hosts[shard] for shard in triangles[0]]
    groups = sorted(set().union(*corners))
    alone = 0
    for kept in (set(kept) for size in range(len(groups) + 1) for kept in combinations(groups, size)):
        short = [
            size > 1.4 * len(kept & set().union(*some)) for size in (1, 2, 3) for some in combinations(corners, size)
        ]
        alone += short == [False] * 6 + [True]
    assert len(groups) == 3 * redundancy - 3
    assert alone == 3, "ways in which the three shards are short together and no fewer of them are"


def test_short_sets_fall_with_the_cap_and_end_at_the_wipe_out() -> None:
    share = np.array([0.05, 0.2])
    for redundancy in (3, 5):
        counts = [short_sets(redundancy, 16, cap, share) for cap in (24, 32, 48, 16 * redundancy)]
        for more, less in pairwise(counts):
            assert (more >= less - 1e-12).all()
        np.testing.assert_allclose(counts[-1], share**redundancy, rtol=1e-6)


def test_published_forms() -> None:
    """arXiv 2603.00357: mu, Tc*, r*; Tc* is where A is largest."""
    assert published.endurable_failures(200, 9) == pytest.approx(gamma(1 / 9) / 9 * 200 ** (8 / 9))
    assert [published.best_redundancy(n) for n in (200, 600, 1000)] == [8, 10, 10]
    best = published.best_interval_s(30_000, 3600, 60)
    top = published.availability(best, 30_000, 3600, 60)
    assert top == pytest.approx(published.best_availability(30_000, 3600, 60))
    for factor in (0.9, 1.1):
        assert published.availability(best * factor, 30_000, 3600, 60) < top
    assert published.mean_depth(600, 20, lambda lost: 0.5) == pytest.approx(published.mean_depth(600, 20) + 0.5)
    assert published.time_to_train(600, 8, 300, 3600, 60) < published.time_to_train(600, 2, 300, 3600, 60)


# N: (replication r = 3 ratio, SPARe r = 9 ratio and availability): the published cells' own model, papers' reading.
CELLS = {200: (5.88, 2.935, 0.872), 600: (4.27, 2.485, 0.940), 1000: (3.89, 2.345, 0.966)}


@pytest.mark.parametrize("num_groups", CELLS)
def test_expected_course_against_the_published_runs(num_groups: int) -> None:
    """Within 5% of the simulated published table."""
    costs = ratio.Costs(300, 3600, 60, 64, num_groups / 100, weibull_shape=0.78)
    blocks, scheme, _ = CELLS[num_groups]
    copies = endured.replication(num_groups, 3)
    found = ratio.outcome(
        num_groups, np.full(num_groups, 3.0), copies.survival, ratio.PatchCost(0.0), costs=costs, planned=False
    )
    assert found is not None
    assert found.ratio == pytest.approx(blocks, rel=0.05)
    offsets = build_placement(num_groups, 9).offsets
    lifetimes = endured.endured(num_groups, offsets)
    loads = depth.work(num_groups, offsets, 1, lifetimes)
    found = ratio.outcome(num_groups, loads.after, lifetimes.survival, ratio.PatchCost(0.1), costs=costs, planned=False)
    assert found is not None
    assert found.ratio == pytest.approx(scheme, rel=0.05)
    assert found.restart_after is None


def test_no_losses_cost_only_saves() -> None:
    costs = ratio.Costs(1e15, 60, 1, 10, 1, jitter=0.0)
    found = ratio.outcome(4, np.ones(4), np.array([1.0, 1.0, 0.5, 0.0, 0.0]), ratio.PatchCost(0.0), costs=costs)
    assert found is not None
    assert found.ratio == pytest.approx(1.0, abs=1e-3)
    assert found.availability == pytest.approx(1.0, abs=1e-6)


def test_restart_takes_longer_when_groups_fail_while_they_start() -> None:
    assert ratio.restart_time_s(200, ratio.Costs(1e15, 3600, 60, 64, 2)) == pytest.approx(3600, rel=0.02)
    for num_groups in CELLS:
        costs = ratio.Costs(300, 3600, 60, 64, 2, weibull_shape=0.78)
        assert 7000 <= ratio.restart_time_s(num_groups, costs) <= 7800


def test_standbys_and_rejoin_help() -> None:
    offsets = build_placement(200, 5).offsets
    lifetimes = endured.endured(200, offsets)
    loads = depth.work(200, offsets, 16, lifetimes)

    def course(**more: float) -> ratio.ExpectedRun:
        costs = ratio.Costs(300, 3600, 60, 64, 2, **more)  # type: ignore[arg-type]
        if costs.rejoin_s is not None:
            found = rejoin.steady_course(200, rejoin.Sharing(5, 16, loads.after, lifetimes.survival), costs)
        else:
            found = ratio.outcome(200, loads.after, lifetimes.survival, ratio.PatchCost.spread(16, 4), costs=costs)
        assert found is not None
        return found

    alone = course().ratio
    assert course(standby_groups=20).ratio < alone
    back = course(rejoin_s=600.0)
    assert back.ratio < alone
    assert back.restart_after is None
    assert course(rejoin_s=600.0, standby_groups=10).ratio <= back.ratio


@pytest.mark.parametrize("rebuild_s", [0.0, 2.0, 7.0, 15.0, 40.0])
def test_a_rebuild_costs_what_outlasts_the_computing(rebuild_s: float) -> None:
    """docs/theory.md, section 4: the closed form against the mean over every time of a step, 12 s + 3 s of it."""
    costs = ratio.Costs(300, 600, 10, 12, 3, rebuild_s=rebuild_s, jitter=0.0)
    for patch in (ratio.PatchCost(), ratio.PatchCost(0.25)):
        patch_s = patch.shards * costs.compute_s
        at = (np.arange(15_000) + 0.5) / 1000
        computing = np.maximum(patch_s, rebuild_s - (12 - at))
        reducing = at - 12 + max(patch_s, rebuild_s)
        mean_s = float(np.where(at < 12, computing, reducing).mean())
        charged = ratio._masked_s(10, np.ones(1), np.zeros(1, dtype=np.int64), np.array([15.0]), patch, costs)
        assert float(charged[0]) == pytest.approx(mean_s, rel=1e-4)


REBUILDS = Path(__file__).parents[2] / "benchmarks" / "results" / "rebuild_sweep.json"


@pytest.mark.parametrize(
    ("policy", "redundancy", "more"),
    [
        ("microbatch r=7", 7, {"planned_restarts": False}),
        ("shared data, planned restart", 1000, {"data": "shared"}),
        ("re-join r=6", 6, {"rejoin_s": 600.0}),
    ],
)
def test_cost_of_slow_rebuilds_against_simulated(policy: str, redundancy: int, more: dict[str, Any]) -> None:
    """benchmarks/rebuild_sweep.py, N = 1000: what a slower rebuild adds is within 1% of the time to train."""
    rows = {row["policy"]: row for row in json.loads(REBUILDS.read_text())["results"]}
    cluster = ClusterFigures(600_000, 600, 300, 3600, 60, 64, 10, weibull_shape=0.78, **more)

    def planned(rebuild_s: float) -> float:
        found = candidate(replace(cluster, rebuild_s=rebuild_s), redundancy).outcome
        assert found is not None
        return found.ratio

    for rebuild_s in (1, 3, 10, 30):
        simulated = rows[policy][f"at_{rebuild_s}_s"] / rows[policy]["at_0.1_s"]
        assert planned(rebuild_s) / planned(0.1) == pytest.approx(simulated, abs=0.01), rebuild_s


def test_a_rebuild_is_not_down_time() -> None:
    """As in the simulator, where a group computes while communicators form anew."""
    costs = ratio.Costs(300, 0, 0, 12, 3, rebuild_s=10.0, rejoin_s=100.0)
    sharing = rejoin.Sharing(10, 4, np.ones(10), (np.arange(11) < 10).astype(float))
    found = rejoin.steady_course(10, sharing, costs)
    assert found is not None
    assert found.availability == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("groups", "largest"),
    [
        # Closed forms (David & Nagaraja, Order Statistics, 3.2): 1 / sqrt(pi), 3 / (2 sqrt(pi)) and so on.
        *((1, 0.0), (2, pi**-0.5), (3, 1.5 * pi**-0.5), (4, 3 * pi**-1.5 * acos(-1 / 3)), (5, 1.16296447)),
        # Their tables, and quadrature with scipy.integrate.quad.
        *((10, 1.53875273), (20, 1.86747506), (100, 2.50759364), (1000, 3.24143577)),
    ],
)
def test_the_slowest_of_normal_groups(groups: int, largest: float) -> None:
    assert float(ratio.slowest(1.0, groups)) == pytest.approx(1 + largest, rel=3e-5)


def test_the_slowest_between_the_computed_counts() -> None:
    counts = np.array([7, 23, 64, 200, 777, 4096, 60_001])

    def expected(count: int) -> float:
        return quad(lambda x: 1 - ndtr(x) ** count - ndtr(-x) ** count, 0, 12)[0]

    np.testing.assert_allclose(ratio.slowest(1.0, counts) - 1, [expected(int(each)) for each in counts], rtol=1e-4)
