"""Offers of state to learners: when they are made, when they end, and when a received state may be trusted.

Functions on a state, without actions of their own: the records that use them (:mod:`.membership`, :mod:`.voting`,
:mod:`.learning`) send the messages. An offer is made only in a record that every donor must take in before it can vote
again, a commit or a new epoch: so a donor copies its part before the state that it copies is gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice

from spare_megatron.protocol.adoption import adopt, adopters, bare
from spare_megatron.protocol.audits import name_groups
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.messages import Action, SendFenced
from spare_megatron.protocol.state import State
from spare_megatron.protocol.view import MemberId, Offer

SERVES_MAX = 2
"""The most learners that one group serves at a time: each costs it a part of the state and of several results."""
VOIDS_MAX = 3
"""A learner whose offers ended so often by its own fault, or that of a donor that lives, is fenced."""


def offered(state: State) -> State:
    """The state in which each learner that could take an offer and has none has one, of the state after t*. A learner
    for which all donors serve enough already waits; a joiner does not. With state shards a member gets the weights from
    any other, and the state of the shards that it hosts by an offer of its own (protocol.state_shards)."""
    ready = sorted(g for g, known in state.learners.items() if known.ready and known.offer is None)
    if not ready or state.job.state_shards:
        return state
    able, number = sorted(state.holders - state.untried), state.offers_made
    learners, serves = dict(state.learners), {group: len(offers) for group, offers in state.serves.items()}
    for group in ready:
        most = None if group in state.live else SERVES_MAX
        free = _least_busy(able, group, serves, state.job.donors_max, most)
        if not free:
            continue
        number += 1
        donors = tuple((donor, state.live[donor]) for donor in free)
        known = learners[group]
        offer = Offer((group, known.incarnation), number, state.committed[0], donors)
        learners[group] = replace(known, offer=offer)
        serves |= {donor: serves.get(donor, 0) + 1 for donor, _ in donors}
    return replace(state, learners=learners, offers_made=number)


def _least_busy(able: Sequence[int], group: int, serves: Mapping[int, int], number: int, most: int | None) -> list[int]:
    """Up to ``number`` donors of ``able``, in ascending order, for a learner: those that serve fewest, and of these the
    next ones after ``group``; none that serves ``most`` already."""
    cut = bisect_left(able, group)
    idle = list(islice((donor for donor in chain(able[cut:], able[:cut]) if not serves.get(donor)), number))
    if len(idle) == number:
        return idle
    serving = [donor for donor in chain(able[cut:], able[:cut]) if serves.get(donor)]
    if most is not None:
        serving = [donor for donor in serving if serves[donor] < most]
    return [*idle, *sorted(serving, key=lambda donor: serves[donor])][:number]


def voided(known: Learner, counts: bool, wrong: bool = False) -> Learner:
    """A learner after its offer has ended, where its weights were ``wrong`` because of that: it keeps nothing, and says
    Ready again."""
    voids, wrongs = known.voids + counts, known.wrong + wrong
    return Learner(known.incarnation, formed=known.formed, voids=voids, wrong=wrongs)


def ended(state: State) -> State:
    """The state at the end of the run, in which no offer goes on: learners wait for the job's Stop."""
    return replace(state, learners={group: voided(known, False) for group, known in state.learners.items()})


def without_donors(
    learners: Mapping[int, Learner], gone: Collection[MemberId]
) -> tuple[Mapping[int, Learner], frozenset[int]]:
    """The learners after these donors are gone, and those of them whose offers have ended by it."""
    hurt = {g for g, known in learners.items() if known.offer and not set(gone).isdisjoint(known.offer.donors)}
    return {g: voided(known, False) if g in hurt else known for g, known in learners.items()}, frozenset(hurt)


def struck_off(state: State, groups: Iterable[int]) -> tuple[State, list[Action]]:
    """The state without those of the ``groups`` whose offers have ended too often, who are fenced: for good where each
    ended by other weights."""
    out = {g: state.learners[g] for g in sorted(groups) if state.learners[g].voids >= VOIDS_MAX}
    if not out:
        return state, []
    fences: list[Action] = [_struck_off(g, known) for g, known in out.items()]
    return replace(state, learners={g: known for g, known in state.learners.items() if g not in out}), fences


