"""Who calls NCCL: one thread for each communicator, whatever ends it and whenever. There is no GPU here: a group that
records its calls stands for torch's, and events on the host for those of a device; members, store and threads are real.

The group behaves as torch's non-blocking one: the first sum waits, inside the call, until all members have connected,
but no longer than TORCH_NCCL_NONBLOCKING_TIMEOUT; a sum that was issued ends when all members have issued it, or after
the abort.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.collectives import handshake
from spare_megatron.collectives.backend import BackendError, Seat
from spare_megatron.collectives.backend_nccl import ENVIRONMENT, NcclBackend
from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.ring_links import RingLinks
from tests.pure import toy_conversion

pytestmark = pytest.mark.beside_others

WAIT_S = 30.0
TIMEOUT_S = 2.0
UNIQUE_ID = bytes(range(128))


class Peers:
    """What the members of one communicator know of each other inside 'NCCL'."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.connected: set[int] = set()
        self.issued: dict[int, int] = {}
        """Operations of each member."""
        self.given: dict[int, list[torch.Tensor]] = {}
        """Operation -> what members have given so far, where they wait for each other's."""


class Group:
    """Stands for ``ProcessGroupNCCL``."""

    peers: Peers
    made: list[Group]
    dead_in_init: frozenset[int] = frozenset()
    """Members that never connect: they died after they were reached."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert options.config.blocking == 0
        assert all(os.environ[name] == value for name, value in ENVIRONMENT.items())
        self.rank, self.size, self.store = rank, size, store
        self.calls: list[tuple[str, int]] = []
        self.inside = ""
        self.aborted = False
        self.issued = 0
        self.made.append(self)

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[None]:
        assert not self.inside, f"{name} while another thread is inside {self.inside}"
        assert not self.aborted, f"{name} after the abort"
        self.calls.append((name, threading.get_ident()))
        self.inside = name
        try:
            yield
        finally:
            self.inside = ""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Returns at once, as in torch, when the unique id is shared through the store."""
        with self._call("connect"):
            if self.rank == 0:
                self.store.set("0", UNIQUE_ID)
            else:
                assert self.store.get("0") == UNIQUE_ID
        with self.peers.changed:
            if self.rank not in self.dead_in_init:
                self.peers.connected.add(self.rank)
                self.peers.changed.notify_all()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Waits for the initialisation, then issues."""
        return self._issue("allreduce")

    def _issue(self, name: str) -> Any:
        with self._call(name), self.peers.changed:
            limit_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
            if not self.peers.changed.wait_for(lambda: len(self.peers.connected) == self.size, limit_s):
                raise dist.DistBackendError("NCCL timeout in: waitReady")
            self.issued += 1
            self.peers.issued[self.rank] = self.issued
            Event.watched.group = self
        return SimpleNamespace(wait=lambda: None)

    def complete(self) -> bool:
        """The last sum has ended on this member's device."""
        with self.peers.changed:
            return self.aborted or list(self.peers.issued.values()).count(self.issued) == self.size

    def abort(self) -> None:
        """Ends what runs."""
        with self._call("abort"):
            time.sleep(0.05)
        self.aborted = True


