"""The states of a coordinator's machine as a graph: the real machine with the real encoding of the journal.

A :class:`Brain` is one state of :func:`spare_megatron.protocol.machine.step`. Machine states that differ only in
sentences for people, on which no decision depends, are the same brain. Each (brain, event) is decided once: the
invariants are checked, the record is encoded as in the journal and decoded, and the decoded event must lead to the same
decision. So, by induction, the replay of every journal that leads to a brain makes the same decisions.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from spare_megatron.coordinator import journal
from spare_megatron.protocol import codec, invariants, machine
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.state import Plan, Standing, State
from spare_megatron.protocol.transition import minority
from tests.explore.keep import Keeper, Kept

SENTENCES = frozenset({"outcome_reason", "spec", "placement"})
"""Fields of a state on which no decision depends, or which are the same in all states of a job."""


@dataclass(eq=False)
class Brain:
    """One state of the machine. Compared by identity: :class:`Brains` makes one for each state."""

    number: int
    state: State
    decided: dict[Kept[m.Event], Step] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class Step:
    """The result of one event in one state."""

    after: Brain
    reason: str
    """The decision's reason. It may be of another journal that led to the same brain."""
    words: tuple[Word, ...]
    final: bool
    """The record needs a confirmation before its actions are sent (``journal.is_final``)."""
    fenced: tuple[tuple[int, int, str], ...]
    """(group, incarnation, why) of groups that are fenced as 'diverged' or 'corrupt'."""
    accepted: tuple[m.AcceptSave, ...]
    against: frozenset[tuple[int, str]]
    """(step, digest) of weights against which the votes that were just counted speak."""
    gone: tuple[tuple[int, int], ...]
    """(group, incarnation) of those that the event loses, or that are fenced."""
    commit: m.SendCommit | None


@dataclass(frozen=True)
class Word:
    """One action for one group (``incarnation`` -1: for whichever is connected)."""

    group: int
    incarnation: int
    note: Kept[m.Action]
    process_nonce: str | None = None
    """That of a process that has no incarnation, and is fenced."""


class Brains:
    """Makes brains, and lets the machine decide."""

    def __init__(self, keeper: Keeper, forgetful: bool = False) -> None:
        """A ``forgetful`` one keeps no brains, and writes only some records as the journal does."""
        self._keep, self._forgetful = keeper.keep, forgetful
        self._known: dict[Hashable, Brain] = {}
        self.decisions = 0

    @property
    def states(self) -> frozenset[Hashable]:
        """A key for each state that was reached."""
        return frozenset(self._known)

    def of(self, state: State) -> Brain:
        """The brain of a state."""
        if self._forgetful:
            return Brain(-1, state)
        key = _frozen_state(state)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Brain(len(self._known), state)
        return found

    def step(self, brain: Brain, event: Kept[m.Event]) -> Step:
        """The result of ``event``; each brain and event is decided only once."""
        if self._forgetful:
            return self._step(brain.state, event.value)
        found = brain.decided.get(event)
        if found is None:
            found = brain.decided[event] = self._step(brain.state, event.value)
        return found

    def _step(self, state: State, event: m.Event) -> Step:
        self.decisions += 1
        after, decision = machine.step(state, event)
        invariants.check(state, event, after, decision)
        brain = self.of(after)
        if not self._forgetful:
            self._journal(state, event, decision, brain)
        old = isinstance(event, m.Vote) and event.result.ok and event.result.epoch < state.epoch
        assert not old or after == state or brain is self.of(state), (
            f"a vote of an older epoch changes the state: {decision.reason}"
        )
        wrong = tuple(
            (a.group, a.incarnation, a.reason)
            for a in decision.actions
            if isinstance(a, m.SendFenced) and (a.lasting or " diverged" in a.reason or " corrupt" in a.reason)
        )
        gone = tuple((a.group, a.incarnation) for a in decision.actions if isinstance(a, m.SendFenced))
        if isinstance(event, m.Lost):
            gone += tuple((loss.group, loss.incarnation) for loss in event.losses)
        return Step(
            brain,
            decision.reason,
            tuple(self._words(decision)),
            journal.is_final(event, decision, state.epoch),
            wrong,
            tuple(a for a in decision.actions if isinstance(a, m.AcceptSave)),
            _against(state, event),
            gone,
            next((a for a in decision.actions if isinstance(a, m.SendCommit)), None),
        )

    def _journal(self, state: State, event: m.Event, decision: m.Decision, after: Brain) -> None:
        """Assert that the record, encoded and decoded, leads to the same decision."""
        line = json.dumps([codec.encode_event(event), codec.encode_actions(decision.actions)])
        plain_event, plain_actions = json.loads(line)
        read = codec.decode_event(plain_event)
        assert read == event, f"{event} is read back as {read}"
        assert codec.decode_actions(plain_actions) == tuple(decision.actions), f"actions of {event} are read back wrong"
        again, repeated = machine.step(state, read)
        assert repeated == decision, f"replay of {event} decides {repeated}, recorded was {decision}"
        assert again == after.state or self.of(again) is after, f"replay of {event} leads to another state"

    def _words(self, decision: m.Decision) -> list[Word]:
        words = []
        for action in decision.actions:
            if isinstance(action, m.SendView):
                words.append(Word(action.view.group, action.view.incarnation, self._keep(replace(action, delay_s=0.0))))
            elif isinstance(action, m.SendCommit | m.SendStop):
                plain = replace(action, reason="") if isinstance(action, m.SendStop) else action
                words += [Word(group, -1, self._keep(plain)) for group in action.groups]
            elif isinstance(action, m.SendFenced):
                process_nonce = None if action.incarnation >= 0 else action.process_nonce
                words.append(
                    Word(action.group, action.incarnation, self._keep(replace(action, reason="")), process_nonce)
                )
            else:
                words.append(Word(action.group, action.incarnation, self._keep(action)))
        return words


