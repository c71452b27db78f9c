"""A donor's book: what it keeps, frees, and says to whom."""

from __future__ import annotations

import threading

import pytest
import torch

from spare_megatron.collectives.handshake import Member
from spare_megatron.transfer.parcels import Portion
from spare_megatron.transfer.rate_limit import SLICE_BYTES_MAX, RateLimit
from spare_megatron.transfer.shelf import Missing, Shelf
from spare_megatron.transfer.transport import KeptParcels, Parcel

LEARNER, OTHER = Member(3, 1), Member(3, 0)
PARCEL = Parcel({"a": torch.arange(100)}, {})
LATER, GONE = Missing.LATER, Missing.GONE


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf()
    shelf.open(7, LEARNER, 0, 2)
    return shelf


def ask(shelf: Shelf, step: int, number: int = 7, who: Member = LEARNER) -> Portion | Missing:
    return shelf.ask(number, who, step, 0.0)


def kept(shelf: Shelf, number: int = 7) -> int:
    return len(shelf.kept(number).sizes)


def test_what_is_kept_and_given_is_counted_in_bytes(shelf: Shelf) -> None:
    for step in (4, 5):
        shelf.put(7, step, PARCEL)
    shelf.gave(7, 300)
    shelf.gave(7, 84)
    shelf.gave(8, 1)
    assert shelf.kept(7) == KeptParcels({4: 448, 5: 448}, 384), "a part begins at a multiple of 64 bytes"
    ask(shelf, 5)
    assert shelf.kept(7) == KeptParcels({5: 448}, 384)
    shelf.drop(7)
    shelf.gave(7, 1)
    assert shelf.kept(7) == shelf.kept(8) == KeptParcels({}, 0)


def test_an_offer_that_this_donor_was_not_told_of_comes_later(shelf: Shelf) -> None:
    assert ask(shelf, 4, number=8) is LATER
    shelf.put(8, 4, PARCEL)
    assert (ask(shelf, 4, number=8), kept(shelf, 8)) == (LATER, 0), "it was not open"


def test_what_was_put_is_there_until_a_later_step_is_asked_for(shelf: Shelf) -> None:
    assert ask(shelf, 4) is LATER
    for step in (4, 5, 6):
        shelf.put(7, step, PARCEL)
    assert kept(shelf) == 3
    four = ask(shelf, 4)
    assert isinstance(four, Portion)
    assert (four.part, four.parts, ask(shelf, 4), four.freed) == (0, 2, four, False)
    five = ask(shelf, 5)
    assert isinstance(five, Portion)
    assert (four.freed, five.freed, kept(shelf)) == (True, False, 2)
    assert ask(shelf, 4) is GONE
    assert ask(shelf, 7) is LATER
    assert (five.freed, kept(shelf)) == (True, 0)
    assert ask(shelf, 6) is GONE
    assert ask(shelf, 3) is GONE


def test_a_step_before_the_first_is_gone(shelf: Shelf) -> None:
    shelf.put(7, 4, PARCEL)
    assert ask(shelf, 3) is GONE
    assert isinstance(ask(shelf, 4), Portion)


def test_steps_follow_each_other(shelf: Shelf) -> None:
    shelf.put(7, 4, PARCEL)
    with pytest.raises(AssertionError, match="step 6 of offer 7 was put after step 4"):
        shelf.put(7, 6, PARCEL)


def test_only_the_offers_learner_has_it(shelf: Shelf) -> None:
    """Nor does another free anything by asking."""
    shelf.put(7, 4, PARCEL)
    assert ask(shelf, 4, who=OTHER) is GONE
    assert ask(shelf, 9, who=OTHER) is GONE
    assert (kept(shelf), isinstance(ask(shelf, 4), Portion)) == (1, True)


@pytest.mark.parametrize("number", [7, 8], ids=["open", "never open"])
def test_a_dropped_offer_is_gone_for_good(shelf: Shelf, number: int) -> None:
    shelf.put(7, 4, PARCEL)
    portion = ask(shelf, 4)
    shelf.drop(number)
    assert isinstance(portion, Portion)
    assert portion.freed is (number == 7)
    assert (ask(shelf, 4, number), kept(shelf, number)) == (GONE, 0)
    shelf.open(number, LEARNER, 0, 2)
    shelf.put(number, 5, PARCEL)
    assert (ask(shelf, 5, number), kept(shelf, number)) == (GONE, 0)


def test_close_drops_all(shelf: Shelf) -> None:
    shelf.put(7, 4, PARCEL)
    portion = ask(shelf, 4)
    shelf.close()
    shelf.open(8, LEARNER, 0, 1)
    assert isinstance(portion, Portion)
    assert (portion.freed, ask(shelf, 4), ask(shelf, 1, 8)) == (True, GONE, GONE)


@pytest.mark.parametrize("happens", ["put", "drop", "close"])
def test_who_waits_hears_at_once(shelf: Shelf, happens: str) -> None:
    heard: list[Portion | Missing] = []
    waiter = threading.Thread(target=lambda: heard.append(shelf.ask(7, LEARNER, 4, 60.0)))
    waiter.start()
    if happens == "put":
        shelf.put(7, 4, PARCEL)
    elif happens == "drop":
        shelf.drop(7)
    else:
        shelf.close()
    waiter.join(30.0)
    assert isinstance(heard[0], Portion) if happens == "put" else heard == [GONE]


def test_an_offer_that_is_dropped_while_it_is_copied_keeps_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(parcel: Parcel, part: int, parts: int) -> Portion:
        shelf.drop(7)
        return Portion(parcel, part, parts)

    monkeypatch.setattr("spare_megatron.transfer.shelf.Portion", copied)
    shelf.put(7, 4, PARCEL)
    assert (kept(shelf), ask(shelf, 4)) == (0, GONE)


def test_all_senders_share_the_rate() -> None:
    limit = RateLimit(1000.0)
    assert limit.slice_bytes == 50
    assert [limit.wait_s(50, 10.0) for _ in range(4)] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert limit.wait_s(50, 10.1) == pytest.approx(0.1)
    assert limit.wait_s(50, 99.0) == 0.0, "what was not used is not saved up"
    assert limit.wait_s(50, 99.0) == pytest.approx(0.05)


def test_without_a_rate_nobody_waits() -> None:
    limit = RateLimit(0)
    assert limit.slice_bytes == SLICE_BYTES_MAX
    assert [limit.wait_s(1 << 40, 1.0) for _ in range(3)] == [0.0] * 3
