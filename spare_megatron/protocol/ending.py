"""The end of a run (protocol rule 14), and when a checkpoint counts (rule 8).

When the last step is committed, every group applies it and votes once more: for the step after it, which is never
trained, with no pieces and the digest of its last weights. The lowest group saves. The job is over when the votes agree
and every group has sent Applied.

A checkpoint of step t holds weights that only the votes of step t + 1 compare. So it counts once those votes, or the
votes at the end, agree. Where the job is wiped out before that, it counts as it is: otherwise all work since the last
checkpoint would be given up for a comparison that nobody can make any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from spare_megatron.protocol import state_shards
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.divergence import check_weights
from spare_megatron.protocol.messages import Action, Applied, Loss, Saved, SendFenced, Vote
from spare_megatron.protocol.saves import saver
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import (
    Transition,
    counted,
    decide,
    describe,
    fence,
    ignore,
    proved,
    stop,
    views,
    without,
)


def saved(state: State, event: Saved) -> Transition:
    """A checkpoint is complete: it counts now, or when its weights have been compared."""
    group = event.group
    if state.live.get(group) != event.incarnation:
        reason = f"group {group} incarnation {event.incarnation} is not in the live set: its checkpoint does not count"
        return decide(state, [SendFenced(group, event.incarnation, reason)], reason)
    step = state.committed[0]
    if event.step > step:
        return ignore(state, f"group {group} saved step {event.step}, only {step} is committed")
    agreed = state.phase == "ending" and state.votes.keys() == state.live.keys()
    if event.step < step or agreed or (state.phase == "stopped" and state.outcome != "failed"):
        return decide(*counted(state, event))
    if state.phase == "stopped":
        return ignore(state, f"the job failed before the weights of step {event.step} were compared")
    when = "the groups have voted on the last weights" if state.phase == "ending" else f"step {step + 1} is committed"
    return ignore(replace(state, unproved=event), f"group {group} saved step {event.step}: it counts when {when}")


def vote(state: State, event: Vote) -> Transition:
    """A group's vote on the last weights."""
    if event.result.epoch != state.epoch or not event.result.ok:
        return ignore(
            state, f"group {event.group} voted in epoch {event.result.epoch}, the run ends in epoch {state.epoch}"
        )
    voted = replace(state, votes={**state.votes, event.group: event})
    return _settle(voted, [], f"group {event.group} voted on the weights after step {state.committed[0]}")


def applied(state: State, event: Applied) -> Transition:
    """A group has done all that the epoch asks of it. (A view of a newer epoch may still ask it to save.)"""
    if event.epoch != state.epoch:
        return ignore(state, f"group {event.group} is done with epoch {event.epoch}, the run ends in {state.epoch}")
    done = replace(state, applied_last=state.applied_last | {event.group})
    return _settle(done, [], f"group {event.group} is done")


def lost(before: State, after: State, fences: list[Action], why: str) -> Transition:
    """Groups are lost after the last step was committed. Nothing is planned any more, but somebody must save the final
    state.

    When the group that saves dies before its checkpoint counts, the next one is asked with a view of a new epoch, in
    which all vote and send Applied again.
    """
    step = after.committed[0]
    after = replace(
        after,
        holders=after.holders.intersection(after.live),
        applied_last=after.applied_last.intersection(after.live),
        votes={group: vote for group, vote in after.votes.items() if group in after.live},
    )
    after = state_shards.remaining(after)
    there = after.saved_step == step
    if not after.live:
        if there:
            return stop(after, ending(after)[0], f"{why}; step {step} is saved", fences)
        return stop(after, "wipe-out", f"{why}; every group is lost before step {step} was saved", fences)
    gone = [] if there else state_shards.lost(after)
    if gone:
        why = f"{why}; no copy is left of {state_shards.named(gone)} before step {step} was saved"
        return stop(after, "wipe-out", why, fences)
    if (saver(after.live) != saver(before.live) or state_shards.counts_less(after, before)) and not there:
        asked = replace(after, epoch=after.epoch + 1, votes={}, applied_last=frozenset())
        return decide(asked, views(asked, before=fences), f"{why}; group {saver(after.live)} is to save step {step}")
    return _settle(after, fences, why)


def ending(state: State) -> tuple[str, str]:
    """The outcome and the reason of a run whose last step is committed and applied."""
    step = state.committed[0]
    if state.leave:
        done = "committed, applied and saved" if state.saved_step == step else "committed and applied; nobody saves it"
        return "left", f"{state.leave}; step {step} is {done}"
    return "finished", f"step {step}, the last, is committed and applied by all {len(state.live)} live groups"


def _settle(state: State, before: Iterable[Action], why: str) -> Transition:
    """Once every live group has voted, compare their weights; where these agree the waiting checkpoint counts, and the
    job is over when all groups have sent Applied."""
    actions = list(before)
    if state.votes.keys() != state.live.keys():
        return decide(state, actions, f"{why}; {len(state.votes)} of {len(state.live)} groups have voted on the end")
    unlike = check_weights(state, _fence)
    if unlike is not None:
        after, decision = unlike
        return after, replace(decision, actions=(*actions, *decision.actions), reason=f"{why}; {decision.reason}")
    state, accepts, counts = proved(state, state.voted_weights)
    actions += accepts
    why = f"{why}; {counts}" if counts else why
    if state.applied_last >= state.live.keys():
        return stop(state, *ending(state), before=actions)
    return decide(state, actions, f"{why}; {len(state.applied_last)} of {len(state.live)} groups are done")


def _fence(state: State, losses: tuple[Loss, ...]) -> Transition:
    gone = {loss.group for loss in losses}
    after = replace(
        state,
        live={g: i for g, i in state.live.items() if g not in gone},
        unproved=without(state.unproved, {(loss.group, loss.incarnation) for loss in losses}),
    )
    fences: list[Action] = [fence(loss) for loss in losses]
    return lost(state, after, fences, "; ".join(map(describe, losses)))
