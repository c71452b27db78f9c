"""Placements with adopted shards, and assignments on them: least largest load, and only by hosts."""

from __future__ import annotations

import numpy as np
import pytest

from spare_megatron.placement import Placement, build_placement
from spare_megatron.protocol.assign import Assignment, WipeOut, assign


def least_load(placement: Placement, live: set[int], units: int) -> int:
    """By Hall's condition, over all sets of shards."""
    hosts = [live.intersection(placement.hosts_of(shard)) for shard in range(placement.num_groups)]
    least = 0
    for chosen in range(1, 2**placement.num_groups):
        shards = [shard for shard in range(placement.num_groups) if chosen >> shard & 1]
        least = max(least, -(-len(shards) * units // len(set().union(*(hosts[shard] for shard in shards)))))
    return least


def check(found: Assignment, placement: Placement, live: set[int], previous: Assignment | None) -> None:
    """Whatever must hold of an assignment."""
    layers, units = placement.by_layer, found.pieces_per_shard if found.slots is None else 1
    for shard, row in enumerate(found.owner.tolist()):
        assert set(row) <= live.intersection(placement.hosts_of(shard))
    assert found.loads.tolist() == np.bincount(found.owner.ravel(), minlength=placement.num_groups).tolist()
    assert found.load_max == least_load(placement, live, units) * found.pieces_per_shard // units
    owned = (found.owner[None, :, :] == layers.hosts[:, :, None]).sum(axis=2) * layers.among(found.alive)
    assert ((owned > 0) == (found.units > 0)).all()
    if found.slots is not None:
        in_use = np.take_along_axis(found.slots, layers.hosts, axis=1)[found.units > 0]
        assert (in_use < found.depth).all()
        assert (np.sort(found.slots, axis=0) == np.arange(len(layers.hosts))[:, None]).all()


@pytest.mark.parametrize("granularity", ["microbatch", "shard"])
@pytest.mark.parametrize("seed", range(60))
def test_groups_adopt_what_is_bare_and_leave_again(seed: int, granularity: str) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 8))
    base = build_placement(size, int(rng.integers(1, min(4, size) + 1)))
    per_shard, live, adopted = int(rng.integers(1, 6)), set(range(size)), set[tuple[int, int]]()
    previous: Assignment | None = None
    for _ in range(7):
        live = {group for group in range(size) if rng.random() < (0.7 if group in live else 0.25)} or live
        adopted = {(shard, group) for shard, group in adopted if group in live and rng.random() < 0.9}
        placement = base.adopting(adopted)
        bare = [shard for shard in range(size) if live.isdisjoint(placement.hosts_of(shard))]
        if bare:
            assert isinstance(assign(placement, sorted(live), per_shard, granularity, previous), WipeOut)
        adopted |= {(shard, int(g)) for shard in bare for g in rng.permutation(sorted(live))[:2]}
        placement = base.adopting(adopted)
        found = assign(placement, sorted(live), per_shard, granularity, previous)
        assert isinstance(found, Assignment)
        check(found, placement, live, previous)
        previous = found


def test_what_is_adopted_is_there_once_in_the_layers() -> None:
    adopted = {(2, 0), (2, 3), (1, 3), (0, 3), (4, 0)}
    placement = build_placement(6, 2).adopting(adopted)
    layers = placement.by_layer
    assert layers.real is not None
    there = [(int(i), int(layers.hosts[k, i])) for k, i in np.argwhere(layers.real) if k >= 2]
    assert sorted(there) == sorted(adopted)
    assert (np.sort(layers.hosts, axis=1) == np.arange(6)).all()
    assert (layers.hosts.ravel()[layers.stack_cells] == np.arange(6)).all()
    assert placement.hosts_of(2) == [*build_placement(6, 2).hosts()[2].tolist(), 0, 3]
    assert placement.stack_of(3) == [*build_placement(6, 2).stacks()[3].tolist(), 0, 1, 2]
    assert placement.adopting(()).by_layer.real is None
    with pytest.raises(AssertionError, match="hosts the shard already"):
        placement.adopting([(0, 0)])
