"""How a leader turns the reports of its ranks into one report of its group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.control_plane.group_aggregation import (
    Ballots,
    MinOverRanks,
    Tally,
    first_part,
    joined_digests,
    merge_reports,
)
from spare_megatron.control_plane.reports import Reduced
from spare_megatron.protocol.messages import Link, ReductionResult

OK = Reduced(ReductionResult(step=5, epoch=2, ok=True, pieces=(1, 2)), (("reduce_s", 1.0),))


def unlike(**changes: Any) -> Reduced:
    """OK but for some of the result's fields."""
    return replace(OK, result=replace(OK.result, **changes))


def test_the_last_rank_makes_the_vote() -> None:
    ballots = Ballots(3, 1, 3)
    assert ballots.add(0, OK) is None
    assert ballots.add(0, OK) is None, "a rank that says it twice counts once"
    assert ballots.add(2, replace(OK, figures=(("reduce_s", 2.0), ("patch_s", 0.5)))) is None
    assert ballots.held is None
    ballot = ballots.add(1, OK)
    assert ballot is not None
    vote, figures = ballot
    assert (vote.group, vote.incarnation, vote.result.step, vote.result.epoch, vote.result.ok, vote.result.pieces) == (
        3,
        1,
        5,
        2,
        True,
        (1, 2),
    )
    assert figures == (("patch_s", 0.5), ("reduce_s", 2.0))
    assert ballots.held == (5, 2)
    assert ballots.add(1, OK) is None


def test_one_failure_is_the_groups_at_once() -> None:
    ballots = Ballots(3, 1, 3)
    ballots.add(0, OK)
    ballot = ballots.add(1, unlike(ok=False, links=(Link(2, 1),), detail="no answer"))
    assert ballot is not None
    assert (ballot[0].result.ok, ballot[0].result.links, ballot[0].result.pieces) == (False, (Link(2, 1),), ())
    assert "rank 1: no answer" in ballot[0].result.detail
    assert ballots.add(2, OK) is None
    assert ballots.held is None


def test_a_rank_with_several_rows_is_named_by_its_position() -> None:
    ballot = Ballots(0, 0, 3).add(2, unlike(ok=False, detail="no answer"), 1)
    assert ballot is not None
    assert ballot[0].result.detail == "rank 1: no answer"


def test_ranks_with_different_pieces_cannot_vote_ok() -> None:
    ballots = Ballots(0, 0, 2)
    ballots.add(0, OK)
    ballot = ballots.add(1, unlike(pieces=(1,)))
    assert ballot is not None
    assert not ballot[0].result.ok
    assert "different pieces (2, 1)" in ballot[0].result.detail


def test_checksums_of_a_piece_are_joined_in_order_of_position() -> None:
    def vote(*ranks: int) -> tuple[tuple[int, int], ...]:
        ballots = Ballots(0, 0, 2)
        ballots.add(1, unlike(audits=((7, ranks[1]),)))
        ballot = ballots.add(0, unlike(audits=((7, ranks[0]),)))
        assert ballot is not None
        assert ballot[0].result.ok
        return ballot[0].result.audits

    assert vote(1, 2)[0][0] == 7
    assert vote(1, 2) == vote(1, 2)
    assert len({vote(1, 2), vote(2, 1), vote(1, 3)}) == 3


def test_ranks_that_audited_different_pieces_cannot_vote_ok() -> None:
    ballots = Ballots(0, 0, 2)
    ballots.add(0, unlike(audits=((7, 1),)))
    ballot = ballots.add(1, OK)
    assert ballot is not None
    assert not ballot[0].result.ok


def test_results_of_an_older_epoch_or_step_are_dropped() -> None:
    ballots = Ballots(0, 0, 2)
    ballots.add(0, unlike(epoch=3))
    assert ballots.add(1, OK) is None
    assert ballots.add(1, unlike(epoch=3)) is not None
    assert ballots.add(0, unlike(epoch=3, step=6)) is None
    assert ballots.add(1, unlike(epoch=3)) is None
    assert ballots.add(1, unlike(epoch=3, step=6)) is not None


def test_a_newer_epoch_keeps_only_the_result_that_was_committed() -> None:
    for committed, kept in (((5, 2), (5, 2)), ((4, 2), None)):
        ballots = Ballots(0, 0, 1)
        ballots.add(0, OK)
        ballots.forget_older(3, committed)
        assert ballots.held == kept


def test_digests_of_the_ranks_become_one() -> None:
    def digest(first: str, second: str) -> str:
        ballots = Ballots(0, 0, 2)
        ballots.add(1, unlike(weights_digest=second))
        ballot = ballots.add(0, unlike(weights_digest=first))
        assert ballot is not None
        return ballot[0].result.weights_digest

    assert digest("", "") == ""
    assert digest("a", "b") == digest("a", "b") != digest("b", "a")


def test_parts_of_digests_become_one_each() -> None:
    first, plus, second = joined_digests(["a+x", "b+y"]).partition("+")
    assert plus
    assert first == joined_digests(["a", "b"]) == first_part(joined_digests(["a+z", "b+y"]))
    assert second == joined_digests(["x", "y"]) != joined_digests(["z", "y"])
    assert joined_digests(["a+x"]) == "a+x"
    assert joined_digests(["a", "b+y"]) != joined_digests(["a+y", "b"])


def test_a_roll_moves_with_the_slowest() -> None:
    least = MinOverRanks(2, -1)
    assert not least.add(0, 7)
    assert least.add(1, 5)
    assert least.reached == 5
    assert not least.add(1, 3), "a word that comes late takes nothing back"
    assert least.add(1, 7)
    assert least.reached == 7


def test_the_lowest_position_that_knows_a_figure_is_believed() -> None:
    assert merge_reports({1: {"loss": 2.0, "lr": 0.1}, 0: {"lr": 0.2}}) == {"loss": 2.0, "lr": 0.2}


def test_a_group_is_as_far_as_its_slowest_rank_and_says_each_thing_once() -> None:
    tally = Tally(2)
    assert tally.add(0, 1, 1, False) == (False, False)
    assert tally.add(1, 1, 1, False) == (True, False)
    assert tally.add(1, 1, 1, False) == (False, False)
    assert tally.add(1, 1, 2, True) == (False, False)
    assert tally.add(0, 1, 2, True) == (True, True), "the segment is complete"
    assert tally.add(0, 1, 2, True) == (False, False)
    assert tally.add(0, 1, 3, False) == (False, False)
    assert tally.add(1, 1, 3, True) == (True, False), "a patch goes on from there"
    assert tally.add(0, 2, 0, False) == (False, False), "a step without a piece yet is no news"
    assert tally.add(1, 2, 0, True) == (False, False)
    assert tally.add(0, 2, 0, True) == (True, True), "a group without pieces is complete as well"


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.booleans())))
def test_a_tally_is_what_counting_all_ranks_each_time_gives(size: int, words: list[tuple[int, int, int, bool]]) -> None:
    tally, ranks = Tally(size), [(0, 0, False)] * size
    reported, newest = (0, 0, False), 0
    for position, step, pieces, complete in words:
        ranks[position % size] = (step, pieces, complete)
        newest = max(newest, step)
        done = min(count if at == newest else 0 for at, count, _ in ranks)
        now = (newest, done, all(one[0] == newest and one[2] for one in ranks))
        risen = now > reported and now[1:] > (0, False)
        reported = max(now, reported)
        assert tally.add(position % size, step, pieces, complete) == (risen, risen and now[2])
        assert (tally.step, tally.done) == (newest, done)
