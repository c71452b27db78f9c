"""Epoch changes: the job begins, loses groups, admits groups, tries a step again.

Protocol rules 3 (one epoch for all changes that are known together), 4 (plans only grow inside a step), 13 (admission
in the commit's own record). Every function takes a state and returns the next one with its decision, without side
effects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from spare_megatron.config.plural import counted
from spare_megatron.protocol import adoption, audits, ending, offers, state_shards
from spare_megatron.protocol.assign import Patch, WipeOut, assign, first_assignment, patch
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import Action, JoinersLate, Loss, Lost
from spare_megatron.protocol.standing import draw_standing
from spare_megatron.protocol.state import NO_PLAN, Plan, Relief, Retries, Standing, State
from spare_megatron.protocol.transition import (
    WRONG,
    Transition,
    decide,
    describe,
    fence,
    ignore,
    stop,
    views,
    with_actions,
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
    state = state_shards.drawn(adoption.covered(replace(state, holders=frozenset(live))))
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
        independent=frozenset(state.live.items()),
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
    fences: list[Action] = [fence(loss) for loss in losses if loss.cause != "exited"]
    accused = {(loss.group, loss.incarnation) for loss in losses if loss.cause in WRONG}
    gone = {(loss.group, loss.incarnation) for loss in losses}
    members = {group for group, incarnation in gone if state.live.get(group) == incarnation}
    staying = {g: known for g, known in state.learners.items() if (g, known.incarnation) not in gone}
    learners, hurt = offers.without_donors(staying, gone)
    back = {group for group in hurt if group in state.live}
    out = members | back
    live = dict(state.live)  # of a thousand groups, few are out
    for group in out:
        live.pop(group, None)
    after = replace(
        state,
        live=live,
        learners=learners,
        highest=_raise_highest(state.highest, losses),
        unproved=without(state.unproved, accused),
    )
    after = adoption.remaining(after, members)
    if state.phase == "forming":
        return with_actions(begin_if_ready(replace(after, gone=after.gone | dead), f"lost at start: {why}"), fences)
    if not members:
        return decide(after, fences, f"lost before it was a member: {why}")
    if state.phase == "ending":
        return ending.lost(state, after, fences, why)
    shrunk = _shrink(after, state, out, event.progress, fences=fences, why=why)
    retries = replace(state.retries, failures=state.retries.failures + 1)
    if all(loss.cause == "stalled" for loss in losses) and costs_too_much(state, shrunk[0], retries, event.failing_s):
        # Standing still is no proof of a death.
        return retry(state, retries, f"{why}; its loss would leave a shard without a host", event.failing_s)
    return shrunk


def costs_too_much(before: State, after: State, retries: Retries, failing_s: float) -> bool:
    """Whether a loss without proof is not to be acted on, because it ends the job, or leaves a state shard without a
    host that counts, or would end the job if nobody could adopt what the group hosts; the latter while the step may be
    tried again."""
    if after.stopped or state_shards.counts_less(after, before):
        return True
    return not set(after.where.adopted) <= set(before.where.adopted) and not is_hopeless(before, retries, failing_s)


def _concerns(state: State, loss: Loss) -> bool:
    """True for a member, a learner, and a group that never came while the job forms."""
    if state.incarnation_of(loss.group) == loss.incarnation:
        return True
    never_came = loss.group not in state.live and loss.incarnation > state.highest.get(loss.group, -1)
    return state.phase == "forming" and never_came


def _raise_highest(highest: Mapping[int, int], losses: Iterable[Loss]) -> Mapping[int, int]:
    raised = dict(highest)
    for loss in losses:
        raised[loss.group] = max(raised.get(loss.group, -1), loss.incarnation)
    return raised


def send_back(state: State, groups: Collection[int], faulty: Collection[int], why: str) -> Transition:
    """Joiners leave the epoch and are learners again, and nobody waits for them any more. Those that are ``faulty``
    come one step nearer to being fenced."""
    back = {group: offers.voided(state.learners[group], group in faulty) for group in groups}
    after = replace(
        state, live={g: i for g, i in state.live.items() if g not in back}, learners={**state.learners, **back}
    )
    after, fences = offers.struck_off(after, back)
    return _shrink(after, state, set(back), (), fences=fences, why=why)


def take(after: State, before: State, taken: Mapping[int, tuple[int, ...]], why: str) -> Transition:
    """A new epoch of the same members, in which others have those pieces of the step in flight that are ``taken`` from
    a group: it has not begun them, and cannot."""
    return _shrink(after, before, set(), (), fences=[], why=why, taken=taken)


def _shrink(
    after: State,
    before: State,
    gone: set[int],
    progress: Sequence[tuple[int, int]],
    *,
    fences: list[Action],
    why: str,
    taken: Mapping[int, tuple[int, ...]] | None = None,
) -> Transition:
    """A new epoch of a running job without the members ``gone``, who are lost or, if they are learners ``after`` it,
    sent back; and without what is ``taken`` from others."""
    spec = after.job
    holders = before.holders - gone
    since = before.epoch + 1 if before.joiners else before.retries.since
    after = replace(
        after,
        epoch=before.epoch + 1,
        votes={},
        holders=holders,
        untried=before.untried - gone,
        retries=Retries(since=since),
        plan=NO_PLAN,
        audits={group: kept for group, kept in before.audits.items() if group in after.live},
        relief=_answered(before.relief, after.live),
        slowness={group: known for group, known in before.slowness.items() if group not in gone},
        applied_last=frozenset(),
    )
    surviving = after.live
    after, called = offers.last_resort(after, before.learners)
    after = state_shards.remaining(after)
    if not surviving and not after.holders - after.untried:
        return stop(after, "wipe-out", f"{why}; every group is lost", fences)
    if after.live != surviving:  # what earlier epochs show of links is not about members that were not there
        after = replace(after, retries=Retries(since=after.epoch))
    why = "; ".join([why, *called])
    live = tuple(sorted(after.live))
    if not after.holders - after.untried:
        reason = f"{why}; no live group holds the state of step {after.committed[0]}"
        reason += ", which votes have compared" if after.holders else ""
        return stop(after, "wipe-out", reason, fences)
    if lost := state_shards.lost(after):
        return stop(after, "wipe-out", f"{why}; no copy is left of {state_shards.named(lost)}", fences)
    drawn = draw_standing(after, live)
    if isinstance(drawn, WipeOut):
        return stop(after, "wipe-out", f"{why}; {drawn.reason}", fences)
    grown = _patched_plan(before, after, live, gone, progress, taken or {})
    if isinstance(grown, WipeOut):
        return stop(after, "wipe-out", f"{why}; {grown.reason}", fences)
    plan, patched = grown
    after = offers.offered(state_shards.renewed(replace(after, plan=plan, standing=drawn)))
    reason = (
        f"{why}; epoch {after.epoch} with {len(live)} of {spec.num_groups} groups; step {after.step_in_flight}: "
        f"{patched.reason}; steps after it: {drawn.assignment.reason}"
    )
    return decide(after, views(after, before=fences), reason)


def _answered(relief: Relief, live: Mapping[int, int]) -> Relief:
    """What is still asked of the groups that are ``live`` in a new epoch, which moves all that was given. With a loss
    there is other work to share out than before, so groups may be asked as often as in a new step."""
    asked = {group: ask for group, ask in relief.asked.items() if group in live and group not in relief.given}
    paces = {group: pace for group, pace in relief.paces.items() if group in live}
    return replace(relief, rounds=0, asked=asked, given={}, paces=paces)


def _patched_plan(
    before: State,
    after: State,
    live: tuple[int, ...],
    gone: set[int],
    progress: Sequence[tuple[int, int]],
    taken: Mapping[int, tuple[int, ...]],
) -> tuple[Plan, Patch] | WipeOut:
    """The plans of the step in flight with the pieces added of the members that are gone (protocol rule 4), those that
    others have given back (rule 21), and those that are ``taken`` from others (rule 23)."""
    spec, holders = before.job, after.holders
    given = {group: pieces for group, pieces in before.relief.given.items() if group not in gone}
    for group, pieces in taken.items():
        given[group] = tuple(dict.fromkeys((*given.get(group, ()), *pieces)))
    plan = before.plan.without(given)
    missing = [piece for group in sorted(gone) for piece in before.plan.pieces(group)]
    missing += [piece for pieces in given.values() for piece in pieces]
    remaining = plan.loads()
    if progress:
        reported = np.fromiter(chain.from_iterable(progress), dtype=np.int64, count=2 * len(progress))
        remaining[reported[::2]] -= reported[1::2]
        np.maximum(remaining, 0, out=remaining)
    remaining[list(gone)] = 0
    added = patch(
        after.where,
        able=holders,
        last_resort=sorted(set(live) - holders) if len(holders) < len(live) else [],
        missing=missing,
        remaining=remaining,
        pieces_per_shard=spec.pieces_per_shard,
        granularity=spec.granularity,
        slow=before.slowness,
    )
    if isinstance(added, WipeOut):
        return added
    return plan.grown(live, {g: adoption.opened_first(after, g, more) for g, more in added.added.items()}, gone), added


def retry(state: State, retries: Retries, why: str, failing_s: float) -> Transition:
    """The same members try the step again in a new epoch, with increasing delays (protocol rule 11), until that is
    hopeless."""
    if is_hopeless(state, retries, failing_s):
        reason = (
            f"{why}; step {state.step_in_flight} failed {retries.failures} times in {failing_s:.0f} s (the limits are "
            f"{state.job.retry_limit} and {_give_up_s(state):g} s) and no group whose loss can be masked explains it"
        )
        return stop(state, "failed", with_checkpoint(state, reason))
    again = replace(state, epoch=state.epoch + 1, votes={}, retries=retries)
    again = offers.offered(state_shards.renewed(again))
    delay_s = backoff_s(retries.failures)
    reason = f"{why}; epoch {again.epoch}, same {counted(len(again.live), 'group')}, attempt {retries.failures + 1}"
    return decide(again, views(again, delay_s), reason)


def is_hopeless(state: State, retries: Retries, failing_s: float) -> bool:
    """Whether the step has failed both often and for long: many quick failures may be one short disturbance."""
    return retries.failures > state.job.retry_limit and failing_s >= _give_up_s(state)


def _give_up_s(state: State) -> float:
    return GIVE_UP_HEARTBEATS * state.job.heartbeat_timeout_s


def backoff_s(failures: int) -> float:
    """How long a step is not tried again after so many failed attempts, in seconds."""
    return 0.0 if failures < 3 else min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 3, 9))


def ask(state: State, verdict: audits.Verdict) -> Transition:
    """Groups disagree over the gradients of pieces: further hosts compute these pieces in a new epoch of the same
    members, who reduce again. Where there is no such host the job stops, because nobody can say which gradient is
    right."""
    asked = audits.deciders(state, verdict)
    if isinstance(asked, str):
        return stop(state, "failed", with_checkpoint(state, asked))
    reported = {
        group: (*audits.padded(state.audits.get(group, ()), len(state.segments_of(group))), pieces)
        for group, pieces in asked.items()
    }
    again = replace(
        state,
        epoch=state.epoch + 1,
        votes={},
        plan=state.plan.grown(tuple(sorted(state.live)), dict.fromkeys(asked, ())),
        audits={**state.audits, **reported},
        disputes=verdict.opinions,
    )
    disputes = "; ".join(
        f"{audits.name_members(verdict.opinions[piece])} found different gradients of piece {piece} in step "
        f"{state.step_in_flight}, group {group} computes it too"
        for group, pieces in asked.items()
        for piece in pieces
    )
    return decide(again, views(again), f"{disputes}; epoch {again.epoch}, same {counted(len(again.live), 'group')}")


def joiners_late(state: State, event: JoinersLate) -> Transition:
    """Joiners whose grace is over leave the epoch, unless they have a piece, so that nobody waits for them any
    longer."""
    if state.phase != "running" or event.epoch != state.epoch:
        return ignore(state, f"the joiners of epoch {event.epoch} are late, which is over")
    late = waited_for(state)
    if not late:
        return ignore(state, "no joiner without a piece is waited for")
    who = audits.name_groups(late)
    why = f"{who} did not hold the state of step {state.committed[0]} within {event.waited_s:g} s"
    return send_back(state, late, late, why)


def waited_for(state: State) -> list[int]:
    """The joiners without a piece in the step in flight."""
    return sorted(group for group in state.joiners if not any(state.segments_of(group)))


def change_members(state: State, joining: Sequence[int], left: Sequence[int], why: str, moves: str = "") -> Transition:
    """The epoch that a commit's own record makes. Learners that are ``joining`` become members, without a piece in the
    step in flight and with a share of later steps (rule 13); those that have ``left`` are none any more (rule 22). With
    neither, the steady-state assignment alone changes, because groups are slow for long (rule 24), or hosts of state
    shards do: ``moves`` says how."""
    live = {**state.live, **{group: state.learners[group].incarnation for group in joining}}
    members = tuple(sorted(live))
    if joining:  # in order, so that sorting them again and again costs little
        live = dict(zip(members, map(live.__getitem__, members), strict=True))
    drawn = draw_standing(state, members)
    assert not isinstance(drawn, WipeOut), "more hosts cannot lose a shard, and who leaves is not needed"
    words = [", ".join(f"group {g} (incarnation {live[g]})" for g in joining)] * bool(joining)
    words = [f"{names} {'joins' if len(joining) == 1 else 'join'}" for names in words]
    if left:
        words.append(f"{audits.name_groups(left)} {'has' if len(left) == 1 else 'have'} left")
    if not words:
        words.append(moves or "later steps are shared out by speed")
    plan = state.plan.grown(members, {})
    grown = replace(state, epoch=state.epoch + 1, votes={}, live=live, plan=plan, retries=Retries(), standing=drawn)
    grown = state_shards.renewed(state_shards.remaining(grown))
    after = drawn.assignment.reason
    reason = (
        f"{why}; {' and '.join(words)} in epoch {grown.epoch}, {counted(len(live), 'group')}; after this step: {after}"
    )
    return decide(grown, views(grown), reason)
