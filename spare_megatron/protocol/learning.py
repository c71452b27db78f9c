"""What learners and donors report: they come, are ready for an offer, have caught up, or have to give an offer up.

None of it makes an epoch where only learners are concerned, because nobody waits for them (protocol rules 16 to 19).
"""

from __future__ import annotations

from spare_megatron.protocol import messages as m
from spare_megatron.protocol import offers, state_shards
from spare_megatron.protocol.audits import name_groups
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.learner import NO_OFFER, Learner
from spare_megatron.protocol.membership import lose, send_back, take
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition, decide, ignore, stop, taken_by


def enter(state: State, event: m.Hello) -> Transition:
    """A new incarnation sends Hello while the job runs: the older one, if it is there, is lost, and this one learns."""
    group = event.group
    outcome: Transition = ignore(state, "")
    older = state.incarnation_of(group)
    if older is not None:
        outcome = lose(state, m.Lost((m.Loss(group, older, "replaced", detail=taken_by(event.incarnation)),)))
        if outcome[0].stopped:
            return outcome
    after, decision = outcome
    here = replace(
        after,
        learners={**after.learners, group: Learner(event.incarnation)},
        drained=after.drained - {group},
        drained_for_now=after.drained_for_now - {group},
        highest={**after.highest, group: event.incarnation},
        process_nonces={**after.process_nonces, group: (event.incarnation, event.process_nonce)},
    )
    reason = f"group {group} incarnation {event.incarnation} is here and is to be brought up to date"
    actions = m.Deferred(lambda: (*decision.actions, m.SendView(here.view_of(group))))
    return decide(here, actions, f"{decision.reason}; {reason}" if decision.reason else reason)


def back(state: State, event: m.Hello) -> Transition:
    """A learner or joiner sends Hello again: it receives its view again, unless it is ahead of the last commit."""
    if event.known > state.committed[0]:
        return _ahead(state, event.group, event.known)
    return decide(
        state, [m.SendView(state.view_of(event.group))], f"group {event.group}, which learns, is back in {state.epoch}"
    )


def _ahead(state: State, group: int, step: int) -> Transition:
    """A learner or joiner knows a state that nobody has committed: it alone is lost."""
    detail = f"it has seen step {step}, the last commit is {state.committed}"
    return lose(state, m.Lost((m.Loss(group, state.learners[group].incarnation, "diverged", detail=detail),)))


def _learner(state: State, group: int, incarnation: int, number: int | None) -> Learner | None:
    """The learner or joiner that such a message is about, if it still is one and ``number`` is that of its offer."""
    known = state.learners.get(group)
    if state.phase != "running" or known is None or known.incarnation != incarnation:
        return None
    follows = known.offer.number if known.offer else NO_OFFER if state.job.state_shards else None
    if number is not None and number != follows:
        return None
    return known


def ready(state: State, event: m.Ready) -> Transition:
    """A learner could take an offer: it gets one in this record, where enough donors are free, else with the next
    commit or epoch; so does one whose last offer ended by its own fault or a donor's, which may last. The donors are
    reported at once, and by each later commit and view."""
    known = _learner(state, event.group, event.incarnation, None)
    if known is None or known.offer is not None or known.ready:
        return ignore(state, f"group {event.group} is ready, which is known or changes nothing")
    waiting = replace(state, learners={**state.learners, event.group: replace(known, ready=True, formed=True)})
    after = waiting if known.voids else offers.offered(waiting)
    new = [offer for offer in after.offers if offer.number > state.offers_made]
    if not new:
        return ignore(after, f"group {event.group} is ready to be brought up to date")
    learners = sorted(offer.learner[0] for offer in new)
    notified = sorted({*learners, *(donor for offer in new for donor, _ in offer.donors)})
    is_or_are = "is" if len(learners) == 1 else "are"
    why = f"{name_groups(learners)} {is_or_are} offered the state after step {state.committed[0]}"
    views = m.Deferred(lambda: (m.SendView(after.view_of(group)) for group in notified))
    return decide(after, views, f"group {event.group} is ready; {why}")


