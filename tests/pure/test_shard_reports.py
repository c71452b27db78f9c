"""What a leader makes of its ranks' words on adopted shards, and what it says again."""

from __future__ import annotations

from dataclasses import replace

from spare_megatron.control_plane.reports import RankOpened
from spare_megatron.control_plane.shard_reports import ShardReports
from spare_megatron.protocol.messages import Hosts
from spare_megatron.protocol.view import View

ME = (1, 4)
ADOPTS = View(1, 4, 3, 1, ((0, 0), ME), (20, 3), 21, ((5,),), (), adopts=((7, 0),))
OPEN, SHUT = Hosts(*ME, 7, True), Hosts(*ME, 7, False, "rank 1: no such file")


def reports(view: View = ADOPTS) -> ShardReports:
    made = ShardReports(ME, 2, 30.0)
    assert made.reported(view, 100.0) == []
    return made


def test_a_shard_is_open_when_the_last_rank_has_opened_it() -> None:
    one = reports()
    assert one.receive(1, RankOpened(7, True), 101.0) is None
    assert one.receive(1, RankOpened(7, True), 101.0) is None, "it has said so already"
    assert one.shut(ADOPTS) == {7}
    assert one.is_opening
    assert one.receive(0, RankOpened(7, True), 101.0) == OPEN
    assert not one.shut(ADOPTS)
    assert not one.is_opening


def test_one_rank_that_cannot_decides_and_the_answer_is_final() -> None:
    one = reports()
    assert one.receive(1, RankOpened(7, False, "no such file"), 101.0) == SHUT
    assert one.receive(0, RankOpened(7, True), 101.0) is None
    assert one.receive(1, RankOpened(7, True), 101.0) is None
    assert one.shut(ADOPTS) == {7}
    assert one.reported(ADOPTS, 101.0) == [SHUT]


def test_the_answer_is_repeated_until_a_view_knows_it() -> None:
    one = reports()
    one.receive(0, RankOpened(7, True), 101.0)
    one.receive(1, RankOpened(7, True), 101.0)
    assert one.reported(replace(ADOPTS, epoch=4), 101.0) == [OPEN]
    assert one.reported(replace(ADOPTS, epoch=5, adopts=((7, 1),)), 102.0) == []
    assert one.reported(replace(ADOPTS, epoch=6, adopts=((7, 1), (9, 0))), 103.0) == []
    assert one.shut(replace(ADOPTS, adopts=((7, 1), (9, 0)))) == {9}


def test_a_rank_may_have_opened_it_before_the_leader_learns_of_it() -> None:
    """Ranks learn of a view by their leader, but say it to one whose connection they have renewed."""
    one = ShardReports(ME, 2, 30.0)
    assert one.receive(0, RankOpened(7, True), 101.0) is None
    assert one.receive(1, RankOpened(7, True), 101.0) is None
    assert one.reported(ADOPTS, 100.0) == [OPEN]


def test_a_shard_that_takes_too_long_cannot_be_opened() -> None:
    one = reports()
    one.receive(0, RankOpened(7, True), 101.0)
    assert list(one.late(130.0)) == []
    reported = "1 of 2 ranks have opened it within 30 s"
    assert list(one.late(130.1)) == [Hosts(*ME, 7, False, reported)]
    assert list(one.late(150.0)) == []
    assert one.receive(1, RankOpened(7, True), 101.0) is None


def test_the_next_shard_has_its_own_time() -> None:
    """Ranks open one after the other."""
    one = reports(replace(ADOPTS, adopts=((7, 0), (9, 0))))
    for position in range(2):
        one.receive(position, RankOpened(7, True), 128.0)
    assert list(one.late(158.0)) == []
    assert [word.shard for word in one.late(158.1)] == [9]


def test_a_group_that_had_no_incarnation_speaks_for_the_one_that_it_was_given() -> None:
    one = ShardReports((1, -1), 1, 30.0)
    one.reported(ADOPTS, 100.0)
    assert one.receive(0, RankOpened(7, True), 101.0) == OPEN
