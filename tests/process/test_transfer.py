"""State from donors to a learner over real sockets, and real processes where one dies or its memory is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from spare_megatron.collectives import handshake
from spare_megatron.collectives.handshake import CALL_BYTES, CHALLENGE_BYTES, PROOF_BYTES, STRANGERS_MAX, Member
from spare_megatron.config.host_port import split_address
from spare_megatron.transfer import serving
from spare_megatron.transfer.request_frames import ANSWER_BYTES, REQUEST_BYTES
from spare_megatron.transfer.snapshot_shards import CHUNK_BYTES, ByteSpace, pack_header
from spare_megatron.transfer.transport import FetchError, FetchOverError, KeptSnapshotShards, SnapshotShard, Source
from tests.process.middle import Middle
from tests.process.transfer_rank import (
    LEARNER,
    OFFER,
    PATIENCE_S,
    STEP,
    Ranks,
    TransferProcess,
    empty_like,
    equal,
    snapshot_shard_of,
    source,
    wait_for,
)

PROVED_BYTES = CHALLENGE_BYTES + PROOF_BYTES
"""What a donor reports on a connection before its first answer."""
BIG_KIB = 10 << 10
"""A snapshot shard of three chunks."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def through(middle: Middle, group: int = 0) -> Source:
    return Source(Member(group), middle.address)


def size_of(kib: int) -> int:
    return ByteSpace(snapshot_shard_of(STEP, kib).tensors).size


# ------------------------------------------------------------------------------------------- between processes


def test_two_processes_give_a_state_and_results_and_one_dies(ranks: Ranks) -> None:
    """While the second donor's part of step 7 is under way it is killed: the fetch goes on trying until nobody wants it
    any more, and without that until the time-out, and then names the donor."""
    with TransferProcess(0) as zero, TransferProcess(1, rate_bytes_s=20e6) as one:
        donors = (zero, one)
        for part, donor in enumerate(donors):
            donor.tell("open", OFFER, LEARNER, part, 2)
            for step in (4, 5, 6):
                donor.tell("put", OFFER, step, 1000)
            assert donor.tell("kept", OFFER) == 3
        learner, sources = ranks.learner(), [donor.source for donor in donors]
        for step in (4, 5, 6):
            found = ranks.begin(learner, sources, step).result(PATIENCE_S)
            assert equal(found, snapshot_shard_of(step, 1000))
            assert [donor.tell("kept", OFFER) for donor in donors] == [7 - step] * 2
        for donor in donors:
            donor.tell("put", OFFER, 7, BIG_KIB)
        over = threading.Event()
        with Middle(one.source.address) as middle:
            fetched = ranks.begin(learner, [sources[0], through(middle, 1)], 7, over.is_set)
            wait_for(lambda: middle.down > 1 << 20)
            os.kill(one.process.pid, signal.SIGKILL)
            wait_for(lambda: middle.calls > 1 or fetched.done())
            over.set()
            with pytest.raises(FetchOverError):
                fetched.result(PATIENCE_S)
        with pytest.raises(
            FetchError, match=r"group 1, incarnation 0 at .* given nothing of step 7 for 1 s: .*refused"
        ):
            ranks.begin(ranks.learner(timeout_s=1.0), sources, 7).result(PATIENCE_S)


def test_a_part_is_copied_once_and_arrives_where_it_belongs() -> None:
    """Donors copy no more than their part, learners need no memory beside the tensors."""
    kib, slack_kib = 96 << 10, 20 << 10
    with TransferProcess(0) as donor, TransferProcess(3) as learner:
        donor.tell("open", OFFER, [3, 0], 0, 1)
        donor.tell("open", OFFER + 1, [3, 0], 3, 4)
        grown_kib = donor.tell("put", OFFER + 1, STEP, kib)
        assert 0.2 * kib < grown_kib < 0.25 * kib + slack_kib
        assert donor.tell("put", OFFER, STEP, kib) > 0.9 * kib
        grown_kib, right = learner.tell("fetch", OFFER, STEP, kib, [donor.member, donor.source.address])
        assert right
        assert grown_kib < slack_kib