def caught_up(state: State, event: m.CaughtUp) -> Transition:
    """A learner or joiner holds the state after a step."""
    group, step = event.group, event.step
    known = _learner(state, group, event.incarnation, event.number)
    if known is None:
        return ignore(state, f"group {group} has caught up to step {step} by offer {event.number}, which has ended")
    if step > state.committed[0]:
        return _ahead(state, group, step)
    if step <= known.applied:
        return ignore(state, f"group {group} has caught up to step {step}, which is known")
    known = replace(known, applied=step, weights_digest=event.weights_digest)
    digest = dict(state.digests).get(step, "")
    checked = offers.compare(known, digest)
    if checked is None:
        why = f"the weights that group {group} computed after step {step} are others than the voted ones"
        return _void(state, group, why, wrong=True)
    if group in state.live and step == state.committed[0]:
        here = offers.holding(state, group, checked.proved or known.offer is None)
        here = replace(here, relief=replace(here.relief, rounds=0))
        return ignore(here, f"group {group} holds the state of step {step} now")
    after = replace(state, learners={**state.learners, group: checked})
    return ignore(after, f"group {group} has caught up to step {step}{', proved' if checked.proved else ''}")


def have(state: State, event: m.Have) -> Transition:
    """A new host of a state shard has its state, or has nothing and no donor, or cannot keep the shard: then others are
    asked. Where no host counts for the shard, the first one that has the state counts at once; when none has it any
    more, the job ends (rule 27)."""
    host = state_shards.new_host(state, event) if state.phase in ("running", "ending") else None
    shard = state_shards.named([event.shard])
    if host is None:
        return ignore(state, f"group {event.group} reports on {shard} what is known, or it is no new host of it")
    after = state_shards.reported(state, host, event)
    why = f"group {event.group} has {'' if event.whole else 'neither a donor nor '}{shard}"
    if event.detail:
        why = f"group {event.group} cannot keep {shard}: {event.detail}"
    if event.shard not in state_shards.uncounted(after):
        asks = bool(event.detail) and state.phase == "running"
        return take(after, state, {}, why) if asks else ignore(after, why)
    if state.phase == "ending":
        after = state_shards.remaining(after)
    elif event.whole:
        return take(after, state, {}, f"{why}, of which it is the only host now")
    saved = state.phase == "ending" and state.saved_step == state.committed[0]
    if not saved and (lost := state_shards.lost(after)):
        return stop(after, "wipe-out", f"{why}; no copy is left of {state_shards.named(lost)}")
    return ignore(after, why)


def void(state: State, event: m.Void) -> Transition:
    """A learner or joiner cannot have a part of its offer."""
    if _learner(state, event.group, event.incarnation, event.number) is None:
        return ignore(state, f"offer {event.number} to group {event.group} has ended already")
    return _void(state, event.group, f"group {event.group} gave offer {event.number} up: {event.detail}")


def withdrawn(state: State, event: m.Withdrawn) -> Transition:
    """A donor serves an offer no longer."""
    offer = next((offer for offer in state.offers if offer.number == event.number), None)
    if state.phase != "running" or offer is None or (event.group, event.incarnation) not in offer.donors:
        return ignore(state, f"group {event.group} withdraws from offer {event.number}, which has ended already")
    learner = offer.learner[0]
    why = f"group {event.group} does not serve offer {event.number} to group {learner} any more: {event.detail}"
    return _void(state, learner, why)


def _void(state: State, group: int, why: str, wrong: bool = False) -> Transition:
    """An offer has ended by the fault of its learner or of a donor that lives. A joiner leaves the epoch by it."""
    if group in state.live:
        return send_back(state, [group], [group], why)
    learners = {**state.learners, group: offers.voided(state.learners[group], True, wrong)}
    after, fences = offers.struck_off(replace(state, learners=learners), [group])
    notified = fences or [m.SendView(after.view_of(group))]
    return decide(after, notified, why)
