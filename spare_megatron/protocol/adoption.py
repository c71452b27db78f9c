"""Adoption: where a shard loses its last live host, groups that hold the state become hosts of it.

They get its pieces in the same record, so plans are a partition of the batch at every moment. They open its data
before they begin one of these pieces (``View.adopts``). A group that cannot open them reports that (``Hosts``): its
pieces go to another group, in an epoch of the same members, and its incarnation is not asked again. So an adoption
ends. A group that has adopted a shard hosts it until the group is lost. Protocol rule 23.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.state import State

Adopted = Mapping[int, Mapping[int, bool]]
"""Group -> shard that it has adopted -> whether it has said that it could open it."""


def bare(state: State) -> list[int]:
    """The shards that no member hosts."""
    found: list[int] = np.flatnonzero(~state.where.hosted_by(state.live).any(axis=0)).tolist()
    return found


def adopters(state: State, shard: int) -> list[int]:
    """Who adopts a shard: up to r of the groups that hold a state which votes have compared, and have not said that
    they cannot open it; none that is to leave while there is another; those first that have adopted least and then have
    the least to do."""
    if not state.job.adoption:
        return []
    able = (state.holders & state.live.keys()) - state.untried
    able -= {group for group, shards in state.unable.items() if shard in shards}
    staying = able - state.drained or able
    size = state.job.num_groups
    loads = np.zeros(size, dtype=np.int64) if state.standing is None else state.standing.assignment.loads

    def load(group: int) -> tuple[int, int, int]:
        return len(state.adopted.get(group, ())), int(loads[group]), (group - shard) % size

    return sorted(staying, key=load)[: len(state.job.offsets)]


def adopt(state: State, shard: int, groups: Collection[int]) -> State:
    """The state in which ``groups`` are hosts of the shard too."""
    more = {group: {**state.adopted.get(group, {}), shard: False} for group in groups}
    return placed(state, {**state.adopted, **more}, state.unable)


def covered(state: State) -> State:
    """The state in which groups have adopted the shards that no member hosts, as far as there are any."""
    for shard in bare(state):
        state = adopt(state, shard, adopters(state, shard))
    return state


def remaining(state: State, gone: Collection[int]) -> State:
    """The state in which those that are ``gone``, or are no members, have adopted nothing and may be asked again."""
    if not state.adopted and not state.unable:
        return state
    away = (state.adopted.keys() | state.unable.keys()) - state.live.keys()
    out = away.union(gone)
    adopted = {group: shards for group, shards in state.adopted.items() if group not in out}
    unable = {group: shards for group, shards in state.unable.items() if group not in out}
    return placed(state, adopted, unable)


def opened(state: State, group: int, shard: int) -> State:
    """The state in which a group is known to have opened a shard that it adopted."""
    shards = {**state.adopted[group], shard: True}
    return replace(state, adopted={**state.adopted, group: shards})


def opened_first(state: State, group: int, pieces: tuple[int, ...]) -> tuple[int, ...]:
    """Pieces in order, with those behind whose data the group may still have to open."""
    shards, per_shard = state.adopted.get(group, {}), state.job.pieces_per_shard
    return tuple(sorted(pieces, key=lambda piece: not shards.get(piece // per_shard, True))) if shards else pieces


def refused(state: State, group: int, shard: int) -> State:
    """The state in which a group hosts the shard no more, and is not asked for it again."""
    shards = {one: opened for one, opened in state.adopted[group].items() if one != shard}
    adopted = {**state.adopted, group: shards}
    unable = {**state.unable, group: state.unable.get(group, frozenset()) | {shard}}
    return placed(state, {g: shards for g, shards in adopted.items() if shards}, unable)


def placed(state: State, adopted: Adopted, unable: Mapping[int, frozenset[int]]) -> State:
    """The state with these adoptions, and the placement that follows."""
    pairs = [(shard, group) for group, shards in adopted.items() for shard in shards]
    return replace(state, adopted=adopted, unable=unable, placement=state.where.adopting(pairs))
