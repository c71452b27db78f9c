"""The compiled ring and the one in Python do the same over real sockets that take and give few bytes: members of both
kinds sum with each other, break off, and go on in later epochs on the same connections."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron import kernels
from spare_megatron.collectives import backend_ring, ring_native
from spare_megatron.collectives.backend import BackendError, Seat
from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.frames import FrameReceiver, FrameSender
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.link_monitor import LEFT, RIGHT
from spare_megatron.collectives.replica_communicators import ReplicaCommunicators
from spare_megatron.collectives.ring import Shares
from spare_megatron.collectives.ring_epoch import RingEpoch
from spare_megatron.collectives.ring_native import Frames, compiled_ring
from spare_megatron.config.errors import ConfigError
from spare_megatron.exact_sum.sum_conversion import SumConversion
from tests.pure import toy_conversion

COMPILED = compiled_ring()
SMALL_BUFFER, SEGMENT_BYTES = 4096, 2048
BOTH = pytest.mark.parametrize("compiled", [False, True])


class _Links:
    """The connections of one member, which are there."""

    def __init__(self, left: socket.socket, right: socket.socket) -> None:
        self.lines = [
            SimpleNamespace(sock=sock, sender=FrameSender(sock), receiver=FrameReceiver(sock), frames=Frames())
            for sock in (left, right)
        ]
        self.lost: list[int] = []

    def use(self, epoch: Any) -> Any:
        epoch.arm()
        return self.lines

    def rest(self, epoch: Any) -> None:
        epoch.in_use = False

    def lose(self, epoch: Any, side: int) -> None:
        self.lost.append(side)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for one in pair:
        one.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, option, SMALL_BUFFER)
    return pair


def _dribble(taken: socket.socket, given: socket.socket, rng: random.Random) -> None:
    """Pass bytes on in portions, most often so small that heads and ends of frames come apart."""
    with taken, given:
        taken.setblocking(True)
        given.setblocking(True)
        while portion := taken.recv(rng.choice((1, 2, 5, 11, 12, 13, 14, 100, 3000))):
            try:
                given.sendall(portion)
            except OSError:
                return


class _Ring:
    """Connections of a ring, and which members have compiled code. With ``rng`` bytes come in portions."""

    def __init__(self, size: int, compiled: list[bool], rng: random.Random | None = None) -> None:
        pairs = [_pair() for _ in range(size)]  # from member k to the one on its right
        self._ways = []
        for number, (here, there) in enumerate(pairs if rng else ()):
            taken, arrives = _pair()
            pairs[number] = (here, arrives)
            given = (there, taken, random.Random(rng.randrange(1 << 30)))  # type: ignore[union-attr]
            self._ways.append(threading.Thread(target=_dribble, args=given))
            self._ways[-1].start()
        self.links = [_Links(pairs[k - 1][1], pairs[k][0]) for k in range(size)]
        self.size, self.compiled = size, compiled
        self._entered: list[RingEpoch] = []

    def enter_as(self, epoch: int, rank: int) -> RingBackend:
        """One member in an epoch."""
        seat = Seat(epoch, tuple(Member(group, 1) for group in range(self.size)), rank, "")
        member = RingBackend(seat, self.links[rank], timeout_s=60.0)  # type: ignore[arg-type]
        member._compiled = COMPILED if self.compiled[rank] else None
        member._epoch.begin(0.0)
        self._entered.append(member._epoch)
        return member

    def enter(self, epoch: int) -> list[RingBackend]:
        """The members in an epoch."""
        return [self.enter_as(epoch, rank) for rank in range(self.size)]

    def close(self) -> None:
        for line in itertools.chain.from_iterable(links.lines for links in self.links):
            line.sock.close()
        for epoch in self._entered:
            epoch.free()
        for way in self._ways:
            way.join(10.0)
            assert not way.is_alive()


@contextmanager
def _ring(size: int, compiled: list[bool], rng: random.Random | None = None) -> Iterator[_Ring]:
    ring = _Ring(size, compiled, rng)
    try:
        yield ring
    finally:
        ring.close()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILED is not None, "kernels/ring.cpp was not built: pip install -e . needs a C++ compiler"
    monkeypatch.setattr(backend_ring, "SEGMENT_BYTES", SEGMENT_BYTES)


def _in_threads(works: list[Callable[[], None]]) -> list[Exception | None]:
    """What each work raised."""
    raised: list[Exception | None] = [None] * len(works)

    def run(number: int) -> None:
        try:
            works[number]()
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a member hangs"
    return raised


def _values(rng: random.Random, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=generator) * 10.0 ** rng.randint(-3, 6)).to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.randint(low, high, (numel,), generator=generator, dtype=dtype)  # sums wrap around


def _sums(members: list[RingBackend], tensors: list[torch.Tensor], in_place: bool) -> list[torch.Tensor]:
    wires = [tensor.clone() if in_place else torch.full_like(tensor, 7) for tensor in tensors]
    sources = [None if in_place else tensor.clone() for tensor in tensors]
    works = [
        lambda m=member, w=wire, s=source: m.sum(w, True, s)  # type: ignore[misc]
        for member, wire, source in zip(members, wires, sources, strict=True)
    ]
    assert _in_threads(works) == [None] * len(members)
    assert all(source is None or torch.equal(source, own) for source, own in zip(sources, tensors, strict=True))
    return wires


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_members_of_both_kinds_sum_as_those_in_python_do(size: int, dtype: torch.dtype) -> None:
    seed = 10 * size + dtype.itemsize
    print(f"seed {seed}")
    rng = random.Random(seed)
    mixed = [[True] * size, *([rng.random() < 0.5 for _ in range(size)] for _ in range(2))]
    for compiled in mixed:
        with _ring(size, [False] * size) as python, _ring(size, compiled) as ring:
            expects, members = python.enter(1), ring.enter(1)
            for numel in (0, 1, size - 1, size + 1, 127, 5000, rng.randrange(20_000)):
                tensors = [_values(rng, numel, dtype) for _ in range(size)]
                in_place = rng.random() < 0.5
                expected = _sums(expects, tensors, in_place)
                found = _sums(members, tensors, in_place)
                assert all(torch.equal(wire, expected[0]) for wire in (*expected, *found)), (compiled, numel)
            for member, like in zip(members, expects, strict=True):
                reported, due = member._epoch.traffic, like._epoch.traffic
                assert (reported.sent, reported.received) == (due.sent, due.received)
                assert not reported.wants
                assert not reported.offers


@pytest.mark.parametrize("size", [2, 3, 5])
def test_members_of_both_kinds_gather(size: int) -> None:
    rng = random.Random(size)
    for compiled in ([True] * size, *([rng.random() < 0.5 for _ in range(size)] for _ in range(3))):
        with _ring(size, compiled) as ring:
            members = ring.enter(1)
            before = 0
            for _ in range(6):
                numels = tuple(rng.choice((0, 1, 700, rng.randrange(5000))) for _ in range(size))
                shares = Shares(numels, tuple(rng.randint(0, size - 1) for _ in range(size)))
                given = [_values(rng, numel, torch.int32) for numel in numels]
                wires = [
                    torch.cat([one if rank == giver else torch.full_like(one, 7) for giver, one in enumerate(given)])
                    for rank in range(size)
                ]
                works = [
                    lambda m=member, w=wire, s=shares: m.sum(w, True, shares=s)  # type: ignore[misc]
                    for member, wire in zip(members, wires, strict=True)
                ]
                assert _in_threads(works) == [None] * size
                for rank, wire in enumerate(wires):
                    for giver, (one, found) in enumerate(zip(given, wire.split(numels), strict=True)):
                        here = (rank - giver) % size <= shares.hops[giver]
                        assert torch.equal(found, one if here else torch.full_like(one, 7)), (compiled, shares)
                sent = sum(member._epoch.traffic.sent for member in members)
                assert sent - before == sum(4 * n * hop for n, hop in zip(numels, shares.hops, strict=True))
                before = sent


@pytest.mark.parametrize("kind", ["compiled", "by Python", "not there"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_members_of_both_kinds_convert_what_they_own(size: int, kind: str) -> None:
    """With the product's conversion in compiled code, the same called from Python, and another that has no compiled
    form."""
    seed = f"{kind} {size}"
    print(f"seed {seed}")
    rng = random.Random(seed)
    for compiled in ([True] * size, [rng.random() < 0.5 for _ in range(size)]):
        with _ring(size, compiled) as ring:
            members = ring.enter(1)
            for numel in (1, size - 1, size + 1, 127, 5000, rng.randrange(20_000)):
                before = rng.randrange(3000)
                given = [_values(rng, numel, torch.int64) >> 8 for _ in range(size)]
                tallies = [_tally(kind, before + numel + 50, one, before) for one in given]
                results = [torch.full((numel,), torch.nan) for _ in given]
                buckets = [
                    ConvertedBucket(tally, 0, before, result) for tally, result in zip(tallies, results, strict=True)
                ]
                works = [
                    lambda m=m, g=g, b=b: m.sum(torch.full_like(g, 7), True, g, b)  # type: ignore[misc]
                    for m, g, b in zip(members, given, buckets, strict=True)
                ]
                assert _in_threads(works) == [None] * size
                total, expected = torch.stack(given).sum(0), torch.empty(numel)
                alone = _tally(kind, before + numel + 50, total, before)
                alone.convert(0, before, total, None, expected, True)
                assert all(torch.equal(result, expected) for result in results), (compiled, numel)
                check_vector = torch.stack([tally.check_vector() for tally in tallies]).sum(0)
                assert torch.equal(check_vector, alone.check_vector()), "each element has one owner"


def _tally(kind: str, size: int, put_in: torch.Tensor, start: int) -> Any:
    """Of a member that puts in some elements of a tensor, from ``start``."""
    if kind == "not there":
        return toy_conversion.Conversion([put_in], 1).begin()
    cuts = sorted({0, size // 3, size // 2, size})
    segments = torch.tensor([(a, b, 4096 * n + 5) for n, (a, b) in enumerate(itertools.pairwise(cuts))])
    padded = torch.zeros(size, dtype=torch.int64)
    padded[start : start + len(put_in)] = put_in
    expected = torch.zeros(len(segments), dtype=torch.int64)
    kernels.checksums(padded, segments, expected)
    exponents = torch.arange(20, 20 + 4 * len(segments) + size // 1024 + 2, dtype=torch.int16)
    tally = SumConversion([segments], exponents, lambda: expected).begin()
    if kind == "by Python":
        tally.compiled = lambda tensor, dtype: None  # type: ignore[method-assign]
    return tally


@pytest.mark.parametrize("seed", range(12))
def test_what_was_broken_off_is_in_no_later_sum(seed: int) -> None:
    """Each member goes through epochs at times of its own, cut in any of them but the last, on the same connections:
    neighbours are in other epochs meanwhile. A sum that is done is the sum, in the last epoch for all; some are
    converted, so that frames of other sizes follow each other within a sum."""
    rng = random.Random(seed)
    size, epochs = rng.choice((2, 3, 4)), 20
    tensors = [
        [_values(rng, numel, torch.int64) for _ in range(size)]
        for numel in (rng.choice((3, 100, 1000, 3000)) for _ in range(epochs))
    ]
    converts = [rng.random() < 0.5 for _ in range(epochs)]
    tallies = [[toy_conversion.Conversion([one], 1).begin() for one in given] for given in tensors]
    done = [0] * size
    with _ring(size, [rng.random() < 0.7 for _ in range(size)], rng) as ring:

        def live(rank: int, own: random.Random) -> None:
            for epoch, given in enumerate(tensors, 1):
                member, wire = ring.enter_as(epoch, rank), given[rank].clone()
                result = torch.full((len(wire),), torch.nan)
                bucket = ConvertedBucket(tallies[epoch - 1][rank], 0, 0, result) if converts[epoch - 1] else None
                cut = threading.Timer(0.05 * own.random() * own.random(), member._epoch.give_up, args=("cut",))
                if epoch < epochs:
                    cut.start()
                [raised] = _in_threads([lambda m=member, w=wire, b=bucket: m.sum(w, True, None, b)])  # type: ignore[misc]
                if raised is None:
                    done[rank] += 1
                    total = torch.stack(given).sum(0)
                    expected = toy_conversion.converted(total) if bucket else total
                    assert torch.equal(result if bucket else wire, expected), f"epoch {epoch}"
                else:
                    assert str(raised) == "cut"
                if epoch < epochs:
                    cut.join()

        chances = [random.Random(f"{seed} {rank}") for rank in range(size)]
        works = [lambda r=rank: live(r, chances[r]) for rank in range(size)]  # type: ignore[misc]
        assert _in_threads(works) == [None] * size
    print(f"seed {seed}: done {done} of {epochs}, converted {converts}")
    if converts[-1]:
        last = torch.stack([tally.check_vector() for tally in tallies[-1]]).sum(0)
        assert last.tolist() == [0, len(tensors[-1][0])], "each element has one owner"
    assert min(done) >= 1


def test_the_last_byte_of_a_frame_counts_once_it_is_whole() -> None:
    """And frames of older epochs do not, nor does what comes behind one that was broken off."""
    with _ring(2, [True, True]) as ring:
        member, neighbour = ring.enter(5)[0], ring.links[1].lines[RIGHT].sock
        data = torch.ones(5)
        spoken = [  # words, and how many bytes count once they have come
            (struct.pack("!QI", 4, 7) + bytes(7) + b"\0" + struct.pack("!QI", 5, 8) + bytes(8), 7),
            (b"\1", 8),
            (struct.pack("!QI", 5, 12) + bytes(3), 11),
            (bytes(9) + b"\0" + struct.pack("!QI", 6, 8) + bytes(9), 19),
        ]
        received = []

        def speak() -> None:
            for words, due in spoken:
                neighbour.sendall(words)
                until_s = time.monotonic() + 10.0
                while member._traffic.received < due and time.monotonic() < until_s:
                    time.sleep(0.001)
                received.append((due, member._traffic.received))
            member._epoch.give_up("cut")

        raised = _in_threads([lambda: member.sum(data, True), speak])
        assert str(raised[0]) == "cut"
        assert raised[1] is None
        assert all(due == found for due, found in received), received
        frames = [struct.pack("!QI", 5, 4 * n) + torch.ones(n).numpy().tobytes() + b"\1" for n in (3, 2)]
        assert ring.links[1].lines[LEFT].sock.recv(1000) == b"".join(frames)


@BOTH
def test_no_byte_leaves_once_the_epoch_is_over(compiled: bool) -> None:
    with _ring(2, [compiled, compiled]) as ring:
        member = ring.enter(1)[0]
        member._epoch.give_up("cut")
        with pytest.raises(BackendError, match="cut"):
            member.sum(torch.ones(5), True)
        with pytest.raises(BlockingIOError):
            ring.links[1].lines[LEFT].sock.recv(1)


@BOTH
def test_a_member_that_sums_something_else_is_named(compiled: bool) -> None:
    with _ring(2, [compiled, compiled]) as ring:
        members = ring.enter(1)
        works = [lambda: members[0].sum(torch.zeros(200), True), lambda: members[1].sum(torch.zeros(120), True)]
        stops = threading.Timer(0.5, lambda: [member._epoch.give_up("cut") for member in members])
        stops.start()
        raised = _in_threads(works)
        stops.join()
    reported = [str(error) for error in raised]
    due = [
        f"rank {1 - k} of the ring sums something else: a frame of {x} bytes came where {y} are due"
        for k, x, y in ((0, 240, 400), (1, 400, 240))
    ]
    assert reported[0] in (due[0], "cut")
    assert reported[1] in (due[1], "cut")
    assert reported != ["cut", "cut"], "whoever looks first may send nothing more"


@BOTH
@pytest.mark.parametrize("numel", [3, 30_000])
@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_a_neighbour_that_ends_is_lost(compiled: bool, side: int, numel: int) -> None:
    """Also while nothing is to be sent to it."""
    with _ring(3, [compiled] * 3) as ring:
        member, links = ring.enter(1)[0], ring.links[0]
        neighbour = ring.links[2] if side == LEFT else ring.links[1]
        ends = threading.Timer(0.1, neighbour.lines[RIGHT if side == LEFT else LEFT].sock.close)
        ends.start()
        [raised] = _in_threads([lambda: member.sum(torch.zeros(numel), True)])
        ends.join()
        assert links.lost == [side]
        assert f"the connection to rank {2 if side == LEFT else 1} of the ring is lost" in str(raised)


@BOTH
def test_who_waits_says_so_and_ends_when_its_epoch_does(compiled: bool) -> None:
    with _ring(3, [compiled] * 3) as ring:
        member = ring.enter(1)[0]
        seen = []

        def look() -> None:
            until_s = time.monotonic() + 10.0
            while time.monotonic() < until_s and not (member._traffic.wants and member._traffic.offers):
                time.sleep(0.001)
            seen.append(
                (member._traffic.wants, member._traffic.offers, member._traffic.sent, member._traffic.wait_for_peers)
            )
            member._epoch.give_up("it is over")

        looks = threading.Thread(target=look)
        looks.start()
        [raised] = _in_threads([lambda: member.sum(torch.zeros(30_000), False)])
        looks.join()
    [(wants, offers, sent, wait_for_peers)] = seen
    assert (wants, offers, wait_for_peers) == (True, True, False)
    assert 0 < sent < 40_000, "the right neighbour takes nothing out of its buffer"
    assert str(raised) == "it is over"
    assert not member._traffic.wants
    assert not member._traffic.offers


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_native, "VERSION", ring_native.VERSION + 1)
    with pytest.raises(ConfigError, match=r"_ring\..* has version \d+, but this package needs .*pip install -e"):
        compiled_ring.__wrapped__()


def test_another_version_is_refused_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_native, "VERSION", ring_native.VERSION + 1)
    compiled_ring.cache_clear()
    try:
        with pytest.raises(ConfigError, match="build it again"):
            ReplicaCommunicators(Identity(Member(0)), "gloo")
    finally:
        compiled_ring.cache_clear()


def test_a_frame_of_an_earlier_epoch_is_filled_wherever_it_was_broken_off() -> None:
    """In its head, in its bytes, or before its last byte."""
    head, other = struct.pack("!QI", 1, 4), struct.pack("!QI", 2, 8)
    frame = other + torch.ones(2).numpy().tobytes() + b"\1"
    for gone, due, rest in ((5, 4, head[5:] + bytes(5)), (12, 3, bytes(4)), (12, 0, b"\0")):
        with _ring(2, [True, True]) as ring:
            member, neighbour = ring.enter(2)[0], ring.links[1].lines
            hand = member._links.lines[RIGHT].frames.outgoing  # type: ignore[attr-defined]
            hand.epoch, hand.due, hand.open, hand.head_sent = 1, due, 1, gone
            hand.head[: len(head)] = list(head)
            neighbour[RIGHT].sock.sendall(2 * (other + bytes(8) + b"\1"))
            member.sum(torch.ones(4), True)
            assert neighbour[LEFT].sock.recv(1000) == rest + 2 * frame


def test_without_a_library_or_with_a_damaged_one_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ring_native, "__file__", str(tmp_path / "ring_native.py"))
    assert compiled_ring.__wrapped__() is None
    (tmp_path / "_ring.so").write_bytes(b"no library")
    assert compiled_ring.__wrapped__() is None
