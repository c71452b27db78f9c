"""Patches: every lost piece to a host of its shard, least largest remaining load, then the least second, ..."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spare_megatron.placement import Placement, build_placement, placement_from_offsets
from spare_megatron.protocol.assign import Patch, WipeOut, first_assignment, patch


def table(remaining: Mapping[int, int], num_groups: int) -> NDArray[np.int64]:
    """[N]: what every group still has to compute."""
    return np.array([remaining.get(group, 0) for group in range(num_groups)])


def takers(placement: Placement, shard: int, able: list[int], last_resort: list[int]) -> list[int]:
    hosts = placement.hosts()[shard].tolist()
    return [g for g in hosts if g in able] or [g for g in hosts if g in last_resort]


def loads_after(remaining: dict[int, int], found: Patch, groups: set[int]) -> list[int]:
    load = {group: remaining.get(group, 0) for group in groups}
    for group, pieces in found.added.items():
        load[group] += len(pieces)
    return sorted(load.values(), reverse=True)


def brute_force(
    blocks: list[tuple[int, int]], hosts: dict[int, list[int]], remaining: dict[int, int], groups: set[int]
) -> list[int]:
    """The lexicographically least loads, largest first, over all ways to give blocks (shard, pieces) to hosts."""
    best: list[int] | None = None
    for choice in product(*(hosts[shard] for shard, _ in blocks)):
        load = {group: remaining.get(group, 0) for group in groups}
        for group, (_, size) in zip(choice, blocks, strict=True):
            load[group] += size
        loads = sorted(load.values(), reverse=True)
        best = loads if best is None or loads < best else best
    assert best is not None
    return best


def check(
    placement: Placement, able: list[int], last_resort: list[int], missing: list[int], per_shard: int, found: Patch
) -> None:
    """Each missing piece once, at a group that may take it, in execution order."""
    assert sorted(piece for pieces in found.added.values() for piece in pieces) == sorted(missing)
    for group, pieces in found.added.items():
        assert pieces
        order = [piece % per_shard * placement.num_groups + piece // per_shard for piece in pieces]
        assert order == sorted(order)
        for piece in pieces:
            assert group in takers(placement, piece // per_shard, able, last_resort)


@settings(max_examples=250, print_blob=True)
@given(
    num_groups=st.integers(3, 7),
    redundancy=st.integers(2, 4),
    per_shard=st.integers(1, 3),
    granularity=st.sampled_from(["microbatch", "shard"]),
    data=st.data(),
)
def test_least_loads_by_brute_force(
    num_groups: int, redundancy: int, per_shard: int, granularity: str, data: st.DataObject
) -> None:
    placement = build_placement(num_groups, min(redundancy, num_groups))
    groups = data.draw(st.permutations(range(num_groups)))
    lost = data.draw(st.integers(1, num_groups - 1))
    joiners = data.draw(st.integers(0, num_groups - lost - 1))
    able, last_resort = sorted(groups[lost + joiners :]), sorted(groups[lost : lost + joiners])
    remaining = {group: data.draw(st.integers(0, 6)) for group in able + last_resort}
    if granularity == "shard":
        shards = data.draw(st.sets(st.integers(0, num_groups - 1), min_size=1, max_size=6))
        missing = [shard * per_shard + j for shard in sorted(shards) for j in range(per_shard)]
        blocks = [(shard, per_shard) for shard in sorted(shards)]
    else:
        every = range(num_groups * per_shard)
        missing = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1, max_size=7)))
        blocks = [(piece // per_shard, 1) for piece in missing]
    found = patch(
        placement,
        able,
        last_resort,
        missing,
        remaining=table(remaining, num_groups),
        pieces_per_shard=per_shard,
        granularity=granularity,
    )
    hosts = {shard: takers(placement, shard, able, last_resort) for shard, _ in blocks}
    if isinstance(found, WipeOut):
        assert found.shards == tuple(shard for shard in hosts if not hosts[shard])
        return
    note(found.reason)
    check(placement, able, last_resort, missing, per_shard, found)
    groups_concerned = {*able, *(group for groups in hosts.values() for group in groups)}
    assert loads_after(remaining, found, groups_concerned) == brute_force(blocks, hosts, remaining, groups_concerned)
    assert found.load_max == loads_after(remaining, found, {*able, *found.added})[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("granularity", ["microbatch", "shard"])
def test_no_single_block_can_go_to_a_less_loaded_host(seed: int, granularity: str) -> None:
    """At N=200, where brute force is out of reach: the local condition that the least loads must satisfy."""
    rng = np.random.default_rng(seed)
    placement, per_shard = build_placement(200, 8), 16
    lost = rng.permutation(200)[:30].tolist()
    able = sorted(set(range(200)) - set(lost))
    plan = first_assignment(placement, per_shard, granularity)
    missing = [piece for group in lost for piece in plan.pieces_of(group)]
    remaining = {group: int(rng.integers(0, 17)) for group in able}
    found = patch(
        placement,
        able,
        [],
        missing,
        remaining=table(remaining, 200),
        pieces_per_shard=per_shard,
        granularity=granularity,
    )
    assert isinstance(found, Patch)
    check(placement, able, [], missing, per_shard, found)
    load = {group: remaining[group] + len(found.added.get(group, ())) for group in able}
    size = per_shard if granularity == "shard" else 1
    for group, pieces in found.added.items():
        shards = [piece // per_shard for piece in pieces]
        for shard in set(shards):
            assert shards.count(shard) % size == 0
            assert all(load[other] + size >= load[group] for other in takers(placement, shard, able, []))
    again = patch(
        placement,
        able[::-1],
        [],
        missing[::-1],
        remaining=table(remaining, 200),
        pieces_per_shard=per_shard,
        granularity=granularity,
    )
    assert again == found


def test_chain_through_an_earlier_block() -> None:
    """Shard 1 has hosts 1 and 0, shard 2 only 1: the piece of shard 1, placed first, must give way."""
    placement = placement_from_offsets(4, (0, 1))
    found = patch(
        placement, [0, 1], [], [1, 2], remaining=table({0: 5, 1: 5}, 4), pieces_per_shard=1, granularity="microbatch"
    )
    assert isinstance(found, Patch)
    assert (found.added, found.load_max) == ({0: (1,), 1: (2,)}, 6)
    assert found.reason == (
        "2 pieces of 2 shards lost with their groups, patched by 2 groups; largest remaining load 5 -> 6 pieces"
    )


def test_joiners_only_where_nobody_else_can() -> None:
    placement = placement_from_offsets(4, (0, 1))
    found = patch(
        placement,
        [0],
        [1, 2],
        [0, 1, 2, 3, 4],
        remaining=table({0: 100}, 4),
        pieces_per_shard=2,
        granularity="microbatch",
    )
    assert isinstance(found, Patch)
    # Shards 0 and 1 have host 0, which holds the state; shard 2 has only joiners 1 and 2.
    assert {group: len(pieces) for group, pieces in found.added.items()} == {0: 4, 2: 1}


def test_blocks_of_different_size_stay_whole() -> None:
    placement = build_placement(5, 5)
    missing = [0, 1, 2, 3, 4, 6, 7, 9]
    found = patch(placement, [1, 2, 3], [], missing, remaining=table({}, 5), pieces_per_shard=3, granularity="shard")
    assert isinstance(found, Patch)
    check(placement, [1, 2, 3], [], missing, 3, found)
    assert sorted(p for pieces in found.added.values() for p in pieces) == missing
    for shard in range(4):
        assert sum(any(p // 3 == shard for p in pieces) for pieces in found.added.values()) == 1
    assert found.load_max == 3


def test_wipe_out_names_the_shards() -> None:
    found = patch(
        placement_from_offsets(4, (0, 1)),
        [0],
        [],
        [1, 4, 5],
        remaining=table({}, 4),
        pieces_per_shard=2,
        granularity="microbatch",
    )
    assert found == WipeOut((2,), "wipe-out: 2 lost pieces of shards 2 have no live host left")


def test_nothing_missing() -> None:
    found = patch(
        build_placement(3, 2), [0, 1], [], [], remaining=table({0: 4}, 3), pieces_per_shard=2, granularity="shard"
    )
    assert isinstance(found, Patch)
    assert (found.added, found.load_max) == ({}, 4)
