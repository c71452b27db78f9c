"""Random walks find the holes that were once in the decisions: each is put back, and one walk of a fixed seed finds
it.

The same walk finds nothing in the code as it is. (A hang behind the last commit, a donor that a joiner hides, an
offer that is given up in the training thread, and a checkpoint between its acceptance and its name are not in the
machine and the member, so no walk can see them.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from spare_megatron.controller import audits, machine, offers, saves, voting
from spare_megatron.controller.learner import Learner
from spare_megatron.controller.messages import Action
from spare_megatron.controller.state import State
from spare_megatron.controller.transition import Transition
from spare_megatron.controller.view import MemberId
from tests.explore.shapes import WALKS
from tests.explore.walker import Walker

Patch = pytest.MonkeyPatch


def finds(patch: Patch, shape: str, number: int, what: str) -> None:
    """Assert that one walk finds a violation that matches ``what``, and, without the patch, none."""
    found = Walker(WALKS[shape], "mutants").walk(number)
    assert found is not None, "the walk finds nothing"
    assert re.search(what, found.what), found.what
    patch.undo()
    assert Walker(WALKS[shape], "mutants").walk(number) is None, "the walk finds something in the code as it is"


def by_number_witness(patch: Patch) -> None:
    patch.setattr(State, "is_witness", lambda state, group: any(group == known for known, _ in state.witnesses))


def opinions_by_number(patch: Patch) -> None:
    def heard(known: dict[MemberId, int], member: MemberId, checksum: int) -> int:
        older = next((one for one in known if one[0] == member[0]), member)
        return known.setdefault(older, checksum)

    patch.setattr(audits, "_heard", heard)


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


def nothing_is_said_to_the_older(patch: Patch) -> None:
    def silent(outcome: Transition, before: list[Action]) -> Transition:
        return outcome

    patch.setattr(machine, "with_actions", silent)


def early_witness(patch: Patch) -> None:
    patch.setattr(voting, "_witnesses", lambda state: frozenset(state.live.items()))


def a_vote_that_is_lost_with_its_saver(patch: Patch) -> None:
    patch.setattr(voting, "_noted", lambda state, event: state)


def nobody_is_called_when_all_are_lost(patch: Patch) -> None:
    real = offers.last_resort

    def last_resort(state: State, before: Mapping[int, Learner]) -> tuple[State, list[str]]:
        return real(state, before) if state.live else (state, [])

    patch.setattr(offers, "last_resort", last_resort)


MUTANTS = {
    "early": early_witness,
    "said": a_vote_that_is_lost_with_its_saver,
    "last": nobody_is_called_when_all_are_lost,
    "witnesses": by_number_witness,
    "opinions": opinions_by_number,
    "saver": saver_by_number,
    "offers": between_two_offers,
    "older": nothing_is_said_to_the_older,
}
