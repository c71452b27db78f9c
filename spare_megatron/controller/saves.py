"""Decides when a step is saved and by which group; the machine orders it with the commit of the step.

The group that :func:`saver` names writes what the commit orders, but leaves out a save that is not needed any more.
"""

from __future__ import annotations

from collections.abc import Collection

from spare_megatron.controller.state import State


def saver(live: Collection[int]) -> int:
    """The group that saves for all: the lowest of those that committed the step."""
    return min(live)


def order(state: State) -> int:
    """The step whose save the commit of the step in flight orders; 0: nothing is saved.

    It is the committed step itself where a save is due: at multiples of a given interval, once the interval that the
    tuner chose has passed since the last save, and where the tuner measures what a save costs. It is the older step at
    which a save was last due, where the group that was to save it is lost: then the new saver saves the committed step
    in its place, unless it finds a checkpoint of the older step or a later one published already.
    """
    step, given = state.step_in_flight, state.job.save_every
    if state.save_now or (given and step % given == 0) or 0 < state.save_interval <= step - state.save_step:
        return step
    return state.save_step if state.saver >= 0 and state.saver not in state.live else 0
