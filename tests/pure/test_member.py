"""The member's rules of the step protocol: 3, 5, 8 and 9."""

from __future__ import annotations

from dataclasses import replace

from spare_megatron.protocol.member import Change, Orders, first_orders, take_commit, take_end, take_view
from spare_megatron.protocol.view import View

START = first_orders(group=1, incarnation=0)
VIEW = View(
    group=1,
    incarnation=0,
    epoch=3,
    fencing=2,
    live=((0, 0), (1, 0)),
    committed=(10, 2),
    step=11,
    segments=((4, 5),),
    standing=(4, 5, 6),
)


def member() -> Orders:
    orders, change = take_view(START, VIEW, "host:1")
    assert change is Change.EPOCH
    return orders


def test_a_view_is_adopted_whole() -> None:
    orders = member()
    assert (orders.version, orders.view.epoch, orders.view.step, orders.view.segments) == (1, 3, 11, ((4, 5),))
    assert (orders.right_at, orders.view.live_groups) == ("host:1", (0, 1))


def test_rule_9_a_view_of_the_same_epoch_asks_for_the_vote_again() -> None:
    orders = member()
    again, change = take_view(orders, VIEW, "host:2")
    assert change is Change.SAME
    assert again.version == orders.version + 1
    assert again.right_at == "host:2"


def test_rule_9_an_older_view_is_ignored() -> None:
    """[F9] older in (e, t*), whatever else it says."""
    orders = member()
    for older in (
        replace(VIEW, epoch=2, committed=(12, 2)),
        replace(VIEW, committed=(9, 2)),
        replace(VIEW, epoch=4, fencing=1),
    ):
        assert take_view(orders, older) == (orders, Change.NONE)


def test_rule_3_a_view_carries_a_commit_that_was_lost_on_the_way() -> None:
    orders, change = take_view(member(), replace(VIEW, committed=(11, 3), step=12))
    assert change is Change.COMMIT
    assert orders.view.committed == (11, 3)
    orders, change = take_view(member(), replace(VIEW, epoch=4, committed=(11, 3), step=12))
    assert change is Change.EPOCH
    assert orders.view.committed == (11, 3)


def test_a_commit_moves_on_to_the_standing_assignment_once() -> None:
    orders = member()
    committed, change = take_commit(orders, 11, 3, leave=False)
    assert change is Change.COMMIT
    assert (committed.view.step, committed.view.segments, committed.view.committed) == (12, ((4, 5, 6),), (11, 3))
    assert take_commit(committed, 11, 3, leave=False) == (committed, Change.NONE)
    for step, epoch in ((11, 2), (12, 3), (10, 3)):
        assert take_commit(orders, step, epoch, leave=False) == (orders, Change.NONE)


def test_the_last_commit_leaves_nothing_to_compute() -> None:
    orders, _ = take_commit(member(), 11, 3, leave=True)
    assert orders.view.leave
    assert orders.view.segments == ()


def test_another_groups_or_incarnations_view_is_not_ours() -> None:
    for other in (replace(VIEW, group=0), replace(VIEW, incarnation=1)):
        assert take_view(START, other) == (START, Change.NONE)


def test_rule_8_the_end_is_final() -> None:
    ended, change = take_end(member(), fenced="too slow")
    assert change is Change.END
    assert ended.over
    assert take_end(ended, stop=("finished", "")) == (ended, Change.NONE)
    assert take_view(ended, replace(VIEW, epoch=9)) == (ended, Change.NONE)
    assert take_commit(ended, 11, 3, leave=False) == (ended, Change.NONE)


def test_the_last_commit_never_goes_back_not_even_with_a_newer_epoch() -> None:
    """A view of a newer epoch that does not know the commit which this rank knows is not from who decides."""
    orders, change = take_commit(member(), 11, 3, leave=False)
    assert change is Change.COMMIT
    assert take_view(orders, replace(VIEW, epoch=4)) == (orders, Change.NONE)
