"""Spreads lost pieces of the step in flight over the hosts of their shards for the least largest remaining load.

This is a transportation problem with convex costs whose loads differ at the start. A limit on the remaining load rises
level by level, and at each level as many blocks as possible are placed, by chains that may move blocks placed before.
That is the successive-shortest-path method with the resulting load as marginal cost, so for blocks of one size the
result has the least largest load, then the least second largest, and so on (Harvey, Ladner, Lovász, Tamir,
*Semi-matchings for bipartite graphs and load balancing*, 2006). A block is one piece, or in shard granularity all
missing pieces of a shard; where those differ in size the larger ones go first and the result may be above the least.
Loads are times, in sixteenths of a usual group's piece: where groups are slow for long, the last one still is done as
early as possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.plural import counted
from spare_megatron.placement import Placement
from spare_megatron.protocol.assign_types import USUAL, Patch, WipeOut


def patch(
    placement: Placement,
    able: Collection[int],
    last_resort: Sequence[int],
    missing: Sequence[int],
    *,
    remaining: NDArray[np.int64],
    pieces_per_shard: int,
    granularity: str,
    slow: Mapping[int, int] | None = None,
) -> Patch | WipeOut:
    """Give every ``missing`` piece (i * K + j) to a host of its shard.

    ``able`` groups hold the state and may take pieces; ``last_resort`` groups (joiners) get pieces only of shards that
    have no able host. ``remaining`` [N]: what each of them still has to compute, 0 for others. ``slow``: group -> its
    slowness, of those that are slow; not used in shard granularity.
    """
    lost: dict[int, list[int]] = {}
    for piece in sorted(missing):
        lost.setdefault(piece // pieces_per_shard, []).append(piece)
    hosts, uncovered = _hosts(placement, lost, frozenset(able), frozenset(last_resort))
    if uncovered:
        count = sum(len(lost[shard]) for shard in uncovered)
        names = ", ".join(str(shard) for shard in uncovered)
        return WipeOut(tuple(uncovered), f"wipe-out: {count} lost pieces of shards {names} have no live host left")
    whole = granularity == "shard"
    slowness = {} if whole or not slow else slow
    takes = {group: slowness.get(group, USUAL) for groups in hosts.values() for group in groups}
    load = {group: int(remaining[group]) * piece for group, piece in takes.items()}
    before_max = int(np.delete(remaining, last_resort).max(initial=0))
    added: dict[int, list[int]] = {}
    for size in sorted({len(pieces) for pieces in lost.values()}, reverse=True) if whole else [1]:
        blocks = {shard: 1 if whole else len(ps) for shard, ps in lost.items() if not whole or len(ps) == size}
        costs = {group: piece * size for group, piece in takes.items()}
        for shard, held in _spread(blocks, hosts, load, costs).items():
            pieces = lost[shard]
            low = 0
            for group in hosts[shard]:
                high = low + held.get(group, 0) * size
                if high > low:
                    added.setdefault(group, []).extend(pieces[low:high])
                low = high
    ordered = {group: execution_order(added[group], placement, pieces_per_shard) for group in sorted(added)}
    load_max = max([before_max, *(int(remaining[group]) + len(pieces) for group, pieces in ordered.items())])
    reason = (
        f"{counted(len(missing), 'piece')} of {counted(len(lost), 'shard')} lost with their groups, patched by "
        f"{counted(len(ordered), 'group')}; largest remaining load {before_max} -> {counted(load_max, 'piece')}"
    )
    return Patch(ordered, load_max, reason)


def _hosts(
    placement: Placement, shards: Iterable[int], able: frozenset[int], last_resort: frozenset[int]
) -> tuple[dict[int, list[int]], list[int]]:
    """(groups that may take pieces of a shard, in layer order; shards that have none)."""
    hosts: dict[int, list[int]] = {}
    uncovered: list[int] = []
    for shard in sorted(shards):
        candidates = placement.hosts_of(shard)
        hosts[shard] = [g for g in candidates if g in able] or [g for g in candidates if g in last_resort]
        if not hosts[shard]:
            uncovered.append(shard)
    return hosts, uncovered


def _spread(
    blocks: Mapping[int, int], hosts: Mapping[int, list[int]], load: dict[int, int], costs: Mapping[int, int]
) -> dict[int, dict[int, int]]:
    """Place ``blocks[shard]`` blocks, of which one takes a group the time ``costs[group]``, and add them to ``load``.
    Returns shard -> host -> blocks."""
    held: dict[int, dict[int, int]] = {shard: {} for shard in blocks}
    placed_on: dict[int, set[int]] = {}
    waiting = dict(blocks)
    groups = sorted({group for shard in blocks for group in hosts[shard]})
    limit = min((load[group] + costs[group] for group in groups), default=0)
    while waiting:
        closed: set[int] = set()
        for shard in list(waiting):
            while waiting[shard]:
                chain = _chain(shard, hosts, held, placed_on, load=load, costs=costs, limit=limit, closed=closed)
                if chain is None:
                    break
                # A host of the shard itself takes as many blocks as it has room for; a longer chain moves one block per
                # link.
                end = chain[-1][1]
                count = min(waiting[shard], (limit - load[end]) // costs[end]) if len(chain) == 1 else 1
                _link(chain, held, placed_on, count)
                load[end] += count * costs[end]
                waiting[shard] -= count
            if not waiting[shard]:
                del waiting[shard]
        limit = min((end for group in groups if (end := load[group] + costs[group]) > limit), default=limit + 1)
    return held


def _chain(
    start: int,
    hosts: Mapping[int, list[int]],
    held: Mapping[int, Mapping[int, int]],
    placed_on: Mapping[int, set[int]],
    *,
    load: Mapping[int, int],
    costs: Mapping[int, int],
    limit: int,
    closed: set[int],
) -> list[tuple[int, int]] | None:
    """The shortest chain [(shard, its new host), ...] from ``start`` to a host whose load is at most ``limit`` with one
    block more; None where there is none.

    Each host but the last passes one block of the next link's shard on. The search is breadth first; hosts that a
    failed search saw cannot reach room at this limit and are added to ``closed``.
    """
    came_from: dict[int, tuple[int, int | None]] = {}
    queue: deque[tuple[int, int | None]] = deque([(start, None)])
    searched = {start}
    while queue:
        shard, through = queue.popleft()
        for group in hosts[shard]:
            if group in closed or group in came_from:
                continue
            came_from[group] = (shard, through)
            if load[group] + costs[group] <= limit:
                return _links(group, came_from)
            for other in sorted(placed_on.get(group, ())):
                if other not in searched and held[other].get(group):
                    searched.add(other)
                    queue.append((other, group))
    closed.update(came_from)
    return None


def _links(end: int, came_from: Mapping[int, tuple[int, int | None]]) -> list[tuple[int, int]]:
    chain: list[tuple[int, int]] = []
    group: int | None = end
    while group is not None:
        shard, through = came_from[group]
        chain.append((shard, group))
        group = through
    return chain[::-1]


def _link(
    chain: list[tuple[int, int]], held: dict[int, dict[int, int]], placed_on: dict[int, set[int]], count: int
) -> None:
    """Apply a chain: each link's host gains ``count`` blocks of its shard, the host before it loses them."""
    giver: int | None = None
    for shard, group in chain:
        held[shard][group] = held[shard].get(group, 0) + count
        placed_on.setdefault(group, set()).add(shard)
        if giver is not None:
            held[shard][giver] -= count
            if not held[shard][giver]:
                placed_on[giver].discard(shard)
        giver = group


def execution_order(pieces: Collection[int], placement: Placement, pieces_per_shard: int) -> tuple[int, ...]:
    """The pieces in execution order: by ascending global microbatch index j * N + i."""
    return tuple(
        sorted(pieces, key=lambda piece: piece % pieces_per_shard * placement.num_groups + piece // pieces_per_shard)
    )
