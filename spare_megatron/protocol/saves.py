"""Decides when a step is saved and by which group; the machine orders it with the commit of the step.

The group that :func:`saver` names writes what the commit orders, but leaves out a save that is not needed any more.
"""

from __future__ import annotations

from collections.abc import Collection

from spare_megatron.protocol.standing import only_hosts, sure_hosts
from spare_megatron.protocol.state import State
from spare_megatron.protocol.view import MemberId

SPARED = 4
"""An emergency save is left out where less than this part of the interval between saves would be lost without it."""


def saver(live: Collection[int]) -> int:
    """The group that saves for all: the lowest of those that committed the step."""
    return min(live)


def order(state: State, endangered: frozenset[MemberId]) -> int:
    """The step whose save the commit of the step in flight orders; 0: nothing is saved. ``endangered``: see
    :func:`endangered`.

    It is the committed step itself where a save is due: at multiples of a given interval, once the interval that the
    tuner chose has passed since the last save, where the tuner measures what a save costs, and in an emergency: where
    groups have become endangered. It is the older step at which a save was last due, where the member that was to save
    it is lost, whoever has its place by now: then the new saver saves the committed step instead, unless it finds a
    checkpoint of the older step or a later one published already.
    """
    step, given = state.step_in_flight, state.job.save_every
    if state.save_now or (given and step % given == 0) or 0 < state.save_interval <= step - state.save_step:
        return step
    interval = given or state.save_interval
    if endangered - state.endangered and SPARED * (step - state.save_step) >= interval:
        return step
    return state.save_step if state.saver is not None and not state.is_member(state.saver) else 0


def is_emergency(state: State, endangered: frozenset[MemberId]) -> bool:
    """Whether the commit of the step in flight orders a save only because groups have become ``endangered``."""
    return order(state, endangered) == state.step_in_flight != order(state, frozenset())


def endangered(state: State) -> frozenset[MemberId]:
    """The members whose loss alone could end the job, and for whom no learner could stand in: the only live hosts of a
    shard, the last copy of the state. Whether others could open that shard is not known before they have. Empty where
    the job makes no emergency saves."""
    if not state.job.emergency_saves or len(state.live) == state.job.num_groups:
        return frozenset()
    near = {group for group, known in state.learners.items() if known.ready or known.offer is not None}
    alone = only_hosts(sure_hosts(state), near.union(state.live)).intersection(state.live)
    return frozenset((group, state.live[group]) for group in alone)