def _struck_off(group: int, known: Learner) -> SendFenced:
    why = f"group {group} could not be brought up to date: {known.voids} offers have ended"
    always = known.wrong == known.voids
    if always:
        why += ", each because it had computed other weights than the voted ones"
    return SendFenced(group, known.incarnation, why, lasting=always)


def disproved(state: State, digest: str) -> tuple[State, frozenset[int]]:
    """Compare what learners reported of the weights after t* with the ``digest`` on which all votes of t* + 1 agree.
    Returns the state in which the equal ones are proved and the offers of the others have ended, and the latter."""
    if not state.learners:
        return state, frozenset()
    learners, wrong = dict(state.learners), set()
    for group, known in state.learners.items():
        if known.applied != state.committed[0]:
            continue
        checked = compare(known, digest)
        if checked is None:
            wrong.add(group)
        learners[group] = checked or voided(known, True, wrong=True)
    return replace(state, learners=learners), frozenset(wrong)


def compare(known: Learner, digest: str) -> Learner | None:
    """A learner after the digest of the weights of its last applied step is known; None if its own is another. A state
    that it has only copied proves nothing, because a digest of weights does not cover the rest of the state."""
    if not digest or not known.weights_digest:
        return known
    if known.weights_digest != digest:
        return None
    own = known.offer is not None and known.applied > known.offer.step
    return replace(known, proved=True) if own else known


def admissible(state: State, digest: str) -> list[int]:
    """Learners that may be members of the epoch after the commit of t* + 1: proved, and in the state after t*. Where
    votes have no ``digest`` nothing can be compared. With state shards: those that are ready."""
    if state.job.state_shards:
        return sorted(group for group, known in state.learners.items() if known.ready)
    return sorted(
        group
        for group, known in state.learners.items()
        if known.applied == state.committed[0] and (known.proved or not digest)
    )


def last_resort(state: State, before: Mapping[int, Learner]) -> tuple[State, list[str]]:
    """Find hosts where a shard would have no live one, by what was known of learners ``before`` this record, which may
    end their offers: a proved learner that holds t*, who is a holder at once; else holders that adopt the shard; else a
    learner that could take an offer or has had one, also between two of them, who gets the pieces: a joiner, or, if it
    has said that it holds t*, a holder that votes compare."""
    if not state.learners and not state.job.adoption:
        return state, []
    words = []
    for shard in bare(state):
        there = state.where.hosts_of(shard)
        if any(group in state.live for group in there):
            continue
        learners = [group for group in there if group in state.learners]
        whole = [g for g in learners if before[g].proved and before[g].applied == state.committed[0]]
        able = [g for g in learners if before[g].formed]
        if whole:
            state = _called(state, whole[0])
            words.append(f"group {whole[0]}, which has caught up, is a member at once, because it hosts shard {shard}")
        elif chosen := adopters(state, shard):
            state = adopt(state, shard, chosen)
            words.append(f"{name_groups(sorted(chosen))} {'adopts' if len(chosen) == 1 else 'adopt'} shard {shard}")
        elif able:
            holds = state.learners[able[0]].applied == state.committed[0]
            state = _called(state, able[0], joiner=True)
            how = "joins with a state that votes have not compared" if holds else "joins before it has caught up"
            words.append(f"group {able[0]} {how}, because no other host of shard {shard} lives")
    return state, words


def _called(state: State, group: int, joiner: bool = False) -> State:
    known = state.learners[group]
    state = replace(state, live={**state.live, group: known.incarnation})
    if joiner and known.applied < state.committed[0]:
        return replace(state, learners={**state.learners, group: replace(known, ready=True)})
    return holding(state, group, proved=not joiner)


def holding(state: State, group: int, proved: bool) -> State:
    """The state in which a joiner is a holder; one that is not ``proved`` only until votes have compared it."""
    return replace(
        state,
        learners={other: known for other, known in state.learners.items() if other != group},
        holders=state.holders | {group},
        untried=state.untried if proved else state.untried | {group},
    )
