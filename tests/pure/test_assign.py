"""Assignments: least largest load, then fewest moves; checked against brute force, a linear program and max-flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from spare_megatron.config.errors import ConfigError
from spare_megatron.placement import Placement, build_placement, placement_from_offsets
from spare_megatron.protocol.assign import Assignment, WipeOut, assign, first_assignment
from spare_megatron.protocol.assign_types import USUAL

GRANULARITIES = ("microbatch", "shard")


# ------------------------------------------------------------------------------------------------------- references


@lru_cache
def _splits(units: int, hosts: int) -> list[tuple[int, ...]]:
    """All ways to give ``units`` to ``hosts``."""
    if hosts == 1:
        return [(units,)]
    return [(first, *rest) for first in range(units + 1) for rest in _splits(units - first, hosts - 1)]


def brute_force(
    placement: Placement,
    live: list[int],
    units: int,
    previous: NDArray[np.int32],
    slow: Mapping[int, int] | None = None,
) -> tuple[int, int]:
    """(least largest load, fewest moves at it) over all ways to split every shard over its live hosts. With ``slow``,
    group -> sixteenths of a usual group's piece that one takes it: (least end in such sixteenths, fewest moves)."""
    takes = {group: 1 if slow is None else slow.get(group, USUAL) for group in live}
    choices = []
    for shard, row in enumerate(placement.hosts().tolist()):
        hosts = [group for group in row if group in live]
        held = [int((previous[shard, :units] == group).sum()) for group in hosts]
        options = []
        for split in _splits(units, len(hosts)):
            moves = sum(max(0, before - now) for before, now in zip(held, split, strict=True))
            options.append((dict(zip(hosts, split, strict=True)), moves))
        choices.append(options)
    best = (10**9, 0)
    for plan in product(*choices):
        load: dict[int, int] = {}
        for split, _ in plan:
            for group, count in split.items():
                load[group] = load.get(group, 0) + count * takes[group]
        best = min(best, (max(load.values()), sum(moves for _, moves in plan)))
    return best


