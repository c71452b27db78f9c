"""What random walks have found in the decisions is put back, and the judge must see it; two walks find it anew.

The moves are those of a walk that found it, shortened; in the code as it is they lead to nothing. (A hang behind the
last commit, a donor that a joiner hides, an offer that is given up in the training thread, and a checkpoint between
its acceptance and its name are not in the machine and the member, so no walk can see them.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from spare_megatron.protocol import audits, machine, offers, saves, voting
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.messages import Action
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition
from spare_megatron.protocol.view import MemberId
from tests.explore.shapes import WALKS
from tests.explore.walker import Finding, Walker, repeat, shorten

Patch = pytest.MonkeyPatch


Mutant = Callable[[Patch], None]


def independent_by_number(patch: Patch) -> None:
    patch.setattr(State, "is_independent", lambda state, group: any(group == known for known, _ in state.independent))


def opinions_by_number(patch: Patch) -> None:
    def received(known: dict[MemberId, int], member: MemberId, checksum: int) -> int:
        older = next((one for one in known if one[0] == member[0]), member)
        return known.setdefault(older, checksum)

    patch.setattr(audits, "_received", received)


def saver_by_number(patch: Patch) -> None:
    real = saves.order

    def order(state: State, endangered: frozenset[MemberId]) -> int:
        group = -1 if state.saver is None else state.saver[0]
        same = replace(state, saver=(group, state.live[group])) if group in state.live else state
        return real(same, endangered)

    patch.setattr(saves, "order", order)


def between_two_offers(patch: Patch) -> None:
    real = offers.last_resort

    def last_resort(state: State, before: Mapping[int, Learner]) -> tuple[State, list[str]]:
        near = {g: replace(one, formed=one.ready or one.offer is not None) for g, one in before.items()}
        return real(state, near)

    patch.setattr(offers, "last_resort", last_resort)


def older_gets_no_message(patch: Patch) -> None:
    def silent(outcome: Transition, before: list[Action]) -> Transition:
        return outcome

    patch.setattr(machine, "with_actions", silent)


def early_independence(patch: Patch) -> None:
    patch.setattr(voting, "_independent", lambda state: frozenset(state.live.items()))


def a_vote_that_is_lost_with_its_saver(patch: Patch) -> None:
    patch.setattr(voting, "_noted", lambda state, event: state)


def nobody_is_called_when_all_are_lost(patch: Patch) -> None:
    real = offers.last_resort

    def last_resort(state: State, before: Mapping[int, Learner]) -> tuple[State, list[str]]:
        return real(state, before) if state.live else (state, [])

    patch.setattr(offers, "last_resort", last_resort)


FOUND: dict[str, tuple[Mutant, str, str, str]] = {
    "a joiner in the place of an independent member is one": (
        independent_by_number,
        "four groups",
        "compute 2; compute 3; compute 1; compute 0; reduce 2; reduce 3; say 2; say 3; reduce 0; reduce 1; "
        "say 0; damage 0; say 1; hear 2; apply 2; hear 0; kill 3; lose 3; hear 2; hear 0; apply 0; return 3; "
        "say 3.-1; hear 3.-1; say 3.1; hear 0; hear 3.1; kill 1; lose 1; hear 2; compute 2; hear 3.1; hear 0; "
        "learn 3.1; compute 3.1; say 3.1; compute 0; reduce 2; say 2; reduce 3.1; say 3.1; reduce 0; say 0; "
        "hear 2; compute 2; hear 3.1; compute 3.1; hear 0; compute 0; reduce 2; say 2; reduce 3.1; say 3.1; "
        "reduce 0; say 0",
        r"innocent group 2.0 is fenced",
    ),
    "a joiner is independent before it has weights of its own": (
        early_independence,
        "four groups",
        "kill 2; lose 2; hear 1; return 2; say 2.-1; hear 2.-1; say 2.1; hear 2.1; cut 3; damage 1; connect "
        "3; kill 0; lose 0; hear 2.1; hear 1; compute 1; say 3; hear 3; learn 2.1; compute 2.1; say 2.1; "
        "compute 3; reduce 1; say 1; reduce 2.1; say 2.1; reduce 3; say 3; hear 2.1; hear 1; apply 2.1; apply "
        "1; compute 1; compute 2.1; hear 3; apply 3; compute 3; reduce 2.1; say 2.1; reduce 1; say 1; reduce "
        "3; say 3; hear 2.1; hear 1; compute 1; compute 2.1; hear 3; compute 3; reduce 2.1; reduce 1; say "
        "2.1; say 1; reduce 3; say 3",
        r"innocent group 3.0 is fenced",
    ),
    "a learner between two offers is no last resort": (
        between_two_offers,
        "four groups",
        "drain 2; hear 3; hear 2; compute 3; hear 0; hear 1; compute 2; compute 1; compute 0; reduce 3; say "
        "3; reduce 1; say 1; reduce 2; say 2; reduce 0; say 0; hear 3; hear 3; apply 3; return 2; say 2.-1; "
        "hear 2.-1; say 2.1; hear 3; withdraw 3 from 1; say 3; kill 0; lose 0",
        r"wiped out and need not be",
    ),
    "nobody is called when the last member is lost": (
        nobody_is_called_when_all_are_lost,
        "three groups, all on all",
        "kill 2; kill 0; restart; lose 0; lose 2; connect 1; say 1; hear 1; compute 1; return 0; say 0.-1; "
        "hear 0.-1; say 0.1; hear 0.1; hear 1; reduce 1; learn 0.1; say 0.1; say 1; hear 0.1; hear 1; apply "
        "1; compute 1; reduce 1; learn 0.1; say 1; hear 1; hear 0.1; say 0.1; apply 1; learn 0.1; say 0.1; "
        "suspect 1",
        r"wiped out and need not be: group 1 silent",
    ),
    "a vote that is lost with its saver says nothing": (
        a_vote_that_is_lost_with_its_saver,
        "four groups, all on all",
        "kill 0; lose 0; hear 1; hear 2; hear 3; compute 1; compute 2; compute 3; reduce 3; reduce 1; say 1; "
        "say 3; reduce 2; damage 1; say 2; hear 2; apply 2; compute 2; hear 1; hear 3; apply 1; apply 3; "
        "compute 1; saved 1; compute 3; say 1; reduce 1; say 1; stall 1; kill 2; hear 3; err 3 piece; lose 2; "
        "hear 3; compute 3; reduce 3; say 3",
        r"a checkpoint of step 1 counts, its weights are '1 damaged in 1'",
    ),
    "the older of two incarnations receives nothing": (
        older_gets_no_message,
        "three groups",
        "say 0; twin 0; say 0.1",
        r"nobody tells it",
    ),
    "a successor has saved what its predecessor owed": (
        saver_by_number,
        "four groups",
        "compute 0; compute 1; compute 2; compute 3; reduce 0; reduce 1; reduce 2; reduce 3; say 0; say 1; "
        "say 2; say 3; hear 0; hear 1; hear 2; hear 3; apply 0; apply 1; apply 2; apply 3; compute 0; compute "
        "1; compute 2; compute 3; reduce 0; reduce 1; reduce 2; reduce 3; say 0; say 1; say 2; say 3; hear 1; "
        "hear 2; hear 3; apply 1; apply 2; apply 3; kill 0; lose 0; hear 1; hear 2; hear 3; return 0; say "
        "0.-1; hear 0.-1; say 0.1; hear 1; hear 2; hear 0.1; kill 2; lose 2; hear 0.1; hear 1; hear 3; learn "
        "0.1; say 0.1; compute 0.1; compute 1; compute 3; reduce 0.1; reduce 1; reduce 3; say 0.1; say 1; say "
        "3",
        r"was to save step 2, is lost",
    ),
    "a successor has the opinions of its predecessor": (
        opinions_by_number,
        "four groups, each shard on three",
        "compute 0; err 1 piece; compute 2; compute 3; reduce 0; reduce 1; reduce 2; reduce 3; say 0; say 1; "
        "say 2; say 3; hear 0; hear 1; hear 2; hear 3; kill 1; lose 1; hear 0; hear 2; hear 3; return 1; say "
        "1.-1; hear 1.-1; say 1.1; hear 2; hear 3; hear 1.1; kill 2; kill 3; lose them; hear 0; hear 1.1; "
        "learn 1.1; say 1.1; compute 0; compute 1.1; reduce 0; reduce 1.1; say 0; say 1.1; hear 0; hear 1.1; "
        "compute 0; compute 1.1; reduce 0; reduce 1.1; say 0; say 1.1",
        r"innocent group 1.1 is fenced",
    ),
}
"""What it is -> (how it is put back, shape, the moves of a walk that found it, what the judge says)."""


@pytest.mark.parametrize("name", FOUND)
def test_the_judge_sees_what_walks_have_found(monkeypatch: Patch, name: str) -> None:
    mutant, shape, moves, what = FOUND[name]
    sought = Finding("", moves.split("; "), replace(WALKS[shape], observed=True), "")
    mutant(monkeypatch)
    found = repeat(sought, sought.moves)
    assert found is not None, "the moves lead to no violation"
    assert re.search(what, found.what), found.what
    assert found.moves == sought.moves, "not all moves are possible"
    monkeypatch.undo()
    assert repeat(sought, sought.moves) is None, "the judge finds something in the code as it is"


@pytest.mark.parametrize(
    ("mutant", "shape", "number", "what"),
    [
        (older_gets_no_message, "three groups", 849, "nobody tells it"),
        (between_two_offers, "four groups", 701, "wiped out and need not be"),
    ],
)
def test_a_walk_of_a_fixed_seed_finds_it(
    monkeypatch: Patch, mutant: Mutant, shape: str, number: int, what: str
) -> None:
    mutant(monkeypatch)
    found = Walker(WALKS[shape], "mutants").walk(number)
    assert found is not None, "the walk finds nothing"
    assert re.search(what, found.what), found.what
    shorter = shorten(found, 20.0)
    assert len(shorter.moves) <= len(found.moves)
    assert re.search(what, shorter.what), shorter.what
    monkeypatch.undo()
    assert Walker(WALKS[shape], "mutants").walk(number) is None, "the walk finds something in the code as it is"
