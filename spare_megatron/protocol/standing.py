"""Draws the steady-state assignment: who computes which pieces in the steps after the one in flight. Pure.

Groups that are to leave (``State.drained``) get no part of it, unless a shard would have no host without them: such a
group stays until another host is there. Groups that are slow for long (``State.slowness``) get a smaller one.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from spare_megatron.placement import Placement
from spare_megatron.protocol.assign import WipeOut, assign
from spare_megatron.protocol.assign_slowness import slowness_of
from spare_megatron.protocol.state import Standing, State


def draw_standing(state: State, live: tuple[int, ...]) -> Standing | WipeOut:
    """The steady-state assignment of the members ``live``, with the fewest moves from the present one."""
    assert state.standing is not None, "a running job has a steady-state assignment"
    spec = state.job
    staying = tuple(sorted(set(live) - leaving(state, live))) if state.drained else live
    present = state.standing.assignment
    drawn = assign(state.where, staying, spec.pieces_per_shard, spec.granularity, present, state.slowness)
    return drawn if isinstance(drawn, WipeOut) else Standing(drawn, live)


def follows_slowness(state: State) -> bool:
    """Whether the steady-state assignment was drawn for the slowness that is known by now."""
    assert state.standing is not None, "a running job has a steady-state assignment"
    drawn = state.standing.assignment
    return np.array_equal(drawn.slowness, slowness_of(state.job.num_groups, drawn.live, state.slowness))


def leaving(state: State, live: Collection[int]) -> frozenset[int]:
    """Those of the members ``live`` that are to leave and can: each shard keeps a host among the others, which has
    opened its data."""
    out = state.drained.intersection(live)
    if not out:
        return out
    where, staying = state.where, set(live) - out
    there = where.hosted_by(live).any(axis=0)
    sure = sure_hosts(state).hosted_by(staying).any(axis=0)
    needed: set[int] = set()
    for shard in np.flatnonzero(there & ~sure).tolist():
        hosts = [group for group in where.hosts_of(shard) if group in out]
        best = [group for group in hosts if state.adopted.get(group, {}).get(shard, True)] or hosts
        if best and needed.isdisjoint(best):
            needed.add(best[0])
    return out - needed


def sure_hosts(state: State) -> Placement:
    """The placement with those adopters only that have opened the data of their shards."""
    if not state.adopted:
        return state.where
    opened = [(shard, g) for g, shards in state.adopted.items() for shard, is_open in shards.items() if is_open]
    return state.where.adopting(opened)


def only_hosts(where: Placement, live: Collection[int]) -> frozenset[int]:
    """The groups of ``live`` that are the only host in it of some shard."""
    there = where.hosted_by(live)
    alone = there & (there.sum(axis=0) == 1)
    return frozenset(where.by_layer.hosts[alone].tolist())
