"""Decides who computes which piece: so that the last group is done as early as possible, and then with the fewest moves
from the previous assignment.

Where no group is slow, that is the least possible largest load. A group whose pieces take longer for long (slowness,
protocol.speeds) may own as many as it can compute by the end: the caps of all groups follow from one end T.

In microbatch granularity the pieces of a shard may go to different hosts. In shard granularity a shard moves as a
whole, and all groups count as equally fast, in the phases that SPARe published (arXiv 2603.00357): *fixed*, where the
present top S slots of the survivors still cover every shard and no live owner changes; else *free*, where any order
within the stacks is allowed, S is raised as little as possible, and the fewest shards move. Least ends are found by
augmenting chains from the previous plan, which give the optimum or prove that caps are too small. Pure and
deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.placement import Placement
from spare_megatron.protocol.assign_chains import Chains, IntTable, Shortage, hand_over
from spare_megatron.protocol.assign_patch import patch
from spare_megatron.protocol.assign_slowness import in_words, least_end, slowness_of
from spare_megatron.protocol.assign_types import USUAL, Assignment, Patch, WipeOut

__all__ = ["Assignment", "Patch", "WipeOut", "assign", "first_assignment", "patch"]

SHARDS_NAMED_MAX = 8
"""A reason names at most this many shards."""
ANYWHERE_GROUPS_MIN = 64
"""From this number of groups on, a placement with r = N is planned without tables over r."""


def first_assignment(placement: Placement, pieces_per_shard: int, granularity: str) -> Assignment:
    """The assignment of a job that has lost no group: group i computes shard i."""
    if granularity not in ("microbatch", "shard"):
        raise ConfigError(f"--spare-granularity {granularity} is unknown; use microbatch or shard")
    num_groups, redundancy = placement.num_groups, placement.redundancy
    whole = granularity == "shard"
    units = np.zeros((0 if _anywhere(placement, granularity) else redundancy, num_groups), dtype=np.int64)
    units[:1] = 1 if whole else pieces_per_shard
    loads = np.full(num_groups, pieces_per_shard)
    slots = np.repeat(np.arange(redundancy, dtype=np.int32)[:, None], num_groups, axis=1) if whole else None
    owner = np.repeat(np.arange(num_groups, dtype=np.int32)[:, None], pieces_per_shard, axis=1)
    reason = (
        f"all {num_groups} groups live; load {counted(pieces_per_shard, 'piece')}: every group computes its own shard"
    )
    alive = np.ones(num_groups, dtype=np.bool_)
    return _frozen(
        owner,
        loads,
        slowness_of(num_groups, (), {}),
        0,
        reason=reason,
        alive=alive,
        granularity=granularity,
        units=units,
        slots=slots,
    )


def assign(
    placement: Placement,
    live: Sequence[int],
    pieces_per_shard: int,
    granularity: str,
    previous: Assignment | None,
    slow: Mapping[int, int] | None = None,
) -> Assignment | WipeOut:
    """The plan for the ``live`` groups. ``previous`` is the plan that this function made last for the same offsets, K
    and granularity; None stands for the plan without failures. ``slow``: group -> its slowness, of those that are slow;
    not used in shard granularity."""
    if previous is None:
        previous = first_assignment(placement, pieces_per_shard, granularity)
    assert (previous.granularity, previous.pieces_per_shard) == (granularity, pieces_per_shard)
    alive = np.zeros(placement.num_groups, dtype=np.bool_)
    alive[np.fromiter(live, dtype=np.int64, count=len(live))] = True
    slowness = slowness_of(placement.num_groups, live, {} if granularity == "shard" else slow or {})
    if _anywhere(placement, granularity) and len(live):
        return _assign_anywhere(placement, alive, previous, slowness)
    previous, same = _fitted(placement, previous)
    among = placement.by_layer.among(alive)
    hosts_alive = among.sum(axis=0)
    if not hosts_alive.all():
        return _wipe_out(placement, np.flatnonzero(hosts_alive == 0).tolist(), int(alive.sum()))
    units = 1 if granularity == "shard" else pieces_per_shard
    end = max(least_end(slowness[alive], placement.num_groups * units), -(-units // int(hosts_alive.min())) * USUAL)
    bound = end // USUAL
    if same and not (alive & ~previous.alive).any() and (slowness >= previous.slowness)[alive].all():
        # With fewer or slower groups the least end never falls, and the previous plan had the least end for its groups.
        end = max(end, previous.end * units // pieces_per_shard)
    kept: IntTable = previous.units * among
    if granularity == "shard":
        return _assign_shards(placement, alive, kept, previous, depth=end // USUAL, bound=bound, same=same)
    owned, _, shortage = _least(placement, alive, kept, units, end=end, slowness=slowness, slots=None)
    owner = hand_over(placement.by_layer, previous.owner, previous.units, owned)
    return _planned(
        placement,
        alive,
        previous,
        owner,
        kept=kept,
        owned=owned,
        slowness=slowness,
        slots=None,
        bound=bound,
        why=_why(shortage),
    )


def _fitted(placement: Placement, previous: Assignment) -> tuple[Assignment, bool]:
    """The previous assignment in the layers of ``placement``, and whether nothing is adopted now or was then. Else
    pairs may have other layers than before: units are counted anew by the owners, and a stack's order is kept, with
    adopted shards at its end."""
    layers = placement.by_layer
    if not placement.adopted and len(previous.units) == len(layers.hosts):
        return previous, True
    whole = previous.slots is not None
    owned = (previous.owner[None, :, :] == layers.hosts[:, :, None]).sum(axis=2) * layers.among(previous.alive)
    units = (owned > 0).astype(np.int64) if whole else owned
    slots = None
    if previous.slots is not None:
        own = placement.redundancy
        order = previous.slots[:own].argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
        further = np.repeat(np.arange(own, len(layers.hosts))[:, None], placement.num_groups, axis=1)
        slots = np.vstack([order, further]).astype(np.int32)
    return replace(previous, units=units, slots=slots), False


def _anywhere(placement: Placement, granularity: str) -> bool:
    """Whether many groups host every shard: then no chains are needed, and tables over r would be large."""
    return placement.redundancy == placement.num_groups >= ANYWHERE_GROUPS_MIN and granularity == "microbatch"


def _assign_anywhere(
    placement: Placement, alive: NDArray[np.bool_], previous: Assignment, slowness: IntTable
) -> Assignment:
    """Every group keeps what it has up to its least cap; the rest goes to those with room, in order."""
    num_groups, per_shard = placement.num_groups, previous.pieces_per_shard
    owners = previous.owner.T.ravel()
    end = least_end(slowness[alive], len(owners))
    caps = end // slowness
    counts = np.bincount(owners, minlength=num_groups)
    order = np.argsort(owners, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    freed = np.flatnonzero(~alive[owners] | (rank >= caps[owners]))
    room = np.where(alive, caps - np.minimum(counts, caps), 0)
    owners = owners.copy()
    moves = int(alive[owners[freed]].sum())
    owners[freed] = np.repeat(np.arange(num_groups, dtype=np.int32), room)[: len(freed)]
    owner = np.ascontiguousarray(owners.reshape(per_shard, num_groups).T)
    loads = np.bincount(owners, minlength=num_groups)
    reason = (
        f"{num_groups - int(alive.sum())} of {num_groups} groups lost; load {previous.load_max} -> "
        f"{counted(loads.max(), 'piece')} (bound {end // USUAL}); {counted(moves, 'piece')} moved; every group hosts "
        f"every shard{in_words(slowness, loads)}"
    )
    units = np.zeros((0, num_groups), dtype=np.int64)
    return _frozen(
        owner,
        loads,
        slowness,
        moves,
        reason=reason,
        alive=alive,
        granularity=previous.granularity,
        units=units,
        slots=None,
    )


def _least(
    placement: Placement,
    alive: NDArray[np.bool_],
    kept: IntTable,
    units: int,
    *,
    end: int,
    slowness: IntTable,
    slots: NDArray[np.int32] | None,
) -> tuple[IntTable, int, Shortage | None]:
    """(owned units, least feasible end from ``end`` up, the proof that a smaller one is too small if chains gave it).

    With ``slots``, plans of equally few moves are compared by how many shards they take that are not among as many top
    slots of their host as a usual group may own.
    """
    tables = placement.by_layer
    shortage: Shortage | None = None
    while True:
        extra = None
        if slots is not None:
            extra = (np.take_along_axis(slots, tables.hosts, axis=1) >= end // USUAL).astype(np.int64)
        result = Chains(tables, alive, kept, units, end // slowness, extra).run()
        if not isinstance(result, Shortage):
            return result, end, shortage
        shortage = result
        end = least_end(slowness[list(result.groups)], result.units)


def _assign_shards(
    placement: Placement,
    alive: NDArray[np.bool_],
    kept: IntTable,
    previous: Assignment,
    *,
    depth: int,
    bound: int,
    same: bool,
) -> Assignment:
    assert previous.slots is not None
    hosts, usual = placement.by_layer.hosts, slowness_of(placement.num_groups, (), {})
    owned = _fixed(hosts, alive, previous, kept, depth) if same else None
    slots = previous.slots
    if owned is not None:
        why = f"depth {depth} kept, the present top slots cover every shard"
    else:
        owned, end, shortage = _least(placement, alive, kept, 1, end=depth * USUAL, slowness=usual, slots=slots)
        depth = end // USUAL
        slots, reordered = _reorder(placement, owned, slots, depth)
        why = f"depth {previous.depth} -> {depth}, {reordered} stacks reordered{_why(shortage)}"
    group = np.take_along_axis(hosts, owned.argmax(axis=0)[None, :], axis=0)[0]
    owner = np.repeat(group.astype(np.int32)[:, None], previous.pieces_per_shard, axis=1)
    bound *= previous.pieces_per_shard
    return _planned(
        placement,
        alive,
        previous,
        owner,
        kept=kept,
        owned=owned,
        slowness=usual,
        slots=slots,
        bound=bound,
        why=f"; {why}",
    )


def _fixed(
    hosts: NDArray[np.int64], alive: NDArray[np.bool_], previous: Assignment, kept: IntTable, depth: int
) -> IntTable | None:
    """The fixed phase: every shard that lost its owner goes to a live host that has it among its top slots. A slot
    holds one shard, so no two shards compete for it and no live owner changes; None where a shard is not covered."""
    if depth != previous.depth or previous.slots is None:
        return None
    owned = kept.copy()
    lost = np.flatnonzero(owned.sum(axis=0) == 0)
    load = np.bincount(hosts.ravel(), weights=owned.ravel(), minlength=len(alive))
    for shard in lost.tolist():
        candidates = hosts[:, shard]
        layers = [
            layer
            for layer, group in enumerate(candidates.tolist())
            if alive[group] and previous.slots[layer, group] < depth
        ]
        if not layers:
            return None
        layer = min(layers, key=lambda at: (load[candidates[at]], at))
        owned[layer, shard] = 1
        load[candidates[layer]] += 1
    return owned


def _reorder(
    placement: Placement, owned: IntTable, slots: NDArray[np.int32], depth: int
) -> tuple[NDArray[np.int32], int]:
    """(slots in which the shards that a group owns are among its top ``depth``, number of groups whose order changed).

    An owned shard below the top changes places with the lowest shard of the top that the group does not own.
    """
    mine = owned.take(placement.by_layer.stack_cells) > 0
    below = np.flatnonzero((mine & (slots >= depth)).any(axis=0)).tolist()
    slots = slots.copy()
    for group in below:
        order = np.argsort(slots[:, group])
        spare = [layer for layer in order[:depth].tolist() if not mine[layer, group]]
        for layer in order[depth:].tolist():
            if mine[layer, group]:
                other = spare.pop()
                slots[layer, group], slots[other, group] = slots[other, group], slots[layer, group]
    return slots, len(below)


def _planned(
    placement: Placement,
    alive: NDArray[np.bool_],
    previous: Assignment,
    owner: NDArray[np.int32],
    *,
    kept: IntTable,
    owned: IntTable,
    slowness: IntTable,
    slots: NDArray[np.int32] | None,
    bound: int,
    why: str,
) -> Assignment:
    pieces_per_unit = previous.pieces_per_shard if slots is not None else 1
    loads = owned.take(placement.by_layer.stack_cells).sum(axis=0) * pieces_per_unit
    moves = int(np.maximum(kept - owned, 0).sum()) * pieces_per_unit
    why += in_words(slowness, loads)
    reason = (
        f"{placement.num_groups - int(alive.sum())} of {placement.num_groups} groups lost; load {previous.load_max} -> "
        f"{counted(loads.max(), 'piece')} (bound {bound}); {counted(moves, 'piece')} moved{why}"
    )
    return _frozen(
        owner,
        loads,
        slowness,
        moves,
        reason=reason,
        alive=alive,
        granularity=previous.granularity,
        units=owned,
        slots=slots,
    )


def _frozen(
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    slowness: NDArray[np.int64],
    moves: int,
    *,
    reason: str,
    alive: NDArray[np.bool_],
    granularity: str,
    units: IntTable,
    slots: NDArray[np.int32] | None,
) -> Assignment:
    for array in (owner, units, slots, loads, slowness, alive):
        if array is not None:
            array.flags.writeable = False
    live = tuple(np.flatnonzero(alive).tolist())
    made = Assignment(
        owner=owner,
        load_max=int(loads.max()),
        moves=moves,
        reason=reason,
        live=live,
        granularity=granularity,
        units=units,
        slots=slots,
        loads=loads,
        slowness=slowness,
    )
    vars(made)["alive"] = alive  # a cached property, which is known here
    return made


def _why(shortage: Shortage | None) -> str:
    if shortage is None:
        return ""
    groups = len(shortage.groups)
    return (
        f"; shards {named(shortage.shards)} ({len(shortage.shards)}) have only {groups} live "
        f"{'host' if groups == 1 else 'hosts'}, so no less"
    )


def _wipe_out(placement: Placement, shards: list[int], live: int) -> WipeOut:
    return WipeOut(
        tuple(shards),
        f"wipe-out: {len(shards)} of {placement.num_groups} shards ({named(shards)}) have none of their "
        f"{placement.redundancy} hosts among the {live} live groups",
    )


def named(shards: Sequence[int]) -> str:
    """'3, 5, 8' or, when there are many, the first of them and 'and n more'."""
    first = ", ".join(str(shard) for shard in shards[:SHARDS_NAMED_MAX])
    more = len(shards) - SHARDS_NAMED_MAX
    return first if more <= 0 else f"{first} and {more} more"
