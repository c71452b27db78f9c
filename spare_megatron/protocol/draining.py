"""Groups leave because an operator asks for it: for maintenance, or because their machine shows errors.

A group that is asked to leave finishes the step in flight. The request makes a new epoch of the same members, in which
the steady-state assignment has nothing for it; so the commit of that step, in whose own record it leaves (voting),
patches nothing. Where it is the last live host of a shard it stays until another one is there. The launcher asks too,
for a group that is to be started again elsewhere: that is for now, and gives way to what an operator asks. Protocol
rule 22.
"""

from __future__ import annotations

from spare_megatron.protocol import offers, state_shards
from spare_megatron.protocol.assign import WipeOut
from spare_megatron.protocol.audits import name_groups
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import Action, DrainRequested, SendFenced
from spare_megatron.protocol.standing import draw_standing, leaving
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition, decide, ignore, views


def refusal(state: State, event: DrainRequested) -> str:
    """Why a request is refused, with what would be possible; empty where it is not."""
    if state.phase != "running":
        return f"nobody can be drained while the job is {state.phase}; wait until it trains"
    if event.for_now and event.undo:
        return ""
    known = state.drained
    if not event.undo:
        known = frozenset(state.present) | (state.drained if event.for_now else state.drained_for_now)
    strange = sorted(set(event.groups) - known)
    if strange and not event.undo and state.drained.issuperset(strange):
        return f"{name_groups(strange)} {'has' if len(strange) == 1 else 'have'} been drained already"
    if not event.groups or strange:
        what = "are drained" if event.undo else "are there"
        who = name_groups(strange) + (" is not among them" if len(strange) == 1 else " are not among them")
        there = f"groups {', '.join(map(str, sorted(known)))}" if known else "no groups"
        return f"{there} {what}; {who if strange else 'name one of them'}"
    if event.undo or state.drained.issuperset(event.groups):
        return ""
    asked = replace(state, drained=state.drained | frozenset(event.groups))
    stuck = sorted(asked.drained.intersection(state.live) - leaving(asked, state.live))
    if stuck:
        one = len(stuck) == 1
        return (
            f"{name_groups(stuck)} {'is the last live host' if one else 'are the last live hosts'} of a shard, so the "
            f"job would end; wait until another host of it is back, or drain without {'it' if one else 'them'}"
        )
    return ""


def wanted(state: State, event: DrainRequested) -> tuple[frozenset[int], frozenset[int]]:
    """The groups that are to leave after a request, and those of them that are only for now. An operator takes over
    what the launcher has asked for; the launcher neither takes over nor takes back what an operator has."""
    groups, drained, for_now = frozenset(event.groups), state.drained, state.drained_for_now
    if event.undo:
        groups &= for_now if event.for_now else drained
        return drained - groups, for_now - groups
    return drained | groups, for_now | (groups - drained) if event.for_now else for_now - groups


def requested(state: State, event: DrainRequested) -> Transition:
    """Groups are to leave with the next commit, or (``undo``) may stay or come back after all."""
    refused = refusal(state, event)
    if refused:
        return ignore(state, f"{event.reason}: {refused}")
    drained, for_now = wanted(state, event)
    groups = drained ^ state.drained
    who = name_groups(sorted(groups or event.groups))
    if not groups:
        are = "is" if len(event.groups) == 1 else "are"
        known = f"{are} not to leave for now" if event.undo else f"{are} to leave already"
        return ignore(replace(state, drained_for_now=for_now), f"{event.reason}: {who} {known}")
    learners = sorted(group for group in groups - state.live.keys() if group in state.learners and not event.undo)
    fences: list[Action] = [SendFenced(g, state.learners[g].incarnation, event.reason) for g in learners]
    staying = {group: known for group, known in state.learners.items() if group not in learners}
    after = replace(state, drained=drained, drained_for_now=for_now, learners=staying)
    what = "need not leave any more" if event.undo else "is to leave" if len(groups) == 1 else "are to leave"
    why = f"{event.reason}: {who} {what}"
    if groups.isdisjoint(state.live):
        return decide(after, fences, why)
    live = tuple(sorted(state.live))
    drawn = draw_standing(after, live)
    assert not isinstance(drawn, WipeOut), "who leaves is not needed"
    since = state.epoch + 1 if state.joiners else state.retries.since
    again = replace(after, epoch=state.epoch + 1, votes={}, standing=drawn, retries=replace(state.retries, since=since))
    again = offers.offered(state_shards.renewed(again))
    reason = f"{why}; epoch {again.epoch}, same members; after step {again.step_in_flight}: {drawn.assignment.reason}"
    return decide(again, views(again, before=fences), reason)