def fewest_moves(
    placement: Placement, live: list[int], units: int, cap: int | NDArray[np.int64], previous: Assignment
) -> int:
    """The least number of moves at a given largest load, or under caps of the ``live`` groups, by HiGHS: the
    transport's matrix is totally unimodular."""
    hosts = placement.hosts()
    scale = previous.pieces_per_shard // units
    arcs = [
        (shard, group, int((previous.owner[shard] == group).sum()) // scale)
        for shard in range(placement.num_groups)
        for group in hosts[shard].tolist()
        if group in live
    ]
    n = len(arcs)
    columns = np.arange(2 * n)
    ones = np.ones(2 * n)
    shards = np.array([shard for shard, _, _ in arcs] * 2)
    groups = np.array([live.index(group) for _, group, _ in arcs] * 2)
    result = linprog(
        np.concatenate([-np.ones(n), np.zeros(n)]),  # a unit that stays saves a move
        A_eq=coo_array((ones, (shards, columns))).tocsr(),
        b_eq=np.full(placement.num_groups, units),
        A_ub=coo_array((ones, (groups, columns))).tocsr(),
        b_ub=np.broadcast_to(cap, len(live)),
        bounds=[(0, held) for _, _, held in arcs] + [(0, None)] * n,
        method="highs",
    )
    assert result.status == 0, result.message
    return (sum(held for _, _, held in arcs) + round(result.fun)) * scale


def fits(placement: Placement, live: list[int], units: int, cap: int | NDArray[np.int64]) -> bool:
    """Whether the live groups can cover everything within a largest load of ``cap``, or one of each of them: shards ->
    hosts -> sink."""
    num_groups = placement.num_groups
    alive = np.zeros(num_groups, dtype=bool)
    alive[live] = True
    hosts = placement.hosts()
    shard, layer = np.nonzero(alive[hosts])
    group = hosts[shard, layer]
    source, sink = 2 * num_groups, 2 * num_groups + 1
    tails = np.concatenate([np.full(num_groups, source), shard, num_groups + np.array(live)])
    heads = np.concatenate([np.arange(num_groups), num_groups + group, np.full(len(live), sink)])
    widths = np.concatenate([np.full(num_groups, units), np.full(len(shard), units), np.broadcast_to(cap, len(live))])
    graph = csr_array((widths.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    return bool(maximum_flow(graph, source, sink).flow_value == num_groups * units)


def check(placement: Placement, live: list[int], previous: Assignment, plan: Assignment) -> None:
    """Everything an assignment promises of itself."""
    num_groups, per_shard = plan.owner.shape
    assert plan.owner.dtype == np.int32
    assert not plan.owner.flags.writeable
    assert plan.live == tuple(sorted(live))
    assert np.isin(plan.owner, live).all()
    hosts = placement.hosts()
    assert (plan.owner[:, :, None] == hosts[:, None, :]).any(axis=2).all()
    load = np.bincount(plan.owner.ravel(), minlength=num_groups)
    assert plan.load_max == load.max()
    moved = (plan.owner != previous.owner) & np.isin(previous.owner, live)
    assert plan.moves == moved.sum()
    assert sorted(p for group in range(num_groups) for p in plan.pieces_of(group)) == list(
        range(num_groups * per_shard)
    )
    for group in range(num_groups):
        pieces = plan.pieces_of(group)
        assert all(plan.owner[p // per_shard, p % per_shard] == group for p in pieces)
        order = [p % per_shard * num_groups + p // per_shard for p in pieces]
        assert order == sorted(order)
    if plan.granularity == "shard":
        check_slots(placement, plan)


def check_slots(placement: Placement, plan: Assignment) -> None:
    assert plan.slots is not None
    assert (plan.owner == plan.owner[:, :1]).all()
    assert plan.load_max == plan.depth * plan.pieces_per_shard
    assert (np.sort(plan.slots, axis=0) == np.arange(placement.redundancy)[:, None]).all()
    layer, shard = np.nonzero(plan.units)
    assert (plan.slots[layer, placement.hosts()[shard, layer]] < plan.depth).all()


def walk(num_groups: int, fewest: int, picks: list[int]) -> Iterator[list[int]]:
    """Live sets: each pick toggles one group, at least ``fewest`` stay."""
    live = set(range(num_groups))
    for pick in picks:
        group = pick % num_groups
        if group not in live:
            live.add(group)
        elif len(live) > fewest:
            live.remove(group)
        yield sorted(live)


# ------------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=120, print_blob=True)
@given(
    shape=st.sampled_from([(2, 1, 3), (2, 2, 3), (3, 2, 3), (3, 3, 2), (4, 2, 2), (4, 3, 1), (5, 2, 2), (5, 3, 1)]),
    consecutive=st.booleans(),
    picks=st.lists(st.integers(0, 59), min_size=1, max_size=4),
)
def test_optimum_by_brute_force(
    granularity: str, shape: tuple[int, int, int], consecutive: bool, picks: list[int]
) -> None:
    num_groups, redundancy, per_shard = shape
    placement = build_placement(num_groups, redundancy, "consecutive" if consecutive else "independent")
    units = per_shard if granularity == "microbatch" else 1
    scale = per_shard // units
    previous = first_assignment(placement, per_shard, granularity)
    for live in walk(num_groups, 1, picks):
        plan = assign(placement, live, per_shard, granularity, previous)
        if isinstance(plan, WipeOut):
            covered = np.isin(placement.hosts(), live).any(axis=1)
            assert plan.shards == tuple(np.flatnonzero(~covered))
            continue
        check(placement, live, previous, plan)
        load, moves = brute_force(placement, live, units, previous.owner)
        assert (plan.load_max, plan.moves) == (load * scale, moves * scale), plan.reason
        previous = plan


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=50, print_blob=True)
@given(
    num_groups=st.integers(4, 24),
    redundancy=st.integers(2, 5),
    per_shard=st.integers(1, 8),
    consecutive=st.booleans(),
    picks=st.lists(st.integers(0, 10**6), min_size=4, max_size=30),
)
def test_optimum_along_losses_and_returns_by_linear_program(
    granularity: str, num_groups: int, redundancy: int, per_shard: int, consecutive: bool, picks: list[int]
) -> None:
    redundancy = min(redundancy, num_groups)
    placement = build_placement(num_groups, redundancy, "consecutive" if consecutive else "independent")
    units = per_shard if granularity == "microbatch" else 1
    scale = per_shard // units
    previous = first_assignment(placement, per_shard, granularity)
    for live in walk(num_groups, 1, picks):
        plan = assign(placement, live, per_shard, granularity, previous)
        if isinstance(plan, WipeOut):
            continue
        note(plan.reason)
        check(placement, live, previous, plan)
        load = plan.load_max // scale
        assert not fits(placement, live, units, load - 1)
        assert plan.moves == fewest_moves(placement, live, units, load, previous)
        previous = plan


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 8))])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_many_lost_or_back_at_once(granularity: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = build_placement(60, 4)
    per_shard = 16
    units = per_shard if granularity == "microbatch" else 1
    previous = first_assignment(placement, per_shard, granularity)
    for share in (0.8, 0.9, 0.6, 0.95, 0.7, 0.9, 1.0):
        live = sorted(rng.permutation(60)[: int(60 * share)].tolist())
        plan = assign(placement, live, per_shard, granularity, previous)
        if isinstance(plan, WipeOut):
            continue
        check(placement, live, previous, plan)
        load = plan.load_max * units // per_shard
        assert not fits(placement, live, units, load - 1)
        assert plan.moves == fewest_moves(placement, live, units, load, previous)
        previous = plan
    assert previous.load_max == per_shard, "everybody is back"


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("num_groups", "redundancy"),
    [(64, 6), (200, 9), *(pytest.param(n, 8, marks=pytest.mark.full) for n in (600, 1000))],
)
def test_lower_bound_is_reached_by_independent_placement(num_groups: int, redundancy: int, granularity: str) -> None:
    """SPARe (arXiv 2603.00357): after k losses no plan is below ceil(N / (N - k)) shards (in pieces:
    ceil(N K / (N - k))), and independent offsets reach it almost always. Where the plan is above, max-flow proves that
    the bound cannot be reached."""
    seed = 3
    rng = np.random.default_rng(seed)
    placement = build_placement(num_groups, redundancy)
    per_shard = 16
    units = per_shard if granularity == "microbatch" else 1
    above = plans = 0
    for _ in range(12):
        lost = int(rng.integers(1, int(0.35 * num_groups)))
        live = sorted(rng.permutation(num_groups)[lost:].tolist())
        plan = assign(placement, live, per_shard, granularity, None)
        if isinstance(plan, WipeOut):
            assert not np.isin(placement.hosts()[list(plan.shards)], live).any()
            continue
        plans += 1
        load = plan.load_max * units // per_shard
        bound = -(-num_groups * units // len(live))
        assert load >= bound
        assert not fits(placement, live, units, load - 1)
        above += load > bound
    print(f"seed {seed}: {above} of {plans} plans above the bound at N={num_groups}, r={redundancy}, {granularity}")
    assert plans


@pytest.mark.parametrize(
    ("granularity", "reason"),
    [
        ("microbatch", "4 of 12 groups lost; load 4 -> 12 pieces (bound 6); 0 pieces moved; "),
        (
            "shard",
            "4 of 12 groups lost; load 4 -> 12 pieces (bound 8); 0 pieces moved; depth 1 -> 3, 0 stacks reordered; ",
        ),
    ],
)
def test_a_load_above_the_bound_is_explained(granularity: str, reason: str) -> None:
    placement = build_placement(12, 3, "consecutive")
    plan = assign(placement, [0, 3, 6, 7, 8, 9, 10, 11], 4, granularity, None)
    assert isinstance(plan, Assignment)
    assert plan.reason == reason + "shards 3, 4, 5 (3) have only 1 live host, so no less"


def test_reason_of_the_phases() -> None:
    """SPARe's phases: fixed where the present top slots cover everything, else the least depth and fewest moves."""
    placement = placement_from_offsets(9, (0, 1, 6))
    plan = first_assignment(placement, 2, "shard")
    assert plan.reason == "all 9 groups live; load 2 pieces: every group computes its own shard"
    reasons = []
    for live in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 6, 7, 8), (2, 3, 4, 6, 7, 8), range(9)):
        found = assign(placement, live, 2, "shard", plan)
        assert isinstance(found, Assignment)
        plan = found
        reasons.append(plan.reason)
    assert reasons == [
        "1 of 9 groups lost; load 2 -> 4 pieces (bound 4); 0 pieces moved; depth 1 -> 2, 0 stacks reordered",
        "2 of 9 groups lost; load 4 -> 4 pieces (bound 4); 0 pieces moved; depth 2 kept, the present top slots cover "
        "every shard",
        "3 of 9 groups lost; load 4 -> 4 pieces (bound 4); 2 pieces moved; depth 2 -> 2, 1 stacks reordered",
        "0 of 9 groups lost; load 4 -> 2 pieces (bound 2); 8 pieces moved; depth 2 -> 1, 1 stacks reordered",
    ]


