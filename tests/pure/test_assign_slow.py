"""Assignments where groups are slow for long: least end, then fewest moves; by brute force, linear program and
max-flow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from spare_megatron.placement import Placement, build_placement
from spare_megatron.protocol import audits
from spare_megatron.protocol.assign import Assignment, WipeOut, assign, first_assignment, patch
from spare_megatron.protocol.assign_slowness import least_end, slowness_of
from spare_megatron.protocol.assign_types import USUAL, Patch
from spare_megatron.protocol.messages import JobSpec
from tests.pure.test_assign import brute_force, check, fewest_moves, fits, walk

SLOWNESS = st.dictionaries(st.integers(0, 3), st.sampled_from([18, 21, 24, 32, 43, 48]), max_size=2)


def check_end(
    placement: Placement, live: list[int], slow: dict[int, int], previous: Assignment, plan: Assignment
) -> None:
    """The end is the least, which max-flow proves, and the moves are the fewest at that end."""
    check(placement, live, previous, plan)
    takes = np.array([slow.get(group, USUAL) for group in live])
    assert plan.slowness.tolist() == slowness_of(placement.num_groups, live, slow).tolist()
    assert plan.end == int((plan.loads[live] * takes).max())
    units = plan.pieces_per_shard
    assert fits(placement, live, units, plan.end // takes)
    assert not fits(placement, live, units, (plan.end - 1) // takes)
    assert plan.moves == fewest_moves(placement, live, units, plan.end // takes, previous)


@settings(max_examples=200, print_blob=True, deadline=None)
@given(
    shape=st.sampled_from([(2, 1, 3), (2, 2, 4), (3, 2, 3), (3, 3, 2), (4, 2, 2), (4, 3, 1)]),
    consecutive=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 59), SLOWNESS), min_size=1, max_size=4),
)
def test_optimum_by_brute_force(
    shape: tuple[int, int, int], consecutive: bool, steps: list[tuple[int, dict[int, int]]]
) -> None:
    num_groups, redundancy, per_shard = shape
    placement = build_placement(num_groups, redundancy, "consecutive" if consecutive else "independent")
    previous = first_assignment(placement, per_shard, "microbatch")
    for live, (_, slow) in zip(walk(num_groups, 1, [pick for pick, _ in steps]), steps, strict=True):
        plan = assign(placement, live, per_shard, "microbatch", previous, slow)
        if isinstance(plan, WipeOut):
            continue
        note(plan.reason)
        check(placement, live, previous, plan)
        assert (plan.end, plan.moves) == brute_force(placement, live, per_shard, previous.owner, slow)
        previous = plan


@settings(max_examples=50, print_blob=True, deadline=None)
@given(
    num_groups=st.integers(4, 24),
    redundancy=st.integers(2, 5),
    per_shard=st.integers(2, 16),
    picks=st.lists(st.integers(0, 10**6), min_size=4, max_size=20),
    seed=st.integers(0, 10**6),
)
def test_optimum_along_losses_returns_and_speeds_that_change(
    num_groups: int, redundancy: int, per_shard: int, picks: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    placement = build_placement(num_groups, min(redundancy, num_groups))
    previous = first_assignment(placement, per_shard, "microbatch")
    slow: dict[int, int] = {}
    for live in walk(num_groups, 1, picks):
        if rng.random() < 0.5:
            slow = {int(g): int(rng.integers(18, 49)) for g in rng.choice(num_groups, 2, replace=False)}
        plan = assign(placement, live, per_shard, "microbatch", previous, slow)
        if isinstance(plan, WipeOut):
            continue
        note(plan.reason)
        check_end(placement, live, slow, previous, plan)
        previous = plan


@pytest.mark.parametrize("seed", range(30))
def test_with_adopted_shards_the_end_is_the_least_by_halls_condition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, per_shard = int(rng.integers(3, 7)), int(rng.integers(1, 6))
    base = build_placement(size, int(rng.integers(1, 3)))
    previous: Assignment | None = None
    for _ in range(6):
        live = sorted(rng.choice(size, int(rng.integers(2, size + 1)), replace=False).tolist())
        slow = {int(group): int(rng.integers(18, 49)) for group in rng.choice(size, 2, replace=False)}
        bare = np.flatnonzero(~np.isin(base.hosts(), live).any(axis=1)).tolist()
        placement = base.adopting((shard, int(group)) for shard in bare for group in rng.permutation(live)[:2])
        plan = assign(placement, live, per_shard, "microbatch", previous, slow)
        assert isinstance(plan, Assignment)
        takes = slowness_of(size, live, slow)
        least = 0
        for chosen in range(1, 2**size):
            shards = [shard for shard in range(size) if chosen >> shard & 1]
            hosts = sorted({group for shard in shards for group in placement.hosts_of(shard)}.intersection(live))
            least = max(least, least_end(takes[hosts], len(shards) * per_shard))
        assert plan.end == least, plan.reason
        assert all(set(row) <= set(placement.hosts_of(shard)) for shard, row in enumerate(plan.owner.tolist()))
        previous = plan


def test_one_of_a_thousand_at_half_speed_has_half_a_shard_and_gets_it_back() -> None:
    placement = build_placement(1000, 6)
    first = first_assignment(placement, 64, "microbatch")
    live = list(range(1000))
    drawn = assign(placement, live, 64, "microbatch", first, {7: 32})
    assert isinstance(drawn, Assignment)
    assert (drawn.loads[7], drawn.load_max, drawn.moves) == (32, 65, 71)
    assert drawn.reason == (
        "0 of 1000 groups lost; load 64 -> 65 pieces (bound 65); 71 pieces moved; group 7 takes 2.00 times as long for "
        "a piece and has 32"
    )
    again = assign(placement, live, 64, "microbatch", drawn, {})
    assert isinstance(again, Assignment)
    assert again.loads.tolist() == [64] * 1000


def test_where_every_group_hosts_every_shard() -> None:
    seed, num_groups, per_shard = 5, 64, 8
    rng = np.random.default_rng(seed)
    placement = build_placement(num_groups, num_groups)
    plan = first_assignment(placement, per_shard, "microbatch")
    live = set(range(num_groups))
    for _ in range(40):
        change = int(rng.integers(num_groups))
        live = live - {change} if change in live and len(live) > 2 else live | {change}
        slow = {int(group): int(rng.integers(18, 49)) for group in rng.choice(num_groups, 5, replace=False)}
        found = assign(placement, sorted(live), per_shard, "microbatch", plan, slow)
        assert isinstance(found, Assignment)
        takes = slowness_of(num_groups, live, slow)[sorted(live)]
        caps = found.end // takes
        assert (found.loads[sorted(live)] <= caps).all(), f"seed {seed}"
        assert int(((found.end - 1) // takes).sum()) < num_groups * per_shard, f"seed {seed}"
        assert found.moves == int(np.maximum(plan.loads[sorted(live)] - caps, 0).sum()), f"seed {seed}"
        plan = found


def test_whole_shards_are_shared_out_as_if_all_were_equally_fast() -> None:
    placement = build_placement(9, 3)
    plain = assign(placement, range(1, 9), 2, "shard", None)
    slow = assign(placement, range(1, 9), 2, "shard", None, {3: 48})
    assert isinstance(plain, Assignment)
    assert isinstance(slow, Assignment)
    assert (slow.owner.tobytes(), slow.reason) == (plain.owner.tobytes(), plain.reason)


@given(
    slowness=st.lists(st.integers(16, 64), min_size=1, max_size=5), units=st.integers(0, 40), late=st.integers(1, 200)
)
def test_the_least_end_is_an_end_and_the_least(slowness: list[int], units: int, late: int) -> None:
    takes = np.array(slowness)
    end = least_end(takes, units)
    assert (end // takes).sum() >= units
    assert not units or (max(0, end - late) // takes).sum() < units


@settings(max_examples=150, print_blob=True, deadline=None)
@given(num_groups=st.integers(2, 5), per_shard=st.integers(1, 3), slow=SLOWNESS, data=st.data())
def test_a_patch_ends_as_early_as_possible(
    num_groups: int, per_shard: int, slow: dict[int, int], data: st.DataObject
) -> None:
    placement = build_placement(num_groups, num_groups)
    able = sorted(data.draw(st.sets(st.integers(0, num_groups - 1), min_size=1, max_size=3)))
    remaining = {group: data.draw(st.integers(0, 6)) for group in able}
    missing = sorted(data.draw(st.sets(st.integers(0, num_groups * per_shard - 1), min_size=1, max_size=8)))
    given = np.array([remaining.get(group, 0) for group in range(num_groups)])
    found = patch(
        placement, able, [], missing, remaining=given, pieces_per_shard=per_shard, granularity="microbatch", slow=slow
    )
    assert isinstance(found, Patch)
    takes = np.array([slow.get(group, USUAL) for group in able])
    had = np.array([remaining[group] for group in able])
    loads = had + [len(found.added.get(group, ())) for group in able]
    last = max((int(loads[k] * takes[k]) for k in range(len(able)) if found.added.get(able[k])), default=0)
    assert np.maximum((last - 1) // takes - had, 0).sum() < len(missing), found.reason
    assert found.load_max == loads.max()


def test_a_slow_group_audits_no_more_than_it_has_time_for() -> None:
    spec = JobSpec(4, 16, (0, 1, 2, 3), "microbatch", 0, 9, 1, "job", audit_rate=0.25, audit_seed=3)
    placement = build_placement(4, 4)
    plan = assign(placement, range(4), 16, "microbatch", None, {2: 48})
    assert isinstance(plan, Assignment)
    loads = plan.loads.copy()
    for group, (pieces,) in audits.draw(spec, placement, plan, range(4), 5).items():
        loads[group] += len(pieces)
    ends = loads * plan.slowness
    assert ends[2] - min(ends) < 48
    assert loads[2] < min(loads[[0, 1, 3]]) / 2


@pytest.mark.parametrize("slow", [{}, {1: USUAL}])
def test_no_slow_group_changes_nothing(slow: dict[int, int]) -> None:
    placement = build_placement(12, 3)
    live = [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    plain, same = (assign(placement, live, 4, "microbatch", None, given) for given in (None, slow))
    assert isinstance(plain, Assignment)
    assert isinstance(same, Assignment)
    assert (same.owner.tobytes(), same.reason) == (plain.owner.tobytes(), plain.reason)
