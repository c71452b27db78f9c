"""A cyclic placement, given by r offsets, says which groups host which shard.

Group g hosts, as layer l of its stack, shard (g + offset[l]) mod N; shard i is hosted, at layer l, by group
(i - offset[l]) mod N. The first offset is 0, so without failures every group computes the shard of its own number.
Pure arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.errors import ConfigError
from spare_megatron.placement.offsets import independent_offsets
from spare_megatron.placement.overlap import max_overlap


@dataclass(frozen=True, eq=False)
class LayerTables:
    """The tables of a placement as read-only int64 arrays [r, N], for planners that go through them layer by layer."""

    hosts: NDArray[np.int64]
    """hosts[l, i]: the group that has shard i at layer l."""
    stacks: NDArray[np.int64]
    """stacks[l, g]: the shard at layer l of group g."""
    stack_cells: NDArray[np.int64]
    """stack_cells[l, g]: position of the shard at layer l of group g in a flattened [r, N] table by shard, so that
    ``table.take(stack_cells)`` is that table by group."""


@dataclass(frozen=True)
class Placement:
    """A cyclic placement of N shards on N groups, each shard on r groups."""

    num_groups: int
    """N: number of groups, and of shards."""
    offsets: tuple[int, ...]
    """r offsets, the first 0, pairwise distinct mod N, in the order of the layers of a stack."""
    max_overlap: int
    """The largest number of shards that two different groups share; a placement with at most 1 is independent."""
    reason: str
    """One sentence with the figures that says what kind of offsets these are, and why there are no better ones."""

    @property
    def redundancy(self) -> int:
        """r: number of groups that host a shard, and of shards that a group hosts."""
        return len(self.offsets)

    def stacks(self) -> NDArray[np.int32]:
        """[N, r]: stacks()[g, l] is the shard at layer l of group g. Read-only."""
        return self._stacks

    def hosts(self) -> NDArray[np.int32]:
        """[N, r]: hosts()[i, l] is the group that has shard i at layer l. Read-only."""
        return self._hosts

    @cached_property
    def by_layer(self) -> LayerTables:
        """The tables of :meth:`hosts` and :meth:`stacks` with the layer as first axis."""
        hosts, stacks = (np.ascontiguousarray(table.T, dtype=np.int64) for table in (self._hosts, self._stacks))
        cells = stacks + np.arange(self.redundancy)[:, None] * self.num_groups
        for table in (hosts, stacks, cells):
            table.flags.writeable = False
        return LayerTables(hosts, stacks, cells)

    @cached_property
    def _stacks(self) -> NDArray[np.int32]:
        return self._cyclic(1)

    @cached_property
    def _hosts(self) -> NDArray[np.int32]:
        return self._cyclic(-1)

    def _cyclic(self, sign: int) -> NDArray[np.int32]:
        numbers = np.arange(self.num_groups)[:, None] + sign * np.asarray(self.offsets)[None, :]
        table: NDArray[np.int32] = (numbers % self.num_groups).astype(np.int32)
        table.flags.writeable = False
        return table


def build_placement(
    num_groups: int, redundancy: int, kind: Literal["independent", "consecutive"] = "independent"
) -> Placement:
    """The placement for N groups and redundancy r; ConfigError when there is none. Deterministic; takes at most some
    seconds."""
    if num_groups < 1:
        raise ConfigError(f"--num-groups is {num_groups}, but must be at least 1")
    if redundancy < 1:
        raise ConfigError(f"--spare-redundancy is {redundancy}, but must be at least 1 (every shard needs a host)")
    if redundancy > num_groups:
        raise ConfigError(
            f"--spare-redundancy {redundancy} is larger than the number of groups, {num_groups}: a shard cannot have "
            f"more hosts than there are groups; use --spare-redundancy {num_groups} or less"
        )
    if kind == "consecutive":
        offsets = tuple(range(redundancy))
        overlap = max_overlap(num_groups, offsets)
        reason = f"consecutive offsets 0..{redundancy - 1} for {num_groups} groups: {_shared(overlap, redundancy)}"
        return Placement(num_groups, offsets, overlap, reason)
    if kind != "independent":
        raise ConfigError(f"--spare-placement {kind} is unknown; use independent or consecutive")
    found = independent_offsets(num_groups, redundancy)
    shared = _shared(found.overlap, redundancy)
    if found.overlap <= 1:
        reason = f"independent offsets for {num_groups} groups: {shared}"
    elif found.unproven:
        least = found.unproven[0]
        reason = (
            f"no {redundancy} offsets mod {num_groups} with overlap {least} were found, which does not prove that "
            f"there are none: {shared}"
        )
    else:
        reason = f"no {redundancy} offsets mod {num_groups} have a smaller overlap (proven): {shared}"
    return Placement(num_groups, found.offsets, found.overlap, reason)


def placement_from_offsets(num_groups: int, offsets: Sequence[int]) -> Placement:
    """The placement with exactly these offsets (as a journal keeps them); ConfigError when they are not valid."""
    given = tuple(int(offset) for offset in offsets)
    valid = bool(given) and given[0] == 0 and len(set(given)) == len(given)
    if not valid or not all(0 <= offset < num_groups for offset in given):
        raise ConfigError(
            f"placement offsets {list(given)} are not valid for {num_groups} groups: they must start with 0, be "
            f"pairwise different and lie in 0..{num_groups - 1}"
        )
    overlap = max_overlap(num_groups, given)
    reason = f"given offsets for {num_groups} groups: {_shared(overlap, len(given))}"
    return Placement(num_groups, given, overlap, reason)


def _shared(overlap: int, redundancy: int) -> str:
    return f"two groups share at most {overlap} of {redundancy} {'shard' if redundancy == 1 else 'shards'}"