def _against(state: State, event: m.Event) -> frozenset[tuple[int, str]]:
    """(step, digest) of weights against which a majority votes; none before all votes are there."""
    if not isinstance(event, m.Vote) or not event.result.ok or event.result.epoch != state.epoch:
        return frozenset()
    votes = {**state.votes, event.group: event}
    if votes.keys() != state.live.keys() or len({vote.result.weights_digest for vote in votes.values()}) == 1:
        return frozenset()
    suspects = minority({g: vote.result.weights_digest for g, vote in votes.items()}, state.is_independent) or ()
    return frozenset((state.committed[0], votes[group].result.weights_digest) for group in suspects)


PLAIN = frozenset({int, str, float, bool, type(None)})
_names: dict[type, tuple[str, ...]] = {}


def _frozen_state(state: State) -> Hashable:
    known = state.__dict__
    values = [known[name] for name in _names_of(State) if name not in SENTENCES and name != "leave"]
    frozen = [value if type(value) in PLAIN else _frozen(value) for value in values]
    return (*frozen, bool(state.leave))


def _frozen(value: Any) -> Hashable:
    """A hashable value that is equal for values between which the machine makes no difference."""
    kind = type(value)
    if kind in PLAIN:
        return value  # type: ignore[no-any-return]
    if kind is tuple or kind is list:
        return tuple([one if type(one) in PLAIN else _frozen(one) for one in value])
    if kind is frozenset or kind is set:
        return frozenset(value)
    if kind is Plan:
        owner = None if value.assignment is None else value.assignment.owner.tobytes()
        return owner, value.members, _frozen(value.added), value.patched, _frozen(value.left)
    if kind is Standing:
        return value.assignment.owner.tobytes(), value.assignment.slowness.tobytes(), value.live
    if kind is dict or isinstance(value, Mapping):
        return tuple([(key, _frozen(value[key])) for key in sorted(value)])
    assert is_dataclass(value), f"no key for {value!r}"
    return tuple([_frozen(getattr(value, name)) for name in _names_of(kind) if name != "detail"])


def _names_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass, looked up once."""
    if kind not in _names:
        _names[kind] = tuple(item.name for item in fields(kind))
    return _names[kind]
