"""The explorer finds bugs that are put into the machine, the member, the leader's ballots and the journal's encoding.

The first five are bugs that the explorer once found in the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.control_plane.group_aggregation import Ballots
from spare_megatron.coordinator import journal
from spare_megatron.protocol import (
    codec,
    draining,
    ending,
    invariants,
    learning,
    machine,
    member,
    membership,
    offers,
    standing,
    transition,
    voting,
)
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.state import Plan, Standing, State
from spare_megatron.protocol.transition import Transition
from spare_megatron.protocol.view import View
from tests.explore.model import Model
from tests.explore.search import CounterexampleError, Explorer
from tests.explore.shape import Shape
from tests.explore.shapes import PLAIN
from tests.pure.scenario import FOLDER, run

pytestmark = pytest.mark.timeout(600)
"""An exploration computes for up to a minute, and beside other work for longer."""

Patch = pytest.MonkeyPatch
CUT = Shape(faults=1, kinds=frozenset({"cut"}))
LOSS = Shape(faults=1, kinds=frozenset({"suspect"}))
RETURN = Shape(faults=2, kinds=frozenset({"kill", "return"}), save_every=1)
BACK = Shape(steps=5, faults=2, kinds=frozenset({"kill", "return"}), formed=True)
RESORT = PLAIN["three groups, each shard on two, a learner called as the last resort"]


def finds(shape: Shape, what: str) -> None:
    """Assert that the explorer finds a violation whose message matches ``what``, and prints the moves."""
    with pytest.raises(CounterexampleError, match=what) as found:
        Explorer(Model(shape)).explore()
    assert found.value.moves
    assert f"play it: {found.value.moves[0]}" in str(found.value)


def after_step(patch: Patch, change: Callable[[State, m.Event, State, m.Decision], Transition]) -> None:
    """Replace the machine by one whose results ``change`` has changed."""
    decide = machine.step

    def step(state: State, event: m.Event) -> Transition:
        return change(state, event, *decide(state, event))

    patch.setattr(machine, "step", step)


def test_a_newcomer_that_ends_the_job_and_is_not_notified(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "_answered", lambda outcome, group: outcome)
    finds(RETURN, "does not end from here")


def test_a_late_save_that_replaces_a_newer_one(monkeypatch: Patch) -> None:
    """It takes two savers, the newer of which is back, and so more steps than a mutation is worth to explore: the
    golden scenario finds it."""

    def counted(state: State, event: m.Saved | None) -> transition.Counted:
        after, accepts, why = real(state, event)
        return (after if event is None else replace(after, unproved=None)), accepts, why

    real, text = transition.counted, (FOLDER / "late_save_of_an_older_step.txt").read_text()
    assert run(text) == text
    monkeypatch.setattr(ending, "counted", counted)
    assert run(text) != text


def test_a_checkpoint_that_counts_although_votes_spoke_against_it(monkeypatch: Patch) -> None:
    for module in (membership, ending):
        monkeypatch.setattr(module, "without", lambda unproved, accused: unproved)
    after_step(monkeypatch, lambda before, event, after, decision: (replace(after, accused=frozenset()), decision))
    shape = Shape(3, 1, faults=1, kinds=frozenset({"damage"}), save_every=1, formed=True)
    finds(shape, "counts although votes spoke against|its weights are '1 damaged in")


def test_a_good_checkpoint_that_is_thrown_away_with_its_group(monkeypatch: Patch) -> None:
    def change(before: State, event: m.Event, after: State, decision: m.Decision) -> Transition:
        gone = after.unproved is not None and after.unproved.group not in after.live
        return (replace(after, unproved=None) if gone else after), decision

    after_step(monkeypatch, change)
    finds(Shape(faults=2, kinds=frozenset({"suspect"}), save_every=1), "nothing speaks against the checkpoint")


def test_a_commit_that_only_one_group_has_seen_and_does_not_tell(monkeypatch: Patch) -> None:
    """A group that receives a commit which the journal does not have sends Hello before it applies it, and waits for
    ever."""
    real = machine.step
    monkeypatch.setattr(
        machine, "step", lambda state, e: real(state, replace(e, committed=None) if isinstance(e, m.Hello) else e)
    )
    shape = Shape(steps=1, faults=1, kinds=frozenset({"takeover"}), late_finals=True)
    finds(shape, "does not end from here")


def test_shares_by_speed_that_no_view_says(monkeypatch: Patch) -> None:
    """Groups would begin the next step by the old shares, and their votes would be those of another plan."""

    def change(before: State, event: m.Event, after: State, decision: m.Decision) -> Transition:
        if not isinstance(event, m.SpeedsMeasured) or not after.share_anew:
            return after, decision
        drawn = standing.draw_standing(after, tuple(sorted(after.live)))
        assert isinstance(drawn, Standing)
        return replace(after, standing=drawn, share_anew=False), decision

    after_step(monkeypatch, change)
    shape = Shape(pieces=2, faults=1, kinds=frozenset({"speeds"}), formed=True)
    finds(shape, "the steady-state assignment changed inside epoch")
    monkeypatch.setattr(invariants, "_standing", lambda before, after: None)
    finds(shape, "which are not the|is fenced|diverged")


def test_a_member_whose_last_commit_goes_back(monkeypatch: Patch) -> None:
    def take_view(orders: member.Orders, view: View, *store: str) -> tuple[member.Orders, member.Change]:
        known = orders.view
        older = view.epoch > known.epoch and view.committed[0] < known.committed[0]
        back = replace(orders, view=replace(known, committed=view.committed))
        return real(back if older else orders, view, *store)

    real = member.take_view
    monkeypatch.setattr(member, "take_view", take_view)
    decide = machine.step
    monkeypatch.setattr(
        machine, "step", lambda state, e: decide(state, replace(e, committed=None) if isinstance(e, m.Hello) else e)
    )
    shape = Shape(faults=2, kinds=frozenset({"takeover", "standstill"}), late_finals=True, formed=True)
    finds(shape, "knew commit")


def test_votes_that_are_kept_in_a_new_epoch(monkeypatch: Patch) -> None:
    def change(before: State, event: m.Event, after: State, decision: m.Decision) -> Transition:
        again = after.epoch > before.epoch and after.committed == before.committed and after.phase == "running"
        votes = {group: vote for group, vote in before.votes.items() if group in after.live}
        return (replace(after, votes=votes) if again else after), decision

    after_step(monkeypatch, change)
    finds(LOSS, "a vote for .* counts in|is to apply")


def test_a_vote_of_an_older_epoch_that_counts(monkeypatch: Patch) -> None:
    real = voting.vote

    def vote(state: State, event: m.Vote) -> Transition:
        result = replace(event.result, epoch=max(event.result.epoch, state.epoch))
        return real(state, replace(event, result=result) if result.ok else event)

    monkeypatch.setitem(machine._RULES, m.Vote, vote)
    finds(Shape(faults=1, kinds=frozenset({"fail"}), formed=True), "a vote of an older epoch changes the state")


def test_a_save_that_counts_before_its_weights_are_compared(monkeypatch: Patch) -> None:
    monkeypatch.setitem(
        machine._RULES, m.Saved, lambda state, event: transition.decide(*transition.counted(state, event))
    )
    finds(Shape(faults=0, save_every=1), "counts before its weights were compared")


def test_a_joiner_that_is_taken_for_a_holder(monkeypatch: Patch) -> None:
    def change(before: State, event: m.Event, after: State, decision: m.Decision) -> Transition:
        learners = {group: known for group, known in after.learners.items() if group not in after.live}
        return replace(after, learners=learners, holders=after.holders | after.joiners), decision

    after_step(monkeypatch, change)
    finds(BACK, "joins as a holder")


def test_an_offer_that_is_made_where_no_donor_need_learn_of_it(monkeypatch: Patch) -> None:
    real = learning.ready

    def ready(state: State, event: m.Ready) -> Transition:
        after, decision = real(state, event)
        views = [action for action in decision.actions if isinstance(action, m.SendView)]
        return after, replace(decision, actions=[one for one in views if one.view.group == event.group])

    monkeypatch.setitem(machine._RULES, m.Ready, ready)
    finds(BACK, "is made or kept where its donors need not learn of it")


def test_an_offer_whose_donors_learn_of_it_after_the_next_step(monkeypatch: Patch) -> None:
    """A commit that does not list what was offered since the step began: the copy would be of another state."""
    real = voting.vote

    def vote(state: State, event: m.Vote) -> Transition:
        after, decision = real(state, event)
        reported = [replace(one, serves=()) if isinstance(one, m.SendCommit) else one for one in decision.actions]
        return after, replace(decision, actions=reported)

    monkeypatch.setitem(machine._RULES, m.Vote, vote)
    finds(BACK, "is made or kept where its donors need not learn of it")


def test_an_offer_that_outlives_its_donor(monkeypatch: Patch) -> None:
    monkeypatch.setattr(offers, "without_donors", lambda learners, gone: (learners, frozenset()))
    finds(RESORT, "a donor of offer 1 is gone")


def test_a_learner_that_is_admitted_without_a_proof(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        offers,
        "admissible",
        lambda state, digest: [g for g, known in state.learners.items() if known.applied == state.committed[0]],
    )
    finds(BACK, "joins and its state was never compared")


@pytest.mark.full
def test_a_last_resort_that_is_not_taken(monkeypatch: Patch) -> None:
    """The explorer counts how often a job is wiped out; without the last resort it is more often."""
    model = Model(RESORT)
    with_it = Explorer(model).explore().ends
    monkeypatch.setattr(offers, "last_resort", lambda state, before: (state, []))
    assert with_it["finished"] > Explorer(Model(RESORT)).explore().ends["finished"]


def test_a_group_that_is_back_in_the_step_in_which_it_was_lost_and_gets_its_old_share(monkeypatch: Patch) -> None:
    def grown(plan: Plan, members: tuple[int, ...], *more: Any) -> Plan:
        after = real(plan, members, *more)
        after.patched = after.patched.difference(members)
        return after

    real = Plan.grown
    monkeypatch.setattr(Plan, "grown", grown)
    finds(RESORT, "no partition of the batch")


def test_a_member_that_does_not_vote_again_when_it_is_asked_to(monkeypatch: Patch) -> None:
    def take_view(orders: member.Orders, view: View, *store: str) -> tuple[member.Orders, member.Change]:
        reported, change = real(orders, view, *store)
        return reported, member.Change.NONE if change is member.Change.SAME else change

    real = member.take_view
    monkeypatch.setattr(member, "take_view", take_view)
    finds(CUT, "does not end from here")


def test_a_leader_that_forgets_the_result_of_the_last_commit(monkeypatch: Patch) -> None:
    def forget(ballots: Ballots, epoch: int, committed: tuple[int, int]) -> None:
        ballots.last = None

    monkeypatch.setattr(Ballots, "forget_older", forget)
    finds(Shape(3, 3, faults=2, kinds=frozenset({"cut", "kill"}), formed=True, steps=1), "an innocent group is fenced")


def test_a_coordinator_that_was_replaced_and_throws_out_a_member(monkeypatch: Patch) -> None:
    real = journal.is_final
    monkeypatch.setattr(
        journal,
        "is_final",
        lambda event, decision, epoch: (
            real(event, decision, epoch) and not all(isinstance(a, m.SendFenced) for a in decision.actions)
        ),
    )
    finds(Shape(faults=2, kinds=frozenset({"takeover", "suspect"})), "throws out group")


SLOW = Shape(3, 3, steps=1, faults=3, kinds=frozenset({"slow", "cut"}), each=(("cut", 1),), formed=True)


def test_pieces_that_move_before_all_have_answered_and_without_an_epoch(monkeypatch: Patch) -> None:
    def change(before: State, event: m.Event, after: State, decision: m.Decision) -> Transition:
        given = after.relief.given
        moved = isinstance(event, m.GaveBack) and given != before.relief.given and any(given.values())
        return (replace(after, plan=after.plan.without(given)) if moved else after), decision

    after_step(monkeypatch, change)
    finds(SLOW, "no partition of the batch")


@pytest.mark.full
def test_an_ask_that_a_reconnected_group_is_not_notified_again(monkeypatch: Patch) -> None:
    """Its answer is known already, and so it begins what it has given back."""
    real = State._view
    monkeypatch.setattr(State, "_view", lambda *args: replace(real(*args), ask=None))
    finds(SLOW, "an innocent group is fenced")


def test_a_group_that_votes_before_what_it_gave_back_has_moved(monkeypatch: Patch) -> None:
    real = machine.step
    quiet = lambda state, e: isinstance(e, m.GaveBack) and len(state.relief.given) + 1 == len(state.relief.asked)  # noqa: E731
    monkeypatch.setattr(
        machine,
        "step",
        lambda state, e: (
            transition.ignore(replace(state), "an answer is not received") if quiet(state, e) else real(state, e)
        ),
    )
    finds(replace(SLOW, faults=1), "does not end from here")


def test_a_journal_that_loses_part_of_an_event(monkeypatch: Patch) -> None:
    def encode(event: m.Event) -> dict[str, Any]:
        return {name: value for name, value in real(event).items() if name != "held"}

    real = codec.encode_event
    monkeypatch.setattr(codec, "encode_event", encode)
    finds(CUT, "is read back as")


def test_a_machine_that_remembers_what_no_journal_holds(monkeypatch: Patch) -> None:
    seen: list[m.Event] = []

    def change(before: State, event: m.Event, after: State, decision: m.Decision) -> Transition:
        seen.append(event)
        return after, replace(decision, reason=f"{decision.reason}, decision {len(seen)}")

    after_step(monkeypatch, change)
    with pytest.raises(AssertionError, match="replay of"):
        Explorer(Model(CUT)).explore()


@pytest.mark.parametrize("undo", [False, True])
def test_a_wish_of_an_operator_that_the_launcher_may_take_back(monkeypatch: Patch, undo: bool) -> None:
    def mixed_up(state: State, event: m.DrainRequested) -> tuple[frozenset[int], frozenset[int]]:
        return real(state, event if event.undo != undo else replace(event, for_now=not undo))

    real = draining.wanted
    monkeypatch.setattr(draining, "wanted", mixed_up)
    what = "are so no more" if undo else "the launcher may take that back"
    finds(PLAIN["two groups, one goes home, which an operator drains"], what)
