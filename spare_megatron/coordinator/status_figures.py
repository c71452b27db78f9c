"""Figures of the controller's state for status.json: what threatens, what is next, how far learners are. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from spare_megatron.controller.learner import Learner
from spare_megatron.controller.machine import State


def status_figures(state: State) -> dict[str, Any]:
    """``hosts_least``: the least number of live hosts of a shard; ``next_save``: the step that is saved next, None
    where no save is planned; ``learning``: group -> the stage of its return. Before a job has begun, the first two are
    None."""
    begun = state.phase in ("running", "ending")
    return {
        "hosts_least": least_hosts(state) if begun else None,
        "next_save": next_save(state) if begun else None,
        "learning": {str(group): stage_of(known) for group, known in sorted(state.learners.items())},
    }


def least_hosts(state: State) -> int:
    """How many live hosts the shard has that has the fewest: so many losses, at least, are needed for a wipe-out."""
    alive = np.zeros(state.job.num_groups, dtype=np.bool_)
    alive[list(state.live)] = True
    return int(alive[state.where.hosts()].sum(axis=1).min())


def next_save(state: State) -> int | None:
    """The step whose save is due next, at most the last one; None where no save is planned but perhaps that of the
    end."""
    spec, step, due = state.job, state.step_in_flight, list[int]()
    if spec.save_every:
        due.append(-(-step // spec.save_every) * spec.save_every)
    if state.save_interval:
        due.append(max(step, state.save_step + state.save_interval))
    if state.save_now:
        due.append(step)
    return min(*due, spec.last_step) if due else None


def stage_of(known: Learner) -> str:
    """How far a group is that is brought up to date, in words."""
    if known.offer is None:
        return "waits for an offer" if known.ready else "its processes start"
    return f"has applied step {known.applied}" if known.applied >= 0 else f"takes the state of step {known.offer.step}"
