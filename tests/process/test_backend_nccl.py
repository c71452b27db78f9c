"""NCCL between groups, without a GPU: :mod:`tests.nccl_as_torch` stands for torch's process group and a device's
events; members, store, ring and threads are real.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from spare_megatron.collectives import handshake, nccl_start
from spare_megatron.collectives.backend import BackendError, Seat
from spare_megatron.collectives.backend_nccl import NcclBackend, RingStore
from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.buckets import ALIGNMENT, BucketLayout
from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.reduction import PlainReduction
from spare_megatron.collectives.ring import Shares
from spare_megatron.collectives.ring_links import RingLinks
from spare_megatron.config.errors import ConfigError
from tests import nccl_as_torch, polling
from tests.nccl_as_torch import Nccl
from tests.pure import toy_conversion

WAIT_S = 30.0
TIMEOUT_S = 2.0
GOOD = nccl_start.Devices(True, "", 8, 0, "NVIDIA H100 80GB HBM3", "2.14.1+cu130", (2, 30, 7))


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    polling.until("it", holds, WAIT_S, every_s=0.002)


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
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """The stand-ins, in a process whose group has its own world."""
    nccl = nccl_as_torch.install(monkeypatch)
    nccl_start.prepare(GOOD, TIMEOUT_S)
    nccl.environment()  # the group's own world is the first to use NCCL
    nccl_start.without_watchdog()
    return nccl


@pytest.fixture
def ring(nccl: Nccl) -> Iterator[list[RingLinks]]:
    """Two members of a ring."""
    links = links_of(2)
    yield links
    for one in links:
        one.close()


def links_of(number: int) -> list[RingLinks]:
    return [RingLinks(handshake.Identity(handshake.Member(group)), "127.0.0.1", TIMEOUT_S) for group in range(number)]


def formed(ring: list[RingLinks]) -> list[Member]:
    """A member at each place, with their communicator."""
    members = [Member(ring, rank) for rank in range(len(ring))]
    for member in members:
        member.until(lambda one: one.ready)
    return members


def one_owner_and_one_abort(nccl: Nccl) -> None:
    """Of every group: one thread called everything but the abort, and that came last."""
    for record in nccl.made:
        names, threads = zip(*record.calls, strict=True)
        assert len(set(threads[:-1])) == 1, record.calls
        assert names.count("abort") == 1, names
        assert names[-1] == "abort", names


def test_a_sum_and_its_end_are_the_owners(ring: list[RingLinks], nccl: Nccl) -> None:
    members = formed(ring)
    for member in members:
        member.communicator.submit(torch.ones(4))
    for member in members:
        member.until(lambda one: one.done == 1)
        assert not member.communicator.error
    for member in members:
        member.end()
    assert [name for name, _ in nccl.made[0].calls] == ["connect", "allreduce", "allreduce", "abort"]
    one_owner_and_one_abort(nccl)


def test_the_store_lives_as_long_as_the_group(ring: list[RingLinks], nccl: Nccl) -> None:
    """torch holds its C++ half only: where nobody else holds it, not one communicator can be formed."""
    died = dist.PrefixStore("", RingStore(Member(ring, 0).backend._reach))
    with pytest.raises(RuntimeError, match="Not implemented"):
        died.set("0", "id")
    links = links_of(2)
    for member in formed(links):
        member.end()
    for one in links:
        one.close()
    assert len(nccl.made) == 2


def test_what_bounds_waits_is_there_before_the_first_call_of_the_process(ring: list[RingLinks], nccl: Nccl) -> None:
    """A member that still computes is not waited for inside NCCL, and a dead one for the time-out only."""
    assert nccl.environment() == {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "2", "NCCL_RUNTIME_CONNECT": "0"}
    before = dict(os.environ)
    members = formed(ring)
    assert dict(os.environ) == before, "a thread has changed the environment"
    members[0].communicator.submit(torch.ones(4), wait_for_peers=True)
    until(lambda: any(record.issued == 2 and not record.inside for record in nccl.made))
    for member in members:
        member.end()


def test_a_communicator_in_another_environment_is_refused(
    ring: list[RingLinks], nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    members = [Member(ring, rank) for rank in range(2)]
    for member in members:
        member.until(lambda one: one.dead)
    assert any("TORCH_NCCL_BLOCKING_WAIT is not set" in member.communicator.error for member in members)
    assert not nccl.made


def test_an_error_of_nccl_ends_a_sum_and_accuses_nobody(ring: list[RingLinks], nccl: Nccl) -> None:
    """No watchdog acts: nothing goes through the store, and the release takes no minute."""
    members = formed(ring)
    members[0].communicator.submit(torch.ones(4), wait_for_peers=True)
    nccl.failed = frozenset({0})
    began_s = time.monotonic()
    members[0].until(lambda one: one.dead)
    assert time.monotonic() - began_s < nccl_as_torch.DUMP_S, "a watchdog was waited for"
    until(lambda: "NCCL error" in members[1].communicator.cause)
    assert "NCCL error" in members[0].communicator.error
    assert not any(member.communicator.links for member in members), "a neighbour was accused"
    assert all(record.blocking for record in nccl.made)
    members[1].end()
    one_owner_and_one_abort(nccl)


def test_nothing_but_the_unique_id_passes_through_the_store(ring: list[RingLinks]) -> None:
    backends = [Member(ring, rank).backend for rank in range(2)]
    until(lambda: all(backend.formed for backend in backends))
    for backend in backends:
        assert backend._store is not None
        with pytest.raises(RuntimeError, match="only NCCL's unique id passes through this store, not 'exception_dump'"):
            backend._store.set("exception_dump", b"1234")
        assert not backend.over
    for backend in backends:
        backend.cut("the test is over")


def test_buffers_are_free_before_evidence_has_been_waited_for(
    ring: list[RingLinks], nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is followed by the abort at once, and only then by the wait for what others know."""
    monkeypatch.setattr(NcclBackend, "linger_s", 2 * TIMEOUT_S)
    members = formed(ring)
    waiting = members[0].communicator
    waiting.submit(torch.ones(4), wait_for_peers=True)
    until(lambda: any(record.issued == 2 for record in nccl.made))
    members[1].communicator.spoil("the other member stopped")
    began_s = time.monotonic()
    members[0].until(lambda one: bool(one.error) and not one.busy)
    assert time.monotonic() - began_s < TIMEOUT_S
    assert not waiting.dead, "it still waits for evidence"
    for member in members:
        member.end()


