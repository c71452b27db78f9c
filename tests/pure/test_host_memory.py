"""What goes between a device and the host neither waits for what else the device has to do, nor takes more page-locked
memory than it needs. The device is a stand-in, which makes the copies that it was given when somebody waits for it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spare_megatron.collectives import buckets
from spare_megatron.collectives.buckets import BucketLayout, BufferPool, Header
from spare_megatron.collectives.reduction import Bfloat16Reduction, PlainReduction
from spare_megatron.kernels import host_memory
from spare_megatron.kernels.host_memory import PinnedBlocks, copy_by_ring
from spare_megatron.transfer import snapshot_shards
from spare_megatron.transfer.transport import SnapshotShard

CPU = torch.device("cpu")


class Device:
    """Makes copies later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[Callable[[], object]] = []
        self.waits = 0
        at_once = torch.Tensor.copy_

        def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if non_blocking:
                self.queued.append(lambda: at_once(to, source))
                return to
            return at_once(to, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)

    def record_event(self, _where: torch.device = CPU) -> Event:
        """As of a stream."""
        event = Event(self)
        event.record()
        return event

    def synchronize(self) -> None:
        self.waits += 1
        self.run(len(self.queued))

    def run(self, number: int) -> None:
        for _ in range(number):
            self.queued.pop(0)()


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._behind = device, [None]

    def record(self) -> None:
        self._device.queued.append(self._behind.clear)

    def synchronize(self) -> None:
        self._device.waits += 1
        while self._behind:
            self._device.run(1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of page-locked allocations, in bytes."""
    sizes: list[int] = []

    def recorded(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def without_a_device(*size: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
            made = make(*size, **rest)
            sizes.extend([made.nbytes] if pin_memory else [])
            return made

        return without_a_device

    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, recorded(getattr(torch, name)))
    return sizes


def rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def test_page_locked_blocks_are_shared(pinned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of a 14B model with TP8, with a sixteenth of its elements and of the size of a block."""
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", host_memory.BLOCK_BYTES // 16)
    layer = (7168 * 5120, 5120 * 5120, 2 * 17408 * 5120, 17408 * 5120, 5120, 5120)
    sizes = [size // 8 // 16 for size in (151936 * 5120, *4 * layer)]
    blocks = PinnedBlocks()
    taken = [blocks.take((size,), torch.float32) for size in sizes]
    needed = sum(one.nbytes for one in taken)
    assert all(size == rounded(size) for size in pinned)
    assert sum(pinned) < 1.2 * needed
    assert sum(rounded(4 * size) for size in sizes) > 1.4 * needed
    for number, one in enumerate(taken):
        one.fill_(number)
    assert [one.unique().tolist() for one in taken] == [[float(number)] for number in range(len(taken))]
    assert blocks.take((3, 5), torch.int16).shape == (3, 5)
    assert blocks.take((), torch.float32).shape == ()


@pytest.mark.parametrize("seed", range(5))
def test_copies_by_a_ring_are_complete_and_overlap(seed: int, device: Device) -> None:
    sizes = random.Random(seed).choices((1, 7, 99, 100, 101, 350), k=9)
    sources = [torch.randint(256, (size,)).byte() for size in sizes]
    places = [torch.zeros_like(one) for one in sources]
    copy_by_ring(
        zip(sources, places, strict=True), torch.zeros(2, 100, dtype=torch.uint8).unbind(), device.record_event
    )
    assert all(map(torch.equal, sources, places))
    assert device.waits == sum(-(-size // 100) for size in sizes)


class Far:
    """A tensor of the fourth device."""

    is_cuda, device = True, torch.device("cuda", 3)


def test_a_thread_of_another_device_waits_for_the_stream_of_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a new thread is number 0."""
    streams, waited = list[str](), list[str]()

    class Recorded:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: str = "the current stream of device 0") -> None:
            streams.append(stream)

        def synchronize(self) -> None:
            waited.extend(streams)

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    assert buckets.ready_fence([torch.zeros(1)]) is None
    fence = buckets.ready_fence([torch.zeros(1), Far()])  # type: ignore[list-item]
    assert (streams, waited) == (["that of cuda:3"], [])
    assert fence is not None
    fence()
    assert waited == ["that of cuda:3"]


@pytest.mark.parametrize("method", [PlainReduction(), Bfloat16Reduction()])
def test_sums_go_to_the_host_and_back_without_a_wait(method: PlainReduction, device: Device) -> None:
    accumulator = torch.ones(10)
    wire = torch.zeros(10, dtype=method.wire_dtype(torch.float32))
    result = torch.zeros_like(wire)
    method.encode(accumulator, wire)
    method.decode(wire, result)
    assert len(device.queued) == 2
    device.synchronize()
    assert result.tolist() == [1.0] * 10


def test_wires_on_the_host_are_of_buckets(pinned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor a little larger than a power of two would take twice its memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 1 << 16)
    tensors = [torch.empty(size) for size in (70_000, 3000)]
    layout = BucketLayout.of(tensors, {}, PlainReduction(), 1 << 14)
    made = BufferPool(CPU, CPU, staged=True).take(layout, User())
    wires = [made.wire(number) for number in range(len(layout.buckets))]
    assert [len(wire) for wire in wires] == [bucket.stop - bucket.start for bucket in layout.buckets]
    assert sum(pinned) < 1.3 * 4 * 73_000 < rounded(4 * 70_000)
    for number, wire in enumerate(wires):
        wire.fill_(number)
    assert [wire.unique().tolist() for wire in wires] == [[float(number)] for number in range(len(wires))]


class User:
    busy = True


class OnDevice(torch.Tensor):
    """A tensor that nobody may look at."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu), "the training stream"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_header_waits_for_its_own_stream_only(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an exchange overlaps, the training stream has a whole backward pass in it."""
    streams: list[torch.device] = []

    def stream(where: torch.device) -> Device:
        streams.append(where)
        return device

    monkeypatch.setattr(buckets, "_reading_stream", stream)
    header = Header(17, ("a", "b"), torch.device("meta"))
    header.values = torch.zeros(header.values.shape, dtype=torch.float64).as_subclass(OnDevice)
    header.write({"b": 3.0, "a": 2.0})
    assert (len(device.queued), device.waits) == (1, 0)
    assert header.read(1) == {"a": 2.0, "b": 3.0}
    assert (len(streams), device.waits) == (0, 0)
    device.run(1)  # and the exchange doubles what it has
    header.values.mul_(2)
    assert header.read(2) == {"a": 4.0, "b": 6.0}
    assert (len(streams), device.waits) == (1, 1)
    assert header.read(3) is None


def landed(incoming: snapshot_shards.ReceiveBuffer, outgoing: snapshot_shards.SendBuffer) -> Iterator[None]:
    """Each chunk of ``outgoing`` arrives."""
    while not incoming.done:
        checksum, data = outgoing.chunk(incoming.chunk)
        while incoming.due:
            room = incoming.room()
            room[:], data = data[: len(room)], data[len(room) :]
            incoming.advance(len(room))
        assert incoming.settle(checksum)
        yield


def test_a_learner_fills_one_chunk_while_the_last_one_goes_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_shards, "CHUNK_BYTES", 100)
    tensors = {name: torch.randn(size) for name, size in (("a", 40), ("b", 1), ("c", 77))}
    outgoing = snapshot_shards.SendBuffer(SnapshotShard(tensors, {}), 0, 1)
    monkeypatch.setattr(snapshot_shards, "in_memory", lambda _tensor: False)
    arrived = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    incoming = snapshot_shards.ReceiveBuffer(arrived, 0, 1)
    incoming._streams = [device]  # type: ignore[list-item]
    chunks = len(list(landed(incoming, outgoing)))
    assert chunks == 5
    assert device.waits == chunks - 1
    assert device.queued
    device.synchronize()
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
