"""Epoch changes: the job begins, loses groups, admits groups, tries a step again.

Protocol rules 3 (one epoch for all changes that are known together), 4 (plans only grow inside a step), 13 (admission
in the commit's own record). Every function takes a state and returns the next one with its decision, without side
effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from spare_megatron.config.plural import counted
from spare_megatron.controller import audits, ending
from spare_megatron.controller.assign import Patch, WipeOut, assign, first_assignment, patch
from spare_megatron.controller.messages import Action, Deferred, JoinersLate, Loss, Lost, SendFenced
from spare_megatron.controller.state import NO_PLAN, Plan, Retries, Standing, State
from spare_megatron.controller.transition import (
    Transition,
    decide,
    describe,
    ignore,
    stop,
    views,
    with_checkpoint,
    without,
)

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
GIVE_UP_HEARTBEATS = 60
"""For how many heartbeat time-outs a step must have failed before the job gives up: five minutes by default."""


def begin(state: State, why: str) -> Transition:
    """Make the groups that have come the first members, and plan the first step."""
    spec = state.job
    if spec.first_step >= spec.last_step:
        return stop(state, "finished", f"{why}; step {spec.first_step} is held already, the last is {spec.last_step}")
    live = tuple(sorted(state.live))
    first = first_assignment(state.where, spec.pieces_per_shard, spec.granularity)
    drawn = first
    if len(live) < spec.num_groups:
        found = assign(state.where, live, spec.pieces_per_shard, spec.granularity, first)
        if isinstance(found, WipeOut):
            return stop(state, "failed", f"cannot begin with {len(live)} of {spec.num_groups} groups: {found.reason}")
        drawn = found
    standing = Standing(drawn, live)
    begun = replace(
        state,
        phase="running",
        epoch=state.epoch + 1,
        holders=frozenset(live),
        witnesses=frozenset(live),
        plan=standing.plan,
        standing=standing,
        audits=audits.draw(spec, state.where, drawn, live, state.step_in_flight),
    )
    return decide(begun, views(begun), f"{why}; step {begun.step_in_flight} begins, {drawn.reason}")


def begin_if_ready(state: State, why: str) -> Transition:
    """Begin when every group has come or is known to be gone."""
    spec = state.job
    if len(state.live) + len(state.gone) < spec.num_groups:
        return ignore(state, f"{why}; {len(state.live)} of {spec.num_groups} groups are here")
    if not state.gone:
        return begin(state, f"{why}; all {spec.num_groups} groups are here")
    if len(state.live) < max(1, spec.min_groups):
        return stop(
            state,
            "failed",
            f"{why}; {audits.name_groups(sorted(state.gone))} {'was' if len(state.gone) == 1 else 'were'} lost before "
            f"the job began, which leaves {len(state.live)} of {spec.num_groups} groups, fewer than "
            f"--spare-min-groups {spec.min_groups}",
        )
    return begin(state, f"{why}; {len(state.live)} groups are here, {len(state.gone)} are gone")


def lose(state: State, event: Lost) -> Transition:
    """Groups are gone: a new epoch without them, their pieces patched on the survivors."""
    losses = [loss for loss in event.losses if _concerns(state, loss)]
    if not losses:
        return ignore(state, "the lost groups are not members: " + "; ".join(map(describe, event.losses)))
    why = "; ".join(map(describe, losses))
    dead = {loss.group for loss in losses}
    fences: list[Action] = [
        SendFenced(loss.group, loss.incarnation, describe(loss)) for loss in losses if loss.cause != "exited"
    ]
    accused = {(loss.group, loss.incarnation) for loss in losses if loss.cause in ("diverged", "corrupt")}
    members = {loss.group for loss in losses if state.live.get(loss.group) == loss.incarnation}
    live = dict(state.live)
    for group in members:
        del live[group]
    after = replace(
        state,
        live=live,
        waiting={g: i for g, i in state.waiting.items() if (g, i) not in {(x.group, x.incarnation) for x in losses}},
        highest=_raise_highest(state.highest, losses),
        unproved=without(state.unproved, accused),
    )
    if state.phase == "forming":
        return _with_actions(begin_if_ready(replace(after, gone=after.gone | dead), f"lost at start: {why}"), fences)
    if not members:
        return decide(after, fences, f"lost before it was admitted: {why}")
    if state.phase == "ending":
        return ending.lost(state, after, fences, why)
    shrunk = _shrink(after, state, members, dict(event.progress), fences, why)
    if shrunk[0].stopped and all(loss.cause == "stalled" for loss in losses):
        # Standing still is no proof of a death, so a loss that would end the job is not acted on: the step is tried
        # again.
        retries = replace(state.retries, failures=state.retries.failures + 1)
        return retry(state, retries, f"{why}; its loss would end the job", event.failing_s)
    return shrunk


def _concerns(state: State, loss: Loss) -> bool:
    """True for a member, a group that waits for admission, and a group that never came while the job forms."""
    if loss.incarnation in (state.live.get(loss.group), state.waiting.get(loss.group)):
        return True
    never_came = loss.group not in state.live and loss.incarnation > state.highest.get(loss.group, -1)
    return state.phase == "forming" and never_came


def _raise_highest(highest: Mapping[int, int], losses: Iterable[Loss]) -> Mapping[int, int]:
    raised = dict(highest)
    for loss in losses:
        raised[loss.group] = max(raised.get(loss.group, -1), loss.incarnation)
    return raised


def _with_actions(outcome: Transition, before: list[Action]) -> Transition:
    state, decision = outcome
    return state, replace(decision, actions=Deferred(lambda: (*before, *decision.actions)))


def _shrink(
    after: State, before: State, dead: set[int], progress: Mapping[int, int], fences: list[Action], why: str
) -> Transition:
    """A new epoch of a running job without the members ``dead``."""
    spec = after.job
    live = tuple(sorted(after.live))
    holders = before.holders - dead
    after = replace(
        after,
        epoch=before.epoch + 1,
        votes={},
        holders=holders,
        retries=Retries(),
        plan=NO_PLAN,
        audits={group: kept for group, kept in before.audits.items() if group in after.live},
        applied_last=frozenset(),
    )
    if not live:
        return stop(after, "wipe-out", f"{why}; every group is lost", fences)
    if not holders:
        return stop(after, "wipe-out", f"{why}; no live group holds the state of step {after.committed[0]}", fences)
    assert before.standing is not None, "a running job has a standing assignment"
    drawn = assign(after.where, live, spec.pieces_per_shard, spec.granularity, before.standing.assignment)
    if isinstance(drawn, WipeOut):
        return stop(after, "wipe-out", f"{why}; {drawn.reason}", fences)
    grown = _patched_plan(before, live, holders, dead, progress)
    if isinstance(grown, WipeOut):
        return stop(after, "wipe-out", f"{why}; {grown.reason}", fences)
    plan, patched = grown
    after = replace(after, plan=plan, standing=Standing(drawn, drawn.live))
    reason = (
        f"{why}; epoch {after.epoch} with {len(live)} of {spec.num_groups} groups; step {after.step_in_flight}: "
        f"{patched.reason}; steps after it: {drawn.reason}"
    )
    return decide(after, views(after, before=fences), reason)


def _patched_plan(
    before: State, live: tuple[int, ...], holders: frozenset[int], dead: set[int], progress: Mapping[int, int]
) -> tuple[Plan, Patch] | WipeOut:
    """The plans of the step in flight with the pieces of the dead groups added (protocol rule 4)."""
    spec = before.job
    missing = [piece for group in sorted(dead) for piece in before.plan.pieces(group)]
    left = before.plan.loads()
    if progress:
        told = np.fromiter(progress.keys(), dtype=np.int64, count=len(progress))
        left[told] -= np.fromiter(progress.values(), dtype=np.int64, count=len(progress))
    left_of = np.maximum(left, 0).tolist()
    joiners = sorted(set(live) - holders) if len(holders) < len(live) else []
    added = patch(
        before.where,
        able=sorted(holders) if joiners else live,
        last_resort=joiners,
        missing=missing,
        remaining={group: left_of[group] for group in live},
        pieces_per_shard=spec.pieces_per_shard,
        granularity=spec.granularity,
    )
    if isinstance(added, WipeOut):
        return added
    return before.plan.grown(live, added.added), added


def retry(state: State, retries: Retries, why: str, failing_s: float) -> Transition:
    """The same members try the step again in a new epoch, with increasing delays (protocol rule 11). The job gives up
    when the step has failed both often and for long: many quick failures may be one short disturbance."""
    give_up_s = GIVE_UP_HEARTBEATS * state.job.heartbeat_timeout_s
    if retries.failures > state.job.retry_limit and failing_s >= give_up_s:
        reason = (
            f"{why}; step {state.step_in_flight} failed {retries.failures} times in {failing_s:.0f} s (the limits are "
            f"{state.job.retry_limit} and {give_up_s:g} s) and no group whose loss can be masked explains it"
        )
        return stop(state, "failed", with_checkpoint(state, reason))
    again = replace(state, epoch=state.epoch + 1, votes={}, retries=retries)
    delay_s = 0.0 if retries.failures < 3 else min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(retries.failures - 3, 9))
    reason = f"{why}; epoch {again.epoch}, same {counted(len(again.live), 'group')}, attempt {retries.failures + 1}"
    return decide(again, views(again, delay_s), reason)


def ask(state: State, verdict: audits.Verdict) -> Transition:
    """Groups disagree over the gradients of pieces: further hosts compute these pieces in a new epoch of the same
    members, who reduce again. Where there is no such host the job stops, because nobody can say which gradient is
    right."""
    asked = audits.deciders(state, verdict)
    if isinstance(asked, str):
        return stop(state, "failed", with_checkpoint(state, asked))
    told = {
        group: (*audits.padded(state.audits.get(group, ()), len(state.segments_of(group))), pieces)
        for group, pieces in asked.items()
    }
    again = replace(
        state,
        epoch=state.epoch + 1,
        votes={},
        plan=state.plan.grown(tuple(sorted(state.live)), dict.fromkeys(asked, ())),
        audits={**state.audits, **told},
        disputes=verdict.opinions,
    )
    disputes = "; ".join(
        f"{audits.name_groups(sorted(verdict.opinions[piece]))} found different gradients of piece {piece} in step "
        f"{state.step_in_flight}, group {group} computes it too"
        for group, pieces in asked.items()
        for piece in pieces
    )
    return decide(again, views(again), f"{disputes}; epoch {again.epoch}, same {counted(len(again.live), 'group')}")


def send_back_late_joiners(state: State, event: JoinersLate) -> Transition:
    """Joiners whose grace is over leave the epoch, unless they have a piece, so that nobody waits for them any
    longer."""
    if state.phase != "running" or event.epoch != state.epoch:
        return ignore(state, f"the joiners of epoch {event.epoch} are late, which is over")
    late = [group for group in sorted(state.live.keys() - state.holders) if not any(state.segments_of(group))]
    if not late:
        return ignore(state, "no joiner without a piece is waited for")
    detail = f"it did not hold the state of step {state.committed[0]} within {event.waited_s:g} s"
    return lose(state, Lost(tuple(Loss(group, state.live[group], "late", detail=detail) for group in late)))


def admit(state: State, why: str) -> Transition:
    """Groups that wait become members, without a piece in the step in flight and with a share of later steps (rule
    13)."""
    spec = state.job
    live = {**state.live, **state.waiting}
    members = tuple(sorted(live))
    assert state.standing is not None, "a running job has a standing assignment"
    drawn = assign(state.where, members, spec.pieces_per_shard, spec.granularity, state.standing.assignment)
    assert not isinstance(drawn, WipeOut), "more hosts cannot lose a shard"
    joined = ", ".join(f"group {g} (incarnation {i})" for g, i in sorted(state.waiting.items()))
    plan = state.plan.grown(members, {})
    grown = replace(
        state,
        epoch=state.epoch + 1,
        votes={},
        live=live,
        waiting={},
        plan=plan,
        retries=Retries(),
        standing=Standing(drawn, members),
    )
    reason = (
        f"{why}; {joined} joins in epoch {grown.epoch}, {counted(len(live), 'group')}; after this step: {drawn.reason}"
    )
    return decide(grown, views(grown), reason)