@settings(max_examples=40, print_blob=True)
@given(num_groups=st.integers(6, 40), picks=st.lists(st.integers(0, 10**6), min_size=1, max_size=15))
def test_shard_phase_fixed_moves_and_reorders_nothing(num_groups: int, picks: list[int]) -> None:
    """Whenever the survivors' top S slots cover every shard and nobody came back, depth, order and owners stay."""
    placement = build_placement(num_groups, min(4, num_groups))
    previous = first_assignment(placement, 2, "shard")
    hosts = placement.hosts().T
    for live in walk(num_groups, 1, picks):
        plan = assign(placement, live, 2, "shard", previous)
        if isinstance(plan, WipeOut):
            break
        assert previous.slots is not None
        assert plan.slots is not None
        top = np.take_along_axis(previous.slots, hosts, axis=1) < previous.depth
        covered = (top & np.isin(hosts, live)).any(axis=0).all()
        if covered and set(live) <= set(previous.live):
            assert (plan.moves, plan.depth) == (0, previous.depth)
            assert np.array_equal(plan.slots, previous.slots)
            assert "present top slots cover" in plan.reason
        previous = plan


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_everybody_back_is_everybody_home_in_load(granularity: str) -> None:
    placement = build_placement(20, 4)
    lost = assign(placement, range(3, 20), 5, granularity, None)
    assert isinstance(lost, Assignment)
    back = assign(placement, range(20), 5, granularity, lost)
    assert isinstance(back, Assignment)
    assert back.load_max == 5
    assert all(len(back.pieces_of(group)) == 5 for group in range(20))


