"""Figures for status.json. Pure.

Those of the protocol machine's state: what threatens, what is next, how far learners are. And those that change all the
time: where each group is, how fast it is, and how long the job will take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median_low
from typing import Any

from spare_megatron.coordinator.watched_group import GroupStanding
from spare_megatron.protocol.assign_types import USUAL
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.standing import only_hosts, sure_hosts
from spare_megatron.protocol.view import Offer


def status_figures(state: State) -> dict[str, Any]:
    """``hosts_least``: the least number of live hosts of a shard; ``losses_left``: so many groups, at least, are still
    lost before some shard has one live host; ``last_hosts``: the groups whose loss alone would leave a shard without a
    host; ``adoption``: whether others would adopt it; ``next_save``: the step that is saved next, None where no save is
    planned; ``learning``: group -> the stage of its return; ``ready``: those that have their model and can take the
    state; ``offers``: group -> what it is offered; ``drained``: groups that are to leave or have left on request;
    ``adopted``: shard -> the groups that have taken it over; ``slow_for_long``: group -> how many times as long as
    others it takes for a piece, its share of later steps in pieces, and the step after which that was found. Before a
    job has begun, ``hosts_least``, ``losses_left``, ``last_hosts`` and ``next_save`` are None."""
    learners, by_commit = sorted(state.learners.items()), state.spec is not None and bool(state.job.state_shards)
    returns = {
        "learning": {str(group): stage_of(known, by_commit=by_commit) for group, known in learners},
        "ready": [group for group, known in learners if known.ready],
        "offers": {str(group): _offer(known.offer) for group, known in learners if known.offer is not None},
        "drained": sorted(state.drained),
        "slow_for_long": _slow_for_long(state),
        "adopted": _adopted(state),
        "adoption": state.spec is not None and state.spec.adoption,
    }
    if state.phase not in ("running", "ending"):
        return {"hosts_least": None, "losses_left": None, "last_hosts": None, "next_save": None, **returns}
    hosts, last = live_hosts(state)
    return {
        "hosts_least": hosts,
        "losses_left": max(0, hosts - 1),
        "last_hosts": last,
        "next_save": next_save(state),
        **returns,
    }


def _slow_for_long(state: State) -> dict[str, Any]:
    shares = () if state.standing is None else state.standing.assignment.loads.tolist()
    return {
        str(group): {"slowness": known / USUAL, "share": shares[group], "since": state.slowness_step}
        for group, known in sorted(state.slowness.items())
    }


def live_hosts(state: State) -> tuple[int, list[int]]:
    """(How many live hosts the shard has that has the fewest, the groups that are the only live host of a shard), where
    adopters count that have opened it."""
    where = sure_hosts(state)
    return int(where.hosted_by(state.live).sum(axis=0).min()), sorted(only_hosts(where, state.live))


def _adopted(state: State) -> dict[str, list[int]]:
    """Shard -> the members that have adopted it."""
    found: dict[str, list[int]] = {}
    for shard, group in () if state.placement is None else state.where.adopted:
        found.setdefault(str(shard), []).append(group)
    return found


def _offer(offer: Offer) -> dict[str, Any]:
    """The state that a learner is offered, and the groups that give it."""
    return {"number": offer.number, "step": offer.step, "donors": [group for group, _ in offer.donors]}


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


def stage_of(known: Learner, by_commit: bool = False) -> str:
    """How far a group is that is brought up to date, in words. ``by_commit``: with state shards, who is ready becomes a
    member with the next commit, and gets the state then."""
    if known.offer is None and by_commit and known.ready:
        return "joins with the next commit"
    if known.offer is None:
        return "waits for an offer" if known.ready else "its processes start"
    return f"has applied step {known.applied}" if known.applied >= 0 else f"takes the state of step {known.offer.step}"


def speeds(piece_s: Mapping[int, float], members: Collection[int]) -> dict[int, float]:
    """Group -> its speed, 1 for the median member; of two, for the faster one. ``piece_s``: group -> seconds for a
    piece."""
    known = {group: one_s for group, one_s in piece_s.items() if one_s > 0 and group in members}
    median_s = median_low(known.values()) if known else 0.0
    return {group: round(median_s / one_s, 2) for group, one_s in known.items()}


def watched_figures(
    standings: Mapping[int, GroupStanding],
    speed: Mapping[int, float],
    left: Mapping[int, tuple[int, float]],
    time_to_train: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """``groups``: group -> where it is, its ``speed``, and of how many tickets it has not begun (``left``), where these
    are known; ``time_to_train``: as the coordinator's tuning has it."""
    groups = {}
    for group, one in sorted(standings.items()):
        groups[str(group)] = reported = _standing(one)
        if group in speed:
            reported["speed"] = speed[group]
        if group in left:
            reported["left"] = left[group][0]
    return {"groups": groups, "time_to_train": time_to_train}


def _standing(one: GroupStanding) -> dict[str, Any]:
    last, still_s, silent_s = one
    if last is None:
        return {"silent_s": round(silent_s, 2)}
    return {
        "step": last.step,
        "phase": last.phase,
        "rank": last.position,
        "pieces": last.pieces_done,
        "still_s": round(still_s, 2),
        "silent_s": round(silent_s, 2),
    }