class Options:
    """Stands for ``ProcessGroupNCCL.Options``."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=-1)


class Event:
    """Stands for ``torch.cuda.Event``: of the sum that its thread issued last."""

    watched = threading.local()

    def record(self, stream: object) -> None:
        """What it is about."""
        self.group: Group = Event.watched.group

    def query(self) -> bool:
        """Over by now."""
        return self.group.complete()


class SummingGroup(Group):
    """One whose operations are done when they return."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        work = self._issue("allreduce")
        tensors[0].copy_(torch.stack(self._of_all(tensors[0])).sum(0))
        return work

    def _reduce_scatter_base(self, mine: torch.Tensor, whole: torch.Tensor, options: Any) -> Any:
        work = self._issue("reduce_scatter")
        assert mine.data_ptr() == whole.data_ptr() + self.rank * mine.nbytes, "in place"
        mine.copy_(torch.stack(self._of_all(whole)).sum(0).view(self.size, -1)[self.rank])
        whole.view(self.size, -1)[: self.rank] = 7  # it is room for NCCL's work
        return work

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        work = self._issue("allgather")
        assert mine.data_ptr() == whole.data_ptr() + self.rank * mine.nbytes, "in place"
        whole.copy_(torch.cat(self._of_all(mine)))
        return work

    def _of_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What the members have given to the same operation, in the order of their ranks."""
        with self.peers.changed:
            given = self.peers.given.setdefault(self.issued, [torch.empty(0)] * self.size)
            given[self.rank] = mine.clone()
            self.peers.changed.notify_all()
            assert self.peers.changed.wait_for(lambda: all(map(len, given)), WAIT_S)
            return given


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"did not happen in {WAIT_S} s"
        time.sleep(0.002)


class Member:
    """One rank: a communicator with its owner thread."""

    def __init__(self, ring: list[RingLinks], rank: int) -> None:
        size = len(ring)
        seat = Seat(1, tuple(map(handshake.Member, range(size))), rank, ring[(rank + 1) % size].address)
        self.changed = threading.Condition()
        reach = RingBackend(seat, ring[rank], TIMEOUT_S)
        self.backend = NcclBackend(reach, rank, size, TIMEOUT_S, torch.device("cpu"))
        self.communicator = Communicator(1, seat.members, rank, self.backend, self.changed)

    def until(self, holds: Callable[[Communicator], bool]) -> None:
        """Wait for something of the communicator."""
        until(lambda: holds(self.communicator))

    def end(self) -> float:
        """Give it up, and wait until it is gone: the time that took."""
        began_s = time.monotonic()
        self.communicator.give_up()
        assert time.monotonic() - began_s < 1.0, "giving up waits for nothing"
        self.until(lambda one: one.dead)
        self.communicator.join(time.monotonic() + WAIT_S)
        assert self.communicator.gone
        return time.monotonic() - began_s


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RingLinks]]:
    """Two members of a ring, and the stand-ins in torch's place."""
    monkeypatch.setattr(Group, "peers", Peers(), raising=False)
    monkeypatch.setattr(Group, "made", [], raising=False)
    monkeypatch.setattr(Group, "Options", Options, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for name, stand_in in {
        "Event": Event,
        "Stream": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "NCCL_RUNTIME_CONNECT", "TORCH_NCCL_RANKS_PER_ROOT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    links = [RingLinks(handshake.Identity(handshake.Member(group)), "127.0.0.1", TIMEOUT_S) for group in range(2)]
    yield links
    for one in links:
        one.close()


def one_thread_and_one_abort() -> None:
    """Of every group: nothing was called by two threads, and the abort came last."""
    for group in Group.made:
        names, threads = zip(*group.calls, strict=True)
        assert len(set(threads)) == 1, group.calls
        assert names.count("abort") == 1, names
        assert names[-1] == "abort", names


def test_a_sum_and_its_end_are_the_owners(ring: list[RingLinks]) -> None:
    members = [Member(ring, rank) for rank in range(2)]
    for member in members:
        member.until(lambda one: one.ready)
    for member in members:
        member.communicator.submit(torch.ones(4))
    for member in members:
        member.until(lambda one: one.done == 1)
        assert not member.communicator.error
    for member in members:
        member.end()
    assert [name for name, _ in Group.made[0].calls] == ["connect", "allreduce", "allreduce", "abort"]
    one_thread_and_one_abort()
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "2"
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
    assert not any(name in os.environ for name in ENVIRONMENT)


def test_a_member_that_never_came_is_found_before_nccl_is_called(ring: list[RingLinks]) -> None:
    member = Member(ring, 0)
    member.until(lambda one: one.dead)
    assert "rank 1 of the ring did not come" in member.communicator.error
    assert not Group.made


def test_a_meeting_that_was_cut_before_it_began_is_over_at_once(ring: list[RingLinks]) -> None:
    """The thread that gives an epoch up may be quicker than the owner's thread, which then waits for nobody."""
    seat = Seat(1, tuple(map(handshake.Member, range(2))), 0, ring[1].address)
    backend = RingBackend(seat, ring[0], TIMEOUT_S)
    backend.cut("the epoch is over")
    said: list[str] = []

    def form() -> None:
        try:
            backend.form()
        except BackendError as error:
            said.append(str(error))

    threading.Thread(target=form, daemon=True).start()
    until(lambda: said == ["the epoch is over"])
    backend.release()


def test_a_cut_before_the_initialisation_ends_the_meeting(ring: list[RingLinks]) -> None:
    member = Member(ring, 0)
    assert member.end() < TIMEOUT_S
    assert not Group.made


def test_a_cut_in_the_initialisation_aborts_within_the_time_out(
    ring: list[RingLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that dies after it was reached keeps the owner inside torch; only the owner aborts, when it is out."""
    monkeypatch.setattr(Group, "dead_in_init", frozenset({1}))
    members = [Member(ring, rank) for rank in range(2)]
    until(lambda: [group.inside for group in Group.made] == ["allreduce", "allreduce"])
    assert all(member.end() < TIMEOUT_S + WAIT_S / 2 for member in members)
    one_thread_and_one_abort()


def test_a_cut_in_a_sum_aborts_at_once(ring: list[RingLinks]) -> None:
    """The other member still computes: the sum waits for it, without a limit."""
    members = [Member(ring, rank) for rank in range(2)]
    for member in members:
        member.until(lambda one: one.ready)
    waiting = members[0].communicator
    waiting.submit(torch.ones(4), patient=True)
    until(lambda: any(group.issued == 2 for group in Group.made))
    assert waiting.busy, "its buffer must not be used again"
    for member in members:
        member.end()
    one_thread_and_one_abort()
    assert not waiting.busy


def test_each_member_converts_the_chunk_that_it_owns(ring: list[RingLinks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tensors that two members cannot cut in equal chunks, or at all."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SummingGroup)
    members = [Member(ring, rank) for rank in range(2)]
    for member in members:
        member.until(lambda one: one.ready)
    for numel in (1, 2, 9, 1000):
        given = [torch.arange(numel) * (rank + 1) for rank in range(2)]
        tallies = [toy_conversion.Conversion([one], 1).begin() for one in given]
        results = [torch.full((numel,), torch.nan) for _ in given]
        for member, one, tally, result in zip(members, given, tallies, results, strict=True):
            member.communicator.submit(one.clone(), converted=ConvertedBucket(tally, 0, 0, result))
        for member in members:
            member.until(lambda one: one.done == one.submitted)
            assert not member.communicator.error
        assert all(torch.equal(one, toy_conversion.converted(torch.arange(numel) * 3)) for one in results)
        assert [tally.witness()[1].item() for tally in tallies] == [numel // 2 + numel % 2, numel // 2]
        assert sum(tally.witness()[0].item() for tally in tallies) == 0
    for member in members:
        member.end()
    one_thread_and_one_abort()