def test_buffers_stay_taken_after_an_abort_that_failed(ring: list[RingLinks], nccl: Nccl) -> None:
    """A kernel may go on: nobody else gets its buffer until the stream is through."""
    nccl.abort_fails, nccl.kernel_ends_with_abort = True, False
    members = formed(ring)
    waiting = members[0].communicator
    waiting.submit(torch.ones(4), wait_for_peers=True)
    until(lambda: any(record.issued == 2 for record in nccl.made))
    waiting.give_up()
    until(lambda: any(record.aborted and not record.inside for record in nccl.made))
    time.sleep(0.2)
    assert waiting.busy
    assert not waiting.dead
    nccl.kernel_ends_with_abort = True
    members[0].until(lambda one: one.dead and not one.busy)
    members[1].end()


def test_an_abort_that_hangs_keeps_nobody_and_is_said(
    ring: list[RingLinks], nccl: Nccl, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its kernel has ended, the buffers are free; where not, a sentence says so after the time-out."""
    nccl.abort_hangs.set()
    members = formed(ring)
    members[0].communicator.submit(torch.ones(4), wait_for_peers=True)
    until(lambda: any(record.issued == 2 for record in nccl.made))
    members[0].communicator.give_up()
    members[0].until(lambda one: not one.busy)
    assert any(record.inside == "abort" for record in nccl.made)
    until(lambda: "the abort of an NCCL communicator hangs" in caplog.text)
    members[1].end()
    nccl.abort_hangs.clear()
    until(lambda: not any(record.inside for record in nccl.made))
    nccl.kernel_ends_with_abort = False
    links = links_of(2)
    members = formed(links)
    members[0].communicator.submit(torch.ones(4), wait_for_peers=True)
    until(lambda: any(record.issued == 2 for record in nccl.made[2:]))
    members[0].communicator.give_up()
    until(lambda: "has not ended a sum 2 s after its communicator was aborted" in caplog.text)
    assert members[0].communicator.busy
    nccl.kernel_ends_with_abort = True
    for member in members:
        member.end()
    for one in links:
        one.close()


def test_several_sums_are_in_flight(ring: list[RingLinks], nccl: Nccl) -> None:
    """The next ones are called while one moves; all of their buffers are free together after a cut."""
    members = formed(ring)
    waiting = members[0].communicator
    for _ in range(NcclBackend.in_flight + 2):
        waiting.submit(torch.ones(4), wait_for_peers=True)
    most = 1 + NcclBackend.in_flight
    until(lambda: any(record.issued == most for record in nccl.made))
    time.sleep(0.1)
    assert not any(record.issued > most for record in nccl.made)
    members[1].communicator.submit(torch.ones(4))
    until(lambda: waiting.done == 1)
    until(lambda: any(record.issued == most + 1 for record in nccl.made))
    assert waiting.busy
    for member in members:
        member.end()
    assert not waiting.busy
    one_owner_and_one_abort(nccl)


def test_a_sum_that_comes_while_one_moves_is_called_at_once(ring: list[RingLinks], nccl: Nccl) -> None:
    members = formed(ring)
    for number in range(2, 2 + NcclBackend.in_flight):
        members[0].communicator.submit(torch.ones(4), wait_for_peers=True)
        until(lambda number=number: any(record.issued == number for record in nccl.made))  # type: ignore[misc]
    assert members[0].communicator.done == 0
    for member in members:
        member.end()


def test_streams_are_none_that_a_groups_collectives_use(ring: list[RingLinks], nccl: Nccl) -> None:
    members = formed(ring)
    assert all(record.high_priority for record in nccl.made)
    assert all(member.backend._stream.priority < 0 for member in members)  # type: ignore[union-attr]
    for member in members:
        member.end()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_member_converts_the_chunk_that_it_owns(size: int, nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tensors that the members cannot cut in equal chunks, or at all; chunks are aligned."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl_as_torch.SummingProcessGroup)
    links = links_of(size)
    members = formed(links)
    share = size * ALIGNMENT
    for numel in (1, 9, share - 1, share, share + 1, 1000, 3 * share + 7):  # of each, several are in flight
        given = [torch.arange(numel) * (rank + 1) for rank in range(size)]
        tallies = [toy_conversion.Conversion([one], 1).begin() for one in given]
        results = [torch.full((numel,), torch.nan) for _ in given]
        for member, one, tally, result in zip(members, given, tallies, results, strict=True):
            member.communicator.submit(one.clone(), converted=ConvertedBucket(tally, 0, 0, result))
            for _ in range(NcclBackend.in_flight):
                member.communicator.submit(one.clone())
        for member in members:
            member.until(lambda one: one.done == one.submitted)
            assert not member.communicator.error
        expected = torch.arange(numel) * (size * (size + 1) // 2)
        assert all(torch.equal(one, toy_conversion.converted(expected)) for one in results)
        assert sum(int(tally.check_vector()[1]) for tally in tallies) == numel
        assert sum(int(tally.check_vector()[0]) for tally in tallies) == 0
    for record in nccl.made:
        chunks = [one for one in record.sizes if one[0] != "allreduce"]
        assert chunks
        assert not any(elements % ALIGNMENT or offset % ALIGNMENT for _, elements, offset in chunks)
    for member in members:
        member.end()
    for one in links:
        one.close()
    one_owner_and_one_abort(nccl)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_members_gather_what_each_gives(size: int, nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl_as_torch.SummingProcessGroup)
    links = links_of(size)
    members = formed(links)
    for numels in ((5,) * size, tuple(range(size)), (0,) * (size - 1) + (100,)):
        given = [torch.arange(numel, dtype=torch.int32) + 1000 * rank for rank, numel in enumerate(numels)]
        wires = [
            torch.cat([one if rank == giver else torch.full_like(one, 7) for giver, one in enumerate(given)])
            for rank in range(size)
        ]
        for member, wire in zip(members, wires, strict=True):
            member.communicator.submit(wire, shares=Shares(numels, (size - 1,) * size))
        for member in members:
            member.until(lambda one: one.done == one.submitted)
            assert not member.communicator.error
        assert all(torch.equal(wire, torch.cat(given)) for wire in wires)
    for member in members:
        member.end()
    for one in links:
        one.close()
    one_owner_and_one_abort(nccl)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_large_buckets_are_cut_without_a_rest(size: int) -> None:
    """Only the last bucket of a tensor needs a third collective."""
    tensors = [torch.empty(30_000_001, dtype=torch.int64, device="meta")]
    layout = BucketLayout.of(tensors, {}, PlainReduction(), 16 << 20)
    assert len(layout.buckets) > 10
    assert not any((one.stop - one.start) % (size * ALIGNMENT) for one in layout.buckets[:-1])
    assert all((one.stop - one.start) * 8 <= 16 << 20 for one in layout.buckets)


def test_a_member_that_never_came_is_found_before_nccl_is_called(ring: list[RingLinks], nccl: Nccl) -> None:
    member = Member(ring, 0)
    member.until(lambda one: one.dead)
    assert "rank 1 of the ring did not come" in member.communicator.error
    assert not nccl.made


def test_a_meeting_that_was_cut_before_it_began_is_over_at_once(ring: list[RingLinks]) -> None:
    """The thread that gives an epoch up may be quicker than the owner's thread, which then waits for nobody."""
    seat = Seat(1, tuple(map(handshake.Member, range(2))), 0, ring[1].address)
    backend = RingBackend(seat, ring[0], TIMEOUT_S)
    backend.cut("the epoch is over")
    reported: list[str] = []

    def form() -> None:
        try:
            backend.form()
        except BackendError as error:
            reported.append(str(error))

    threading.Thread(target=form, daemon=True).start()
    until(lambda: reported == ["the epoch is over"])
    backend.release()


def test_a_cut_before_the_initialisation_ends_the_meeting(ring: list[RingLinks], nccl: Nccl) -> None:
    member = Member(ring, 0)
    assert member.end() < TIMEOUT_S
    assert not nccl.made


def test_a_cut_in_the_initialisation_aborts_within_the_time_out(ring: list[RingLinks], nccl: Nccl) -> None:
    """A peer that dies after it was reached keeps the owner inside torch; the abort comes when it is out."""
    nccl.dead_in_init = frozenset({1})
    members = [Member(ring, rank) for rank in range(2)]
    until(lambda: [record.inside for record in nccl.made] == ["allreduce", "allreduce"])
    assert all(member.end() < TIMEOUT_S + WAIT_S / 2 for member in members)
    one_owner_and_one_abort(nccl)


def test_a_cut_in_a_sum_aborts_at_once(ring: list[RingLinks], nccl: Nccl) -> None:
    """The other member still computes: the sum waits for it, without a limit."""
    members = formed(ring)
    waiting = members[0].communicator
    waiting.submit(torch.ones(4), wait_for_peers=True)
    until(lambda: any(record.issued == 2 for record in nccl.made))
    assert waiting.busy, "its buffer must not be used again"
    for member in members:
        member.end()
    one_owner_and_one_abort(nccl)
    assert not waiting.busy


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (replace(GOOD, cuda_build=False, nccl_version=()), "this torch has no NCCL"),
        (replace(GOOD, failure="Found no NVIDIA driver on your system.", count=0), "Found no NVIDIA driver"),
        (replace(GOOD, failure="The NVIDIA driver on your system is too old"), "install a driver that fits CUDA"),
        (replace(GOOD, count=0), "torch sees none"),
        (replace(GOOD, torch_version="2.10.0+cu128"), "install torch 2.11 or newer"),
        (replace(GOOD, nccl_version=(2, 25, 1)), "NCCL 2.25.1 is older than 2.26"),
        (replace(GOOD, count=2, local_rank=3), "local rank 3 would share GPU 1 with another rank"),
        (replace(GOOD, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), "is a MIG slice"),
    ],
)
def test_devices_that_do_not_fit_are_refused_with_one_sentence(devices: nccl_start.Devices, words: str) -> None:
    environ: dict[str, str] = {}
    with pytest.raises(ConfigError, match=words) as raised:
        nccl_start.prepare(devices, TIMEOUT_S, environ)
    assert "\n" not in str(raised.value)
    assert not environ


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_RUNTIME_CONNECT", "1"),
        ("NCCL_COMM_BLOCKING", "1"),
        ("TORCH_NCCL_BCAST_UNIQUEID", "0"),
        ("ENABLE_INTRA_NODE_COMM", "1"),
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "15.5"),
        ("TORCH_NCCL_RANKS_PER_ROOT", "64"),
        ("TORCH_NCCL_BLOCKING_WAIT", "maybe"),
    ],
)
def test_a_variable_that_contradicts_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is set, but .*; unset it, or set it to "):
        nccl_start.prepare(GOOD, TIMEOUT_S, {name: value})


def test_what_a_user_has_set_stays() -> None:
    mine = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "60", "TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_DEBUG": "INFO"}
    environ = dict(mine)
    nccl_start.prepare(GOOD, TIMEOUT_S, environ)
    assert environ.items() > mine.items()
