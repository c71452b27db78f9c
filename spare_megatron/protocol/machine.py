"""The only place that puts decisions in order: membership, plan, patch, vote, commit, join, wipe-out, end.

``step(state, event)`` is a pure function: no clock, no randomness, no I/O; everything that a decision needs to know
comes with the event, and the journal holds it. The coordinator of a real job and the simulator run this same function.
The rules are those of the step protocol (docs/protocol.md); :mod:`spare_megatron.protocol.invariants` states what
must hold after every event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spare_megatron.config.plural import counted
from spare_megatron.protocol import draining, ending, hosting, learning, relief, speeds, voting
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.membership import begin, begin_if_ready, joiners_late, lose
from spare_megatron.protocol.state import State, initial_state, opened_state
from spare_megatron.protocol.transition import Transition, decide, fence, ignore, stop, taken_by, with_actions

__all__ = ["State", "initial_state", "step"]


def step(state: State, event: m.Event) -> Transition:
    """The state after ``event``, what is to be done about it, and why."""
    if isinstance(event, m.Opened):
        return _opened(state, event)
    if state.phase == "closed":
        return ignore(state, f"{type(event).__name__} before the job was opened")
    if state.phase == "stopped":
        return _after_stop(state, event)
    return _RULES[type(event)](state, event)


def _opened(state: State, event: m.Opened) -> Transition:
    if event.fencing <= state.fencing:
        return ignore(state, f"fencing number {event.fencing} is not above {state.fencing}")
    if event.job_attempt == state.job_attempt and state.spec is not None:
        again = replace(state, fencing=event.fencing)
        reason = f"the coordinator is back with fencing number {event.fencing}; {len(state.live)} groups are expected"
        return decide(again, [], reason)
    opened = opened_state(state, event.spec, event.job_attempt, event.fencing)
    spec = event.spec
    return decide(
        opened,
        [],
        f"job attempt {event.job_attempt} of the job: {counted(spec.num_groups, 'group')}, "
        f"{counted(spec.pieces_per_shard, 'piece')} per shard, redundancy {len(spec.offsets)}, "
        f"steps {spec.first_step + 1} to {spec.last_step}",
    )


def _after_stop(state: State, event: m.Event) -> Transition:
    """A group that still sends something receives the end of the job; a checkpoint that comes late still counts."""
    if isinstance(event, m.Hello | m.Vote):
        return decide(state, [m.SendStop((event.group,), state.outcome, state.outcome_reason)], "the job is over")
    if isinstance(event, m.Saved):
        return ending.saved(state, event)
    return ignore(state, "the job is over")


def _hello(state: State, event: m.Hello) -> Transition:
    """A group arrives, comes back, or is notified that its place is taken (rules 8 and 9)."""
    refusal = _refusal(state, event)
    if refusal:
        return decide(state, [m.SendFenced(event.group, event.incarnation, refusal, event.process_nonce)], refusal)
    if event.fencing > state.fencing:
        reason = (
            f"group {event.group} knows coordinator {event.fencing}, this is {state.fencing}: a newer one has taken "
            "over"
        )
        return stop(state, "failed", reason)
    event = replace(event, incarnation=_incarnation(state, event))
    if state.phase == "forming":
        return _arrive(state, event)
    if state.incarnation_of(event.group) != event.incarnation:
        return learning.enter(state, event)
    return (learning.back if event.group in state.learners else _return)(state, event)


def _incarnation(state: State, event: m.Hello) -> int:
    """The incarnation of a process that may have none yet: the one that it was given before, or the next one."""
    known, process_nonce = state.process_nonces.get(event.group, (-1, ""))
    if event.incarnation >= 0:
        return event.incarnation
    return known if process_nonce == event.process_nonce else state.highest.get(event.group, -1) + 1


def _answered(outcome: Transition, group: int) -> Transition:
    """Where a Hello ends the job, its group is asked to stop as well, even if it is neither a member nor a learner."""
    state, decision = outcome
    actions = list(decision.actions) if state.stopped else []
    for index, action in enumerate(actions):
        if isinstance(action, m.SendStop) and group not in action.groups:
            actions[index] = replace(action, groups=tuple(sorted((*action.groups, group))))
            return state, replace(decision, actions=tuple(actions))
    return outcome


def _refusal(state: State, event: m.Hello) -> str:
    """Why the process of this Hello is fenced; empty if it is not."""
    group, spec = event.group, state.job
    if not 0 <= group < spec.num_groups:
        return f"group {group} is not one of 0..{spec.num_groups - 1}"
    if event.fingerprint != spec.fingerprint:
        return f"group {group} runs another job: fingerprint {event.fingerprint}, expected {spec.fingerprint}"
    highest, (named, process_nonce) = state.highest.get(group, -1), state.process_nonces.get(group, (-1, ""))
    present = state.incarnation_of(group)
    incarnation = _incarnation(state, event)
    if incarnation != present and incarnation <= highest:
        return f"group {group} incarnation {incarnation} is not in the live set, incarnation {highest} was seen"
    if incarnation == named and process_nonce != event.process_nonce:
        return f"group {group} incarnation {incarnation} is another process"
    drawn = event.incarnation < 0 and incarnation != named
    if drawn and present is not None and event.replaces != present:
        return f"the place of group {group} is taken by its incarnation {present}"
    if state.phase == "forming" and event.last_applied != spec.first_step:
        return f"group {group} starts from step {event.last_applied}, the job from step {spec.first_step}"
    return ""


def _arrive(state: State, event: m.Hello) -> Transition:
    group = event.group
    arrived = replace(
        state,
        live={**state.live, group: event.incarnation},
        highest={**state.highest, group: event.incarnation},
        process_nonces={**state.process_nonces, group: (event.incarnation, event.process_nonce)},
        gone=state.gone - {group},
    )
    outcome = begin_if_ready(arrived, f"group {group} incarnation {event.incarnation} is here")
    older = state.live.get(group, event.incarnation)
    if older == event.incarnation:
        return outcome
    return with_actions(outcome, [fence(m.Loss(group, older, "replaced", detail=taken_by(event.incarnation)))])


def _all_here(state: State, event: m.AllHere) -> Transition:
    """Many first Hellos, with the same result as one after the other. Where all of them are plain arrivals, of which
    only the last can begin the job, they are applied in one go; else one by one."""
    spec = state.job
    arriving = dict(event.groups)
    process_nonces = event.process_nonces or ("",) * len(event.groups)
    plain = state.phase == "forming" and not state.gone and len(arriving) == len(event.groups) > 0
    plain = plain and not arriving.keys() & state.live.keys()
    if plain and all(0 <= g < spec.num_groups and i > state.highest.get(g, -1) for g, i in event.groups):
        arrived = replace(
            state,
            live={**state.live, **arriving},
            highest={**state.highest, **arriving},
            process_nonces={
                **state.process_nonces,
                **{g: (i, process_nonce) for (g, i), process_nonce in zip(event.groups, process_nonces, strict=True)},
            },
        )
        group, incarnation = event.groups[-1]
        return begin_if_ready(arrived, f"group {group} incarnation {incarnation} is here")
    outcome = ignore(state, "nobody is here")
    for (group, incarnation), process_nonce in zip(event.groups, process_nonces, strict=True):
        before = outcome[1].actions
        after, decision = step(
            outcome[0], m.Hello(group, incarnation, spec.fingerprint, spec.first_step, process_nonce=process_nonce)
        )
        outcome = after, replace(decision, actions=(*before, *decision.actions))
    return outcome


def _return(state: State, event: m.Hello) -> Transition:
    """A member sends Hello again: it gets its view, unless it knows more, or has applied less, than a member can."""
    group = event.group
    step_committed = state.committed[0]
    if event.known > step_committed:
        reason = (
            f"group {group} has applied step {event.last_applied} and knows of the commit of step {event.known}, the "
            f"last commit here is {step_committed}: the journal is not whole, or there is a second coordinator"
        )
        return stop(state, "failed", reason)
    missed = event.last_applied == step_committed - 1 and event.held == state.committed
    if event.last_applied != step_committed and not missed:
        detail = f"applied step {event.last_applied}, holds {event.held}, the last commit is {state.committed}"
        return lose(state, m.Lost((m.Loss(group, event.incarnation, "diverged", detail=detail),)))
    return decide(state, [m.SendView(state.view_of(group))], f"group {group} is back in epoch {state.epoch}")


def _startup_over(state: State, event: m.StartupOver) -> Transition:
    if state.phase != "forming":
        return ignore(state, "the job has begun")
    spec = state.job
    here = f"{len(state.live)} of {spec.num_groups} groups came within {event.waited_s:g} s"
    if len(state.live) < max(1, spec.min_groups):
        return stop(state, "failed", f"{here}, fewer than --spare-min-groups {spec.min_groups}")
    missing = frozenset(range(spec.num_groups)) - state.live.keys()
    return begin(replace(state, gone=missing), here)


def _tuned(state: State, event: m.Tuned) -> Transition:
    if state.phase != "running":
        return ignore(state, f"{event.reason}; no step is in flight")
    tuned = replace(
        state, save_interval=event.save_interval or state.save_interval, save_now=state.save_now or event.save_now
    )
    return decide(tuned, [], event.reason)


def _stop_requested(state: State, event: m.StopRequested) -> Transition:
    if state.phase == "forming":
        return stop(state, "left", f"{event.reason}; nothing was trained yet")
    if state.phase == "ending" or state.leave:
        return ignore(state, f"{event.reason}; the run already ends")
    leaving = replace(state, leave=event.reason)
    return decide(leaving, [], f"{event.reason}; the run ends with step {state.step_in_flight}")


_RULES: dict[type[m.Event], Callable[[State, Any], Transition]] = {
    m.AllHere: _all_here,
    m.AllVoted: voting.all_voted,
    m.Applied: voting.applied,
    m.CaughtUp: learning.caught_up,
    m.DrainRequested: draining.requested,
    m.GaveBack: relief.gave_back,
    m.Have: learning.have,
    m.Hello: lambda state, event: _answered(_hello(state, event), event.group),
    m.Hosts: hosting.hosts,
    m.JoinersLate: joiners_late,
    m.Lost: lose,
    m.Ready: learning.ready,
    m.RunningOut: relief.running_out,
    m.Saved: ending.saved,
    m.SpeedsMeasured: speeds.measured,
    m.Standstill: voting.standstill,
    m.StartupOver: _startup_over,
    m.StopRequested: _stop_requested,
    m.Tuned: _tuned,
    m.Void: learning.void,
    m.Vote: voting.vote,
    m.Withdrawn: learning.withdrawn,
}
"""Event -> the rule for it while the job forms, runs or ends. :func:`step` itself handles Opened, and what comes before
it or after the stop."""
