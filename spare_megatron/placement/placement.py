"""A cyclic placement, given by r offsets, says which groups host which shard.

Group g hosts, as layer l of its stack, shard (g + offset[l]) mod N; shard i is hosted, at layer l, by group
(i - offset[l]) mod N. The first offset is 0, so without failures every group computes the shard of its own number.
Groups that have adopted shards are further hosts, in layers of their own behind these r: an adopting layer has at most
one host for a shard and one shard for a group, and the rest of it is filled with pairs that are none, so that each
layer is a permutation. Pure arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.errors import ConfigError
from spare_megatron.placement.offsets import independent_offsets
from spare_megatron.placement.overlap import max_overlap


@dataclass(frozen=True, eq=False)
class LayerTables:
    """The tables of a placement as read-only int64 arrays [L, N], for planners that go through them layer by layer. L
    is r, and more where shards are adopted."""

    hosts: NDArray[np.int64]
    """hosts[l, i]: the group that has shard i at layer l."""
    stacks: NDArray[np.int64]
    """stacks[l, g]: the shard at layer l of group g."""
    stack_cells: NDArray[np.int64]
    """stack_cells[l, g]: position of the shard at layer l of group g in a flattened [L, N] table by shard, so that
    ``table.take(stack_cells)`` is that table by group."""
    real: NDArray[np.bool_] | None
    """real[l, i]: whether hosts[l, i] does host shard i; None where all do."""

    def among(self, groups: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[L, N]: whether there is a host of shard i at layer l, and it is one of ``groups`` [N]."""
        there: NDArray[np.bool_] = groups.take(self.hosts)
        return there if self.real is None else there & self.real


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
    adopted: tuple[tuple[int, int], ...] = ()
    """(shard, group) of the hosts that have adopted a shard, ascending."""

    @property
    def redundancy(self) -> int:
        """r: number of groups that host a shard, and of shards that a group hosts, before any is adopted."""
        return len(self.offsets)

    def adopting(self, adopted: Iterable[tuple[int, int]]) -> Placement:
        """This placement with these hosts (shard, group) beyond the cyclic ones, and no others."""
        wanted = tuple(sorted(set(adopted)))
        assert not any(group in self._hosts[shard] for shard, group in wanted), "it hosts the shard already"
        return self if wanted == self.adopted else replace(self, adopted=wanted)

    def hosts_of(self, shard: int) -> list[int]:
        """The groups that host a shard, in the order of the layers, then those that have adopted it."""
        own: list[int] = self._hosts[shard].tolist()
        return own + [group for adopted, group in self.adopted if adopted == shard]

    def hosted_by(self, groups: Collection[int]) -> NDArray[np.bool_]:
        """[L, N]: whether there is a host of shard i at layer l, and it is one of ``groups``."""
        among = np.zeros(self.num_groups, dtype=np.bool_)
        among[list(groups)] = True
        return self.by_layer.among(among)

    def stack_of(self, group: int) -> list[int]:
        """The shards that a group hosts, in the order of the layers, then those that it has adopted."""
        own: list[int] = self._stacks[group].tolist()
        return own + [shard for shard, adopter in self.adopted if adopter == group]

    def stacks(self) -> NDArray[np.int32]:
        """[N, r]: stacks()[g, l] is the shard at layer l of group g, without adopted ones. Read-only."""
        return self._stacks

    def hosts(self) -> NDArray[np.int32]:
        """[N, r]: hosts()[i, l] is the group that has shard i at layer l, without those that adopted it. Read-only."""
        return self._hosts

    @cached_property
    def by_layer(self) -> LayerTables:
        """The tables of :meth:`hosts` and :meth:`stacks` with the layer as first axis, and layers for what is
        adopted."""
        more, real = _adopting_layers(self.num_groups, self.adopted)
        hosts = np.ascontiguousarray(np.vstack([self._hosts.T.astype(np.int64), *more]))
        stacks = np.empty_like(hosts)
        np.put_along_axis(stacks, hosts, np.arange(self.num_groups)[None, :], axis=1)
        cells = stacks + np.arange(len(hosts))[:, None] * self.num_groups
        there = np.ascontiguousarray(np.vstack([np.ones_like(self._hosts.T, np.bool_), *real])) if real else None
        for table in (hosts, stacks, cells):
            table.flags.writeable = False
        return LayerTables(hosts, stacks, cells, there)

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


def _adopting_layers(
    num_groups: int, adopted: Sequence[tuple[int, int]]
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.bool_]]]:
    """Permutations [N] of shards to groups that together have the pairs (shard, group), and where [N] they have them.

    A pair goes to the first layer in which its shard and its group are free; what is free in a layer then is paired in
    any order."""
    layers: list[dict[int, int]] = []
    for shard, group in adopted:
        layer = next((one for one in layers if shard not in one and group not in one.values()), None)
        if layer is None:
            layer = {}
            layers.append(layer)
        layer[shard] = group
    tables, real = list[NDArray[np.int64]](), list[NDArray[np.bool_]]()
    for layer in layers:
        there = np.zeros(num_groups, dtype=np.bool_)
        there[list(layer)] = True
        table = np.empty(num_groups, dtype=np.int64)
        table[there] = [layer[shard] for shard in np.flatnonzero(there).tolist()]
        table[~there] = sorted(set(range(num_groups)) - set(layer.values()))
        tables.append(table)
        real.append(there)
    return tables, real


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
