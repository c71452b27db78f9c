"""What a leader makes of the words of its ranks as learners and as donors, and what it says again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spare_megatron.control_plane.group_aggregation import joined_digests
from spare_megatron.control_plane.learner_reports import LearnerReports
from spare_megatron.control_plane.reports import RankCaughtUp, RankReady, RankVoid, RankWithdrawn
from spare_megatron.protocol.learner import NO_OFFER
from spare_megatron.protocol.messages import CaughtUp, Ready, Void, Withdrawn
from spare_megatron.protocol.view import Offer, View

ME = (1, 4)
OFFER = Offer(ME, 7, 20, ((0, 0), (2, 0)))
LEARNS = View(1, 4, 3, 1, ((0, 0), (2, 0)), (20, 3), 21, (), ())
OFFERED = replace(LEARNS, offer=OFFER)
MEMBER = replace(LEARNS, epoch=4, live=((0, 0), ME, (2, 0)), committed=(22, 3), step=23)


def reports(view: View = LEARNS, ready: bool = True) -> LearnerReports:
    made = LearnerReports(ME, 2, 2)
    made.reported(view)
    if ready:
        for position in range(2):
            made.receive(position, RankReady())
    return made


def test_the_group_is_ready_when_its_last_rank_is() -> None:
    one = reports(ready=False)
    assert one.receive(1, RankReady()) is None
    assert one.receive(0, RankReady()) == Ready(*ME)


def test_it_is_ready_again_with_each_view_without_an_offer() -> None:
    """Also where an offer was made and has ended without a view that announced it."""
    one = reports()
    assert one.reported(replace(LEARNS, epoch=4)) == Ready(*ME)
    assert one.reported(OFFERED) is None
    assert list(one.again()) == []
    assert one.reported(LEARNS) == Ready(*ME)
    assert list(one.again()) == [Ready(*ME)]


def test_a_member_is_not_ready() -> None:
    one = reports()
    assert one.reported(MEMBER) is None
    assert list(one.again()) == []


def test_before_the_first_view_nobody_is_ready() -> None:
    one = LearnerReports(ME, 1, 1)
    assert one.receive(0, RankReady()) is None
    assert one.reported(LEARNS) == Ready(*ME)


def test_the_group_has_caught_up_when_its_last_rank_has() -> None:
    one = reports(OFFERED)
    assert one.receive(0, RankCaughtUp(7, 20, "a", row=0)) is None
    word = one.receive(1, RankCaughtUp(7, 20, "b", row=1))
    assert isinstance(word, CaughtUp)
    assert (word.number, word.step) == (7, 20)
    assert word.weights_digest not in ("", "a", "b")
    assert list(one.again()) == [word]
    assert one.reported(LEARNS) == Ready(*ME)
    assert list(one.again()) == [Ready(*ME)], "the offer has ended"


def test_the_digest_of_one_rank_is_never_that_of_the_group() -> None:
    """Rank 0's word for step 20 was lost with its connection."""
    one = reports(OFFERED)
    assert one.receive(1, RankCaughtUp(7, 20, "b", row=1)) is None
    assert one.receive(0, RankCaughtUp(7, 21, "c", row=0)) is None
    assert isinstance(one.receive(1, RankCaughtUp(7, 21, "d", row=1)), CaughtUp)


def test_one_rank_without_its_part_is_enough() -> None:
    one = reports(OFFERED)
    word = one.receive(1, RankVoid(7, "group 2 gave chunk 3 damaged"))
    assert word == Void(*ME, 7, "rank 1: group 2 gave chunk 3 damaged")
    assert one.receive(0, RankVoid(7, "the same")) is None
    assert list(one.again()) == [word]


@pytest.mark.parametrize("still_listed", [True, False])
def test_a_donor_that_serves_no_more_says_so_while_the_offer_is_listed(still_listed: bool) -> None:
    serving = replace(MEMBER, serves=(replace(OFFER, learner=(2, 1), donors=(ME,)),))
    one = reports(serving, ready=False)
    word = one.receive(0, RankWithdrawn(7, "it keeps too much"))
    assert word == Withdrawn(*ME, 7, "rank 0: it keeps too much")
    assert one.receive(1, RankWithdrawn(7, "it too")) is None
    one.reported(serving if still_listed else MEMBER)
    assert list(one.again()) == ([word] if still_listed else [])


def test_without_an_offer_a_group_that_was_sent_back_has_caught_up_anew() -> None:
    """Groups that keep only some state shards join without an offer (docs/protocol.md, rule 28)."""
    one, caught = reports(), CaughtUp(*ME, NO_OFFER, 22, joined_digests(["a", "b"]))
    assert one.reported(MEMBER) is None
    assert one.receive(0, RankCaughtUp(NO_OFFER, 22, "a")) is None
    assert one.receive(1, RankCaughtUp(NO_OFFER, 22, "b", 1)) == caught
    assert list(one.again()) == [caught]
    assert one.reported(replace(LEARNS, epoch=5, committed=(22, 3), step=23)) == Ready(*ME)
    assert list(one.again()) == [Ready(*ME)]
    assert one.reported(replace(MEMBER, epoch=6)) is None
    assert list(one.again()) == []
    assert one.receive(1, RankCaughtUp(NO_OFFER, 22, "b", 1)) is None
    assert one.receive(0, RankCaughtUp(NO_OFFER, 22, "a")) == caught
