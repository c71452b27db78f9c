"""Decides when a step is saved and by which group; the machine orders it with the commit of the step.

The group that :func:`saver` names writes what the commit orders, but leaves out a save that is not needed any more.
"""

from __future__ import annotations

from collections.abc import Collection

from spare_megatron.controller.adoption import able
from spare_megatron.controller.standing import only_hosts
from spare_megatron.controller.state import State

SPARED = 4
"""An emergency save is left out where less than this part of the interval between saves would be lost without it."""


def saver(live: Collection[int]) -> int:
    """The group that saves for all: the lowest of those that committed the step."""
    return min(live)


def order(state: State, endangered: frozenset[int]) -> int:
    """The step whose save the commit of the step in flight orders; 0: nothing is saved. ``endangered``: see
    :func:`endangered`.

    It is the committed step itself where a save is due: at multiples of a given interval, once the interval that the
    tuner chose has passed since the last save, where the tuner measures what a save costs, and in an emergency: where
    groups have become endangered. It is the older step at which a save was last due, where the group that was to save
    it is lost: then the new saver saves the committed step in its place, unless it finds a checkpoint of the older step
    or a later one published already.
    """
    step, given = state.step_in_flight, state.job.save_every
    if state.save_now or (given and step % given == 0) or 0 < state.save_interval <= step - state.save_step:
        return step
    interval = given or state.save_interval
    if endangered - state.endangered and SPARED * (step - state.save_step) >= interval:
        return step
    return state.save_step if state.saver >= 0 and state.saver not in state.live else 0


def is_emergency(state: State, endangered: frozenset[int]) -> bool:
    """Whether the commit of the step in flight orders a save only because groups have become ``endangered``."""
    return order(state, endangered) == state.step_in_flight != order(state, frozenset())


def endangered(state: State) -> frozenset[int]:
    """The members whose loss alone would end the job, and for whom no learner could stand in: the last copy of the
    state, and the only live hosts of a shard that nobody else could adopt. Empty where the job makes no emergency
    saves."""
    if not state.job.emergency_saves or len(state.live) == state.job.num_groups:
        return frozenset()
    near = {group for group, known in state.learners.items() if known.ready or known.offer is not None}
    return not_spared(state, near.union(state.live))


def not_spared(state: State, there: Collection[int]) -> frozenset[int]:
    """The members that are the only hosts, among the groups that are ``there``, of a shard that nobody else could
    adopt."""
    last = only_hosts(state.where, there).intersection(state.live)
    if not state.job.adoption:
        return last
    return frozenset(group for group in last if _stands_alone(state, group, there))


def _stands_alone(state: State, group: int, there: Collection[int]) -> bool:
    """Whether nobody else hosts, or could adopt, one of the shards of a group."""
    for shard in state.where.stack_of(group):
        hosted = any(other != group and other in there for other in state.where.hosts_of(shard))
        if not hosted and not able(state, shard) - {group}:
            return True
    return False
