"""Theory against simulated losses of the real placement and against the controller's own plans."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import gamma

import numpy as np
import pytest

from spare_megatron.controller.assign import Assignment, assign, first_assignment
from spare_megatron.placement import build_placement
from spare_megatron.theory import depth, endured, published, ratio
from spare_megatron.theory.shortage import short_sets

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
    lives = endured.endured(num_groups, placement.offsets)
    found = depth.work(num_groups, redundancy, pieces, lives)
    states = np.arange(len(found.after))
    least = float(np.average(depth.bounds(num_groups, states, pieces), weights=lives.survival[states]))
    print(f"seed {SEED}: plans {simulated:.4f} +- {error:.4f} x bound, theory {found.mean / least:.4f}")
    assert found.mean / least == pytest.approx(simulated, abs=tolerance * simulated + 2 * error)


def test_rings_agree_with_the_general_count() -> None:
    """r = 2 has an exact count; the cavity iteration of three hosts with one always lost is the same problem."""
    share = np.array([0.02, 0.1])
    for cap in (17, 20, 24, 32):
        exact = sum(share**2 * (1 - share) ** run for run in range(17) if (run + 1) * 16 > run * cap)
        np.testing.assert_allclose(short_sets(2, 16, cap, share), exact)


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
    found = ratio.outcome(num_groups, np.full(num_groups, 3.0), copies.survival, ratio.Patch(0.0), costs, planned=False)
    assert found is not None
    assert found.ratio == pytest.approx(blocks, rel=0.05)
    lives = endured.endured(num_groups, build_placement(num_groups, 9).offsets)
    loads = depth.work(num_groups, 9, 1, lives)
    found = ratio.outcome(num_groups, loads.after, lives.survival, ratio.Patch(0.1), costs, planned=False)
    assert found is not None
    assert found.ratio == pytest.approx(scheme, rel=0.05)
    assert found.restart_after is None


def test_no_losses_cost_only_saves() -> None:
    costs = ratio.Costs(1e15, 60, 1, 10, 1, jitter=0.0)
    found = ratio.outcome(4, np.ones(4), np.array([1.0, 1.0, 0.5, 0.0, 0.0]), ratio.Patch(0.0), costs)
    assert found is not None
    assert found.ratio == pytest.approx(1.0, abs=1e-3)
    assert found.availability == pytest.approx(1.0, abs=1e-6)


def test_restart_takes_longer_when_groups_fail_while_they_start() -> None:
    assert ratio.restart_time_s(200, ratio.Costs(1e15, 3600, 60, 64, 2)) == pytest.approx(3600, rel=0.02)
    for num_groups in CELLS:
        costs = ratio.Costs(300, 3600, 60, 64, 2, weibull_shape=0.78)
        assert 7000 <= ratio.restart_time_s(num_groups, costs) <= 7800


def test_standbys_and_rejoin_help() -> None:
    lives = endured.endured(200, build_placement(200, 5).offsets)
    loads = depth.work(200, 5, 16, lives)

    def course(**more: float) -> ratio.Outcome:
        costs = ratio.Costs(300, 3600, 60, 64, 2, **more)  # type: ignore[arg-type]
        found = ratio.outcome(200, loads.after, lives.survival, ratio.Patch.spread(16, 4), costs)
        assert found is not None
        return found

    alone = course().ratio
    assert course(standby_groups=20).ratio < alone
    back = course(rejoin_s=600.0)
    assert back.ratio < alone
    assert back.restart_after is None
    assert course(rejoin_s=600.0, standby_groups=10).ratio <= back.ratio