def test_failure_free_plan_is_plain_data_parallelism() -> None:
    plan = first_assignment(build_placement(4, 2), 3, "microbatch")
    assert [plan.pieces_of(group) for group in range(4)] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert (plan.load_max, plan.moves, plan.depth) == (3, 0, 1)


def test_a_chain_of_two_hosts() -> None:
    """Shard 3 has only host 2 left, which passes the last piece of its own shard on to host 1."""
    placement = placement_from_offsets(4, (0, 1))
    plan = assign(placement, [0, 1, 2], 2, "microbatch", None)
    assert isinstance(plan, Assignment)
    assert [plan.pieces_of(group) for group in range(4)] == [(0, 1), (2, 3, 5), (4, 6, 7), ()]
    assert (plan.load_max, plan.moves) == (3, 1)


def test_wipe_out_names_the_shards() -> None:
    placement = placement_from_offsets(6, (0, 1))
    found = assign(placement, [0, 3, 4, 5], 2, "microbatch", None)
    assert isinstance(found, WipeOut)
    assert found.shards == (2,)
    assert found.reason == "wipe-out: 1 of 6 shards (2) have none of their 2 hosts among the 4 live groups"
    nobody = assign(placement, [], 2, "shard", None)
    assert isinstance(nobody, WipeOut)
    assert nobody.shards == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_same_history_same_plan(granularity: str) -> None:
    def run(shuffled: bool) -> list[tuple[bytes, str]]:
        rng = np.random.default_rng(11)
        placement = build_placement(40, 4)
        plan, out = first_assignment(placement, 6, granularity), []
        for _ in range(12):
            live = rng.permutation(40)[: int(rng.integers(30, 41))].tolist()
            found = assign(placement, live if shuffled else sorted(live), 6, granularity, plan)
            if isinstance(found, Assignment):
                plan = found
            out.append((plan.owner.tobytes(), found.reason))
        return out

    assert run(False) == run(True)


def test_unknown_granularity_is_refused() -> None:
    with pytest.raises(ConfigError, match="--spare-granularity layer is unknown; use microbatch or shard"):
        first_assignment(build_placement(4, 2), 3, "layer")


def test_where_every_group_hosts_every_shard_load_and_moves_are_the_least() -> None:
    seed, num_groups, per_shard = 11, 64, 3
    rng = np.random.default_rng(seed)
    placement = build_placement(num_groups, num_groups)
    plan = first_assignment(placement, per_shard, "microbatch")
    live = set(range(num_groups))
    for _ in range(60):
        change = int(rng.integers(num_groups))
        live = live - {change} if change in live and len(live) > 2 else live | {change}
        found = assign(placement, sorted(live), per_shard, "microbatch", plan)
        assert not isinstance(found, WipeOut), f"seed {seed}"
        cap = -(-num_groups * per_shard // len(live))
        assert found.load_max == cap == int(found.loads.max()), f"seed {seed}"
        assert set(np.flatnonzero(found.loads)) <= live
        over = sum(max(0, int(plan.loads[group]) - cap) for group in live)
        changed = int((found.owner != plan.owner)[np.isin(plan.owner, sorted(live))].sum())
        assert changed == over == found.moves, f"seed {seed}"
        plan = found
