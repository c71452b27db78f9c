"""When a step is saved, and by which group: decided here, by the machine, with the commit of the step.

Ranks do what the commit says, and :func:`saver` of the members that committed; the saver itself may leave a save out
that is not needed any more.
"""

from __future__ import annotations

from collections.abc import Collection

from spare_megatron.controller.state import State


def saver(live: Collection[int]) -> int:
    """The group that saves for all: the lowest of those that committed the step."""
    return min(live)


def order(state: State) -> int:
    """What the commit of the step in flight orders; 0 for nothing.

    The step's own number where a save is due: at multiples of a given interval, once the interval that the tuner chose
    has passed since the last one, and where the tuner wants to see what a save costs. An older number, of the last step
    that was due, where the group that was to save it is lost: the step in flight is saved in its place, unless a
    checkpoint of that number or a later one is published already.
    """
    step, given = state.step_in_flight, state.job.save_every
    if state.save_now or (given and step % given == 0) or 0 < state.save_interval <= step - state.save_step:
        return step
    return state.save_step if state.saver >= 0 and state.saver not in state.live else 0
