"""Invariants are found violated where a rule does not do its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from spare_megatron.protocol import invariants, machine
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.state import Plan, State
from spare_megatron.protocol.transition import Transition, ignore
from tests.pure.scenario import FOLDER, run
from tests.pure.scripted_job import ScriptedJob


def test_joiners_that_are_waited_for_when_their_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._RULES, m.JoinersLate, lambda state, event: ignore(state, "they may come yet"))
    with pytest.raises(invariants.InvariantError, match=r"is over and joiners \[2\] are waited for"):
        run((FOLDER / "joiners_that_are_late.txt").read_text())


def less(action: m.Action) -> m.Action:
    """A commit that leaves its last group out; any other action as it is."""
    return replace(action, groups=action.groups[:-1]) if isinstance(action, m.SendCommit) else action


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda actions: [one for one in actions if not isinstance(one, m.SendCommit)], "with 0 commits sent"),
        (lambda actions: [*actions, *(one for one in actions if isinstance(one, m.SendCommit))], "with 2 commits sent"),
        (lambda actions: [less(one) for one in actions], "commit went to .*, the live set was"),
    ],
    ids=["nobody has it", "all have it twice", "one has it not"],
)
def test_commits_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Sequence[m.Action]], list[m.Action]], sentence: str
) -> None:
    right = machine._RULES[m.Vote]

    def rule(state: State, event: m.Vote) -> Transition:
        after, decision = right(state, event)
        return after, replace(decision, actions=tuple(wrong(decision.actions)))

    monkeypatch.setitem(machine._RULES, m.Vote, rule)
    with pytest.raises(invariants.InvariantError, match=sentence):
        run((FOLDER / "joiners_that_are_late.txt").read_text())


def with_piece_at(state: State, piece: int, group: int) -> State:
    """A state in whose plan a group has one piece that another one had."""
    plan = state.plan
    owner = next(one for one in state.live if piece in plan.pieces(one))
    left, added = {owner: frozenset({piece})}, {group: ((piece,),)}
    return replace(state, plan=Plan(plan.assignment, plan.members, added, left=left))


def test_plans_that_are_wrong() -> None:
    """A piece that is there twice, or at a group that does not host it, or that moves within an epoch; pieces that are
    counted wrongly; a plan of a group that is not live."""
    job = ScriptedJob()
    state, plan = job.state, job.state.plan
    piece = plan.pieces(0)[0]
    shard = piece // state.job.pieces_per_shard
    host, stranger = (
        next(group for group in state.live if group and (shard in state.where.stack_of(group)) is there)
        for there in (True, False)
    )
    invariants._plans(state)
    invariants._plans(with_piece_at(state, piece, host))
    with pytest.raises(invariants.InvariantError, match=f"compute shards .{shard}. which it does not host"):
        invariants._plans(with_piece_at(state, piece, stranger))
    with pytest.raises(invariants.InvariantError, match="is no longer a prefix of the new one"):
        invariants._growth(state, m.Opened(state.job, 1, 1), with_piece_at(state, piece, host))
    twice = Plan(plan.assignment, plan.members, {host: ((piece,),)})
    with pytest.raises(invariants.InvariantError, match="are no partition of the batch"):
        invariants._plans(replace(state, plan=twice))
    more = Plan(plan.assignment, (*plan.members, 9))
    with pytest.raises(invariants.InvariantError, match=r"plans for \[0, 1, 2, 3, 9\], live are \[0, 1, 2, 3\]"):
        invariants._plans(replace(state, plan=more))
    counted = Plan(plan.assignment, plan.members)
    counted.loads = lambda: plan.loads() + 1  # type: ignore[method-assign]
    with pytest.raises(invariants.InvariantError, match="groups are counted as"):
        invariants._plans(replace(state, plan=counted))