# ------------------------------------------------------------------------------------------- what donors report


def test_a_donor_that_was_not_notified_is_waited_for_beyond_the_time_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so again and again: that is not silence."""
    monkeypatch.setattr(serving, "LATER_S", 0.05)
    donors = [ranks.donor(0, 0, 2), ranks.rank(1)]
    with Middle(donors[1].address) as middle:
        fetched = ranks.begin(ranks.learner(timeout_s=1.0), [source(donors[0]), through(middle, 1)])
        wait_for(lambda: middle.down > PROVED_BYTES + 32 * ANSWER_BYTES)
        assert not fetched.done()
        donors[1].open(OFFER, LEARNER, 1, 2)
        donors[1].put(OFFER, STEP, snapshot_shard_of(STEP, 100))
        assert equal(fetched.result(PATIENCE_S), snapshot_shard_of(STEP, 100))


def test_an_offer_dropped_during_a_fetch_is_gone_at_once(ranks: Ranks) -> None:
    slow = ranks.donor(1, 1, 2, BIG_KIB, rate_bytes_s=1e6)
    sources = [source(ranks.donor(0, 0, 2, BIG_KIB)), source(slow, 1)]
    with Middle(slow.address) as middle:
        fetched = ranks.begin(ranks.learner(), [sources[0], through(middle, 1)])
        wait_for(lambda: middle.down > 100_000)
        dropped_s = time.monotonic()
        slow.drop(OFFER)
        with pytest.raises(FetchError, match=r"group 1, .*, does not serve step 4 of offer 7 any more"):
            fetched.result(PATIENCE_S)
        assert time.monotonic() - dropped_s < 5.0
        assert slow.kept(OFFER) == KeptSnapshotShards({}, 0)


def test_donors_that_tell_of_different_snapshot_shards_are_named(ranks: Ranks) -> None:
    donors = [ranks.donor(group, group, 3) for group in (0, 2)]
    other = ranks.rank(1)
    other.open(OFFER, LEARNER, 1, 3)
    snapshot_shard = snapshot_shard_of(STEP, 100)
    other.put(OFFER, STEP, SnapshotShard(snapshot_shard.tensors, {**snapshot_shard.values, "scale": 0.5}))
    sources = [source(donors[0]), source(other, 1), source(donors[1], 2)]
    with pytest.raises(
        FetchError, match=r"group 1, .* another snapshot shard of step 4 .*: scale is \[?0.5\]?, not \[?0.4\]?"
    ):
        ranks.begin(ranks.learner(), sources).result(PATIENCE_S)


def test_a_donor_of_another_part_is_named(ranks: Ranks) -> None:
    with pytest.raises(FetchError, match=r"group 0, .* serves part 0 of 2 of step 4, but it is asked for part 0 of 1"):
        ranks.begin(ranks.learner(), [source(ranks.donor(0, 0, 2))]).result(PATIENCE_S)


def test_a_donor_that_says_nothing_is_named(ranks: Ranks) -> None:
    """It takes connections, as the kernel does for a stopped process, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = Source(Member(1), f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(FetchError, match=r"group 1, .* nothing of step 4 for 1 s: it does not answer"):
            ranks.begin(ranks.learner(1.0), [source(ranks.donor(0, 0, 2)), silent]).result(PATIENCE_S)


def test_connections_stay_open_from_snapshot_shard_to_snapshot_shard_and_all_is_freed_in_time(ranks: Ranks) -> None:
    donor, learner = ranks.donor(), ranks.learner()
    with Middle(donor.address) as middle:
        for step in (4, 5, 6):
            assert equal(ranks.begin(learner, [through(middle)], step).result(PATIENCE_S), snapshot_shard_of(step, 100))
            donor.put(OFFER, step + 1, snapshot_shard_of(step + 1, 100))
        assert (middle.calls, len(donor.kept(OFFER).sizes)) == (1, 2)
        middle.cut()
        assert equal(ranks.begin(learner, [through(middle)], 7).result(PATIENCE_S), snapshot_shard_of(7, 100))
        assert (middle.calls, len(donor.kept(OFFER).sizes)) == (2, 1)


# ------------------------------------------------------------------------------------------- the learner's side


def test_what_place_raises_ends_the_fetch_and_the_next_one_works(ranks: Ranks) -> None:
    donor, learner = ranks.donor(), ranks.learner()

    def refuse(snapshot_shard: SnapshotShard) -> dict[str, torch.Tensor]:
        raise RuntimeError("no place")

    def misplace(snapshot_shard: SnapshotShard) -> dict[str, torch.Tensor]:
        return {**empty_like(snapshot_shard), "weights": torch.empty(1)}

    for place, error in ((refuse, RuntimeError), (misplace, ValueError), (lambda snapshot_shard: {}, ValueError)):
        with pytest.raises(error, match=r"no place|tensor weights to fill is|are not those of the snapshot shard"):
            learner.fetch(OFFER, STEP, [source(donor)], place, lambda: False)
    assert equal(ranks.begin(learner, [source(donor)]).result(PATIENCE_S), snapshot_shard_of(STEP, 100))


@pytest.mark.parametrize("how", ["over", "close"])
@pytest.mark.parametrize("what", ["waits for a donor", "receives", "calls"])
def test_a_fetch_that_nobody_wants_ends_at_once(ranks: Ranks, how: str, what: str) -> None:
    over = threading.Event()
    learner = ranks.learner()
    donor = ranks.donor(kib=BIG_KIB, rate_bytes_s=1e6)
    with Middle(donor.address) as middle:
        where = Source(Member(0), "127.0.0.1:9") if what == "calls" else through(middle)
        fetched = ranks.begin(learner, [where], STEP + (what == "waits for a donor"), over.is_set)
        wait_for(lambda: what == "calls" or middle.down >= PROVED_BYTES + (100_000 if what == "receives" else 0))
        ended_s = time.monotonic()
        if how == "over":
            over.set()
        else:
            learner.close()
        with pytest.raises(FetchOverError):
            fetched.result(PATIENCE_S)
        assert time.monotonic() - ended_s < 5.0


# ------------------------------------------------------------------------------------------- bad connections


def flips(down: bool, at: int, calls: int) -> Callable[[bool, int, int, bytearray], bool]:
    """A tap that flips one bit of the byte at an offset of the first ``calls`` connections."""

    def tap(of_down: bool, call: int, start: int, data: bytearray) -> bool:
        if of_down == down and call <= calls and start <= at < start + len(data):
            data[at - start] ^= 4
        return True

    return tap


HEADER_BYTES = len(pack_header(snapshot_shard_of(STEP, BIG_KIB)))
CHUNKS_AT = PROVED_BYTES + ANSWER_BYTES + HEADER_BYTES
FLIPS = {
    "words of an answer": (True, PROVED_BYTES + 12),
    "header": (True, PROVED_BYTES + ANSWER_BYTES + 50),
    "words of a chunk": (True, CHUNKS_AT + 20),
    "chunk 1": (True, CHUNKS_AT + CHUNK_BYTES + 2 * ANSWER_BYTES + 1_000_000),
    "words of a request": (False, CALL_BYTES + PROOF_BYTES + 8),
    "second request": (False, CALL_BYTES + PROOF_BYTES + REQUEST_BYTES + 12),
}


@pytest.mark.parametrize("what", FLIPS)
def test_what_is_damaged_once_is_fetched_again(ranks: Ranks, what: str) -> None:
    donor = ranks.donor(kib=BIG_KIB)
    with Middle(donor.address, flips(*FLIPS[what], calls=1)) as middle:
        found = ranks.begin(ranks.learner(), [through(middle)]).result(PATIENCE_S)
        assert equal(found, snapshot_shard_of(STEP, BIG_KIB))
        assert middle.calls == 2


@pytest.mark.parametrize(
    ("what", "reported"),
    [
        ("words of an answer", "gave its words of step 4"),
        ("header", "gave the header of its part of step 4"),
        ("chunk 1", "gave chunk 1 of its part of step 4"),
    ],
)
def test_a_donor_whose_bytes_are_damaged_again_is_named(ranks: Ranks, what: str, reported: str) -> None:
    """The second connection begins with the damaged chunk, so that the byte is at another offset there."""
    first = flips(*FLIPS[what], calls=1)
    again = (
        flips(True, PROVED_BYTES + ANSWER_BYTES + 1000, calls=2) if what == "chunk 1" else flips(*FLIPS[what], calls=2)
    )

    def tap(*passing: object) -> bool:
        return (first if passing[1] == 1 else again)(*passing)

    donors = [ranks.donor(group, group, 2, 2 * BIG_KIB) for group in (0, 1)]
    with Middle(donors[1].address, tap) as middle:
        with pytest.raises(FetchError, match=rf"group 1, incarnation 0 at .*, {reported} damaged, for the second time"):
            ranks.begin(ranks.learner(), [source(donors[0]), through(middle, 1)]).result(PATIENCE_S)
        assert middle.calls == 2


def test_a_fetch_goes_on_from_the_byte_that_was_reached(ranks: Ranks) -> None:
    """Each connection is cut before it has brought one chunk; nothing is sent twice but the words."""
    donor, size, every = ranks.donor(kib=BIG_KIB), size_of(BIG_KIB), CHUNK_BYTES * 2 // 3

    def tap(down: bool, call: int, at: int, data: bytearray) -> bool:
        if down and at + len(data) >= every:
            del data[every - at :]
            return False
        return True

    with Middle(donor.address, tap) as middle:
        found = ranks.begin(ranks.learner(timeout_s=5.0), [through(middle)]).result(PATIENCE_S)
        assert equal(found, snapshot_shard_of(STEP, BIG_KIB))
        assert middle.calls >= size // every
        words = middle.calls * (PROVED_BYTES + ANSWER_BYTES) + HEADER_BYTES
        assert middle.down <= size + words + ANSWER_BYTES * (size // CHUNK_BYTES + 1)


def test_a_donors_process_that_comes_back_goes_on_where_it_was(ranks: Ranks) -> None:
    """The rank behind the address is another one of the same name, with the same snapshot shard."""
    donor, size = ranks.donor(kib=BIG_KIB, rate_bytes_s=20e6), size_of(BIG_KIB)
    with Middle(donor.address) as middle:
        fetched = ranks.begin(ranks.learner(), [through(middle)])
        wait_for(lambda: middle.down > size // 2)
        middle.target = ranks.donor(kib=BIG_KIB).address
        donor.close()
        assert equal(fetched.result(PATIENCE_S), snapshot_shard_of(STEP, BIG_KIB))
        assert middle.down < size + CHUNK_BYTES


# ------------------------------------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    ("who", "reported"),
    [
        ({"token": "another"}, "it does not know the job's token"),
        ({"job_attempt": 2}, "closed the connection|reset"),
        ({"position": 1}, "closed the connection|reset"),
        ({"member": Member(3, 0)}, "does not serve step 4 of offer 7 any more"),
        ({"member": Member(2, 1)}, "does not serve step 4 of offer 7 any more"),
    ],
    ids=["token", "job_attempt", "position", "incarnation", "group"],
)
def test_nobody_but_the_offers_learner_has_it(ranks: Ranks, who: dict[str, object], reported: str) -> None:
    donor = ranks.donor()
    with Middle(donor.address) as middle:
        with pytest.raises(FetchError, match=reported):
            ranks.begin(ranks.learner(1.0, **who), [through(middle)]).result(PATIENCE_S)
        assert middle.down <= middle.calls * (PROVED_BYTES + ANSWER_BYTES)
    assert len(donor.kept(OFFER).sizes) == 1


def test_a_donor_of_another_incarnation_is_not_received(ranks: Ranks) -> None:
    donor = ranks.donor(member=Member(0, 1))
    with pytest.raises(FetchError, match=r"closed the connection|reset"):
        ranks.begin(ranks.learner(1.0), [source(donor)]).result(PATIENCE_S)


def test_words_that_are_repeated_prove_nothing(ranks: Ranks) -> None:
    donor, reported = ranks.donor(), bytearray()

    def tap(down: bool, call: int, at: int, data: bytearray) -> bool:
        reported.extend(b"" if down else data)
        return True

    with Middle(donor.address, tap) as middle:
        ranks.begin(ranks.learner(), [through(middle)]).result(PATIENCE_S)
    assert len(reported) == CALL_BYTES + PROOF_BYTES + 2 * REQUEST_BYTES
    with socket.create_connection(split_address(donor.address)) as replay:
        replay.sendall(reported)
        assert all_received(replay) <= PROVED_BYTES


def test_strangers_at_the_door_keep_nobody_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand connections that say nothing, or something else; too many, long before their time is over."""
    monkeypatch.setattr(handshake, "STRANGER_S", 10 * PATIENCE_S)
    donor, learner = ranks.donor(), ranks.learner()
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        strangers = []
        for words in (b"", b"", b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 200) * 200:
            strangers.append(stack.enter_context(socket.create_connection(split_address(donor.address))))
            with contextlib.suppress(OSError):  # it is hung up on
                strangers[-1].sendall(words)
        assert equal(ranks.begin(learner, [source(donor)]).result(PATIENCE_S), snapshot_shard_of(STEP, 100))
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 1000 + STRANGERS_MAX + 10)
        for stranger in strangers[: -2 * STRANGERS_MAX]:  # some of the newest were no calls, and did not stay
            assert all_received(stranger) <= CHALLENGE_BYTES
        assert equal(ranks.begin(learner, [source(donor)]).result(PATIENCE_S), snapshot_shard_of(STEP, 100))


def test_a_stranger_has_not_much_time(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "STRANGER_S", 0.1)
    with socket.create_connection(split_address(ranks.rank(0).address)) as stranger:
        assert all_received(stranger) == CHALLENGE_BYTES


def test_a_learner_that_calls_again_has_one_connection(ranks: Ranks) -> None:
    """The older one ends, as it would have to where its end was lost."""
    donor, learner = ranks.donor(), ranks.learner()
    with Middle(donor.address) as middle:
        ranks.begin(learner, [through(middle)]).result(PATIENCE_S)
        ranks.begin(ranks.learner(), [source(donor)]).result(PATIENCE_S)
        ranks.begin(learner, [through(middle)]).result(PATIENCE_S)
        assert middle.calls == 2


def all_received(sock: socket.socket) -> int:
    """Number of bytes until it is hung up on."""
    sock.settimeout(PATIENCE_S)
    number = 0
    with contextlib.suppress(ConnectionResetError):
        while received := sock.recv(1000):
            number += len(received)
    return number


# ------------------------------------------------------------------------------------------- the rate


def test_all_learners_share_a_donors_rate(ranks: Ranks) -> None:
    rate_bytes_s, kib = 5e6, 2000
    donor = ranks.donor(kib=kib, rate_bytes_s=rate_bytes_s)
    other = Member(5, 2)
    donor.open(OFFER + 1, other, 0, 1)
    donor.put(OFFER + 1, STEP, snapshot_shard_of(STEP, kib))
    began_s = time.monotonic()
    fetched = [
        ranks.begin(ranks.learner(), [source(donor)]),
        ranks.begin(ranks.rank(5, member=other), [source(donor)], number=OFFER + 1),
    ]
    found = [one.result(PATIENCE_S) for one in fetched]
    took_s = time.monotonic() - began_s
    assert all(equal(one, snapshot_shard_of(STEP, kib)) for one in found)
    assert took_s > 0.8 * 2 * size_of(kib) / rate_bytes_s
