"""A donor's book: what it keeps, frees, and says to whom."""

from __future__ import annotations

import threading

import pytest
import torch

from spare_megatron.collectives.handshake import Member
from spare_megatron.transfer.offered_state import Missing, OfferedState
from spare_megatron.transfer.serving import SLICE_BYTES_MAX, RateLimit
from spare_megatron.transfer.snapshot_shards import SendBuffer
from spare_megatron.transfer.transport import KeptSnapshotShards, SnapshotShard

LEARNER, OTHER = Member(3, 1), Member(3, 0)
SNAPSHOT_SHARD = SnapshotShard({"a": torch.arange(100)}, {})
LATER, GONE = Missing.LATER, Missing.GONE


@pytest.fixture
def offered() -> OfferedState:
    offered = OfferedState()
    offered.open(7, LEARNER, 0, 2)
    return offered


def ask(offered: OfferedState, step: int, number: int = 7, who: Member = LEARNER) -> SendBuffer | Missing:
    return offered.ask(number, who, step, 0.0)


def kept(offered: OfferedState, number: int = 7) -> int:
    return len(offered.kept(number).sizes)


def test_what_is_kept_and_given_is_counted_in_bytes(offered: OfferedState) -> None:
    for step in (4, 5):
        offered.put(7, step, SNAPSHOT_SHARD)
    offered.gave(7, 300)
    offered.gave(7, 84)
    offered.gave(8, 1)
    assert offered.kept(7) == KeptSnapshotShards({4: 448, 5: 448}, 384), "a part begins at a multiple of 64 bytes"
    ask(offered, 5)
    assert offered.kept(7) == KeptSnapshotShards({5: 448}, 384)
    offered.drop(7)
    offered.gave(7, 1)
    assert offered.kept(7) == offered.kept(8) == KeptSnapshotShards({}, 0)


def test_an_offer_that_this_donor_was_not_notified_of_comes_later(offered: OfferedState) -> None:
    assert ask(offered, 4, number=8) is LATER
    offered.put(8, 4, SNAPSHOT_SHARD)
    assert (ask(offered, 4, number=8), kept(offered, 8)) == (LATER, 0), "it was not open"


def test_what_was_put_is_there_until_a_later_step_is_asked_for(offered: OfferedState) -> None:
    assert ask(offered, 4) is LATER
    for step in (4, 5, 6):
        offered.put(7, step, SNAPSHOT_SHARD)
    assert kept(offered) == 3
    four = ask(offered, 4)
    assert isinstance(four, SendBuffer)
    assert (four.part, four.parts, ask(offered, 4), four.freed) == (0, 2, four, False)
    five = ask(offered, 5)
    assert isinstance(five, SendBuffer)
    assert (four.freed, five.freed, kept(offered)) == (True, False, 2)
    assert ask(offered, 4) is GONE
    assert ask(offered, 7) is LATER
    assert (five.freed, kept(offered)) == (True, 0)
    assert ask(offered, 6) is GONE
    assert ask(offered, 3) is GONE


def test_a_step_before_the_first_is_gone(offered: OfferedState) -> None:
    offered.put(7, 4, SNAPSHOT_SHARD)
    assert ask(offered, 3) is GONE
    assert isinstance(ask(offered, 4), SendBuffer)


def test_steps_follow_each_other(offered: OfferedState) -> None:
    offered.put(7, 4, SNAPSHOT_SHARD)
    with pytest.raises(AssertionError, match="step 6 of offer 7 was put after step 4"):
        offered.put(7, 6, SNAPSHOT_SHARD)


def test_only_the_offers_learner_has_it(offered: OfferedState) -> None:
    """Nor does another free anything by asking."""
    offered.put(7, 4, SNAPSHOT_SHARD)
    assert ask(offered, 4, who=OTHER) is GONE
    assert ask(offered, 9, who=OTHER) is GONE
    assert (kept(offered), isinstance(ask(offered, 4), SendBuffer)) == (1, True)


@pytest.mark.parametrize("number", [7, 8], ids=["open", "never open"])
def test_a_dropped_offer_is_gone_for_good(offered: OfferedState, number: int) -> None:
    offered.put(7, 4, SNAPSHOT_SHARD)
    outgoing = ask(offered, 4)
    offered.drop(number)
    assert isinstance(outgoing, SendBuffer)
    assert outgoing.freed is (number == 7)
    assert (ask(offered, 4, number), kept(offered, number)) == (GONE, 0)
    offered.open(number, LEARNER, 0, 2)
    offered.put(number, 5, SNAPSHOT_SHARD)
    assert (ask(offered, 5, number), kept(offered, number)) == (GONE, 0)


def test_close_drops_all(offered: OfferedState) -> None:
    offered.put(7, 4, SNAPSHOT_SHARD)
    outgoing = ask(offered, 4)
    offered.close()
    offered.open(8, LEARNER, 0, 1)
    assert isinstance(outgoing, SendBuffer)
    assert (outgoing.freed, ask(offered, 4), ask(offered, 1, 8)) == (True, GONE, GONE)


@pytest.mark.parametrize("happens", ["put", "drop", "close"])
def test_who_waits_receives_at_once(offered: OfferedState, happens: str) -> None:
    received: list[SendBuffer | Missing] = []
    waiter = threading.Thread(target=lambda: received.append(offered.ask(7, LEARNER, 4, 60.0)))
    waiter.start()
    if happens == "put":
        offered.put(7, 4, SNAPSHOT_SHARD)
    elif happens == "drop":
        offered.drop(7)
    else:
        offered.close()
    waiter.join(30.0)
    assert isinstance(received[0], SendBuffer) if happens == "put" else received == [GONE]


def test_an_offer_that_is_dropped_while_it_is_copied_keeps_nothing(
    offered: OfferedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(snapshot_shard: SnapshotShard, part: int, parts: int) -> SendBuffer:
        offered.drop(7)
        return SendBuffer(snapshot_shard, part, parts)

    monkeypatch.setattr("spare_megatron.transfer.offered_state.SendBuffer", copied)
    offered.put(7, 4, SNAPSHOT_SHARD)
    assert (kept(offered), ask(offered, 4)) == (0, GONE)


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
