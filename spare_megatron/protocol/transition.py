"""Functions that make the results of the protocol machine's rules: the next state, the actions, and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from spare_megatron.protocol import messages as m
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.state import State

Transition = tuple[State, m.Decision]
WRONG = ("diverged", "corrupt")
"""The causes of a loss that say: what the group has computed is wrong."""


def ignore(state: State, reason: str) -> Transition:
    """The given state, without actions; ``reason`` says why."""
    return state, m.Decision((), reason, state.epoch)


def decide(state: State, actions: Iterable[m.Action], reason: str) -> Transition:
    """The given state, with actions and their reason."""
    made = actions if isinstance(actions, m.Deferred) else tuple(actions)
    return state, m.Decision(made, reason, state.epoch)


def with_actions(outcome: Transition, before: list[m.Action]) -> Transition:
    """The same transition, with the actions ``before`` its own."""
    state, decision = outcome
    return state, replace(decision, actions=m.Deferred(lambda: (*before, *decision.actions)))


def views(state: State, delay_s: float = 0.0, before: Iterable[m.Action] = ()) -> m.Deferred:
    """The actions ``before``, then a view for every member and learner."""
    first = tuple(before)
    return m.Deferred(lambda: (*first, *(m.SendView(view, delay_s) for view in state.views())))


def stop(state: State, outcome: str, reason: str, before: Iterable[m.Action] = ()) -> Transition:
    """The job is over for every live group, and for the learners.

    A checkpoint that still waits for votes counts as it is, unless the job failed: nobody can compare its weights any
    more, or votes have spoken against its group.
    """
    waits = state.unproved
    good = waits is not None and outcome != "failed" and (waits.group, waits.incarnation) not in state.accused
    state, accepts, counts = counted(state, waits) if good else (state, [], "")
    reason = f"{reason}; {counts}" if counts else reason
    groups = tuple(sorted({*state.live, *state.learners}))
    stopped = replace(state, phase="stopped", outcome=outcome, outcome_reason=reason)
    return decide(stopped, [*before, *accepts, m.SendStop(groups, outcome, reason)], reason)


def with_checkpoint(state: State, reason: str) -> str:
    """``reason``, and which checkpoint is the last good one: for a stop after which no group's state can be trusted."""
    good = f"the last good checkpoint is step {state.saved_step}" if state.saved_step >= 0 else "there is no checkpoint"
    return f"{reason}; {good}"


Counted = tuple[State, list[m.Action], str]
"""(the state in which a checkpoint counts, who is notified, the reason); the old state and nothing where none does."""


def proved(state: State, digest: str) -> Counted:
    """The votes of all members agree on the ``digest`` of the weights, so the checkpoint that waited for them counts if
    its group is a member. The votes say nothing of the weights of a lost group: its checkpoint goes on waiting, unless
    the group itself had voted other weights, in a vote that was lost with it."""
    event = state.unproved
    if event is not None and event.step == state.committed[0]:
        writer = event.group, event.incarnation
        reported = state.reported.get(writer, "")
        if (reported and digest and reported != digest) or (writer in state.accused and not state.is_member(writer)):
            return replace(state, unproved=None), [], ""
    return counted(state, event if event is not None and state.is_member((event.group, event.incarnation)) else None)


def counted(state: State, event: m.Saved | None) -> Counted:
    """Let the checkpoint of ``event`` count."""
    if event is None:
        return state, [], ""
    waiting = state.unproved if state.unproved is not None and state.unproved.step > event.step else None
    after = replace(state, unproved=waiting, saved_step=max(state.saved_step, event.step))
    accept = m.AcceptSave(event.group, event.incarnation, event.step, event.directory)
    return after, [accept], f"the checkpoint of step {event.step} by group {event.group} counts"


def without(unproved: m.Saved | None, accused: Collection[tuple[int, int]]) -> m.Saved | None:
    """The checkpoint that waits for votes; None where its writer is among the (group, incarnation) of ``accused``,
    which votes found to be wrong."""
    return None if unproved is not None and (unproved.group, unproved.incarnation) in accused else unproved


def describe(loss: m.Loss) -> str:
    """One loss in words: 'group 2 (rank 1) exited: killed by signal 9'."""
    who = f"group {loss.group}" if loss.position < 0 else f"group {loss.group} (rank {loss.position})"
    return f"{who} {loss.cause}" + (f": {loss.detail}" if loss.detail else "")


def taken_by(incarnation: int) -> str:
    """Why an older incarnation of a group is lost."""
    return f"incarnation {incarnation} took its place"


def fence(loss: m.Loss) -> m.SendFenced:
    """Tell a lost group to leave, and why."""
    return m.SendFenced(loss.group, loss.incarnation, describe(loss), lasting=loss.cause in WRONG)


def minority(digests: Mapping[int, str], is_independent: Callable[[int], bool]) -> frozenset[int] | None:
    """Groups whose digest is not that of the majority; empty when all agree, None when there is no majority.

    A group without a digest is left out. Where any independent member has a digest, only theirs are counted; a single
    digest is no majority.
    """
    given = {g: d for g, d in digests.items() if d}
    if len(set(given.values())) <= 1:
        return frozenset()
    counted = [d for g, d in given.items() if is_independent(g)] or list(given.values())
    digest, number = Counter(counted).most_common(1)[0]
    if 2 * number <= len(counted) or len(counted) == 1:
        return None
    return frozenset(g for g, d in given.items() if d != digest)
