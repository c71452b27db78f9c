"""Cuts flat tensors into buckets, and keeps the buffers that a reduction writes into.

A reduction sends a small header (the layout's digest and the scalars) and then the tensors bucket by bucket.
Accumulators are never written: each bucket is encoded into a *wire* buffer, summed there, and decoded into a *result*.
If wire and result have the same dtype and device they share memory. If the accumulators need no encoding and the
transport can read them, it reads them in place and writes the sums into that memory: fp32 on the CPU costs one buffer
and no copy. Where sums are converted (:mod:`spare_megatron.collectives.converting`), a few buckets share all wire
memory.

Promises: a buffer is handed out again only when its last user is known never to touch it again. An abandoned
operation may write into its buffers until its connections are dead, so buffers belong to a communicator
until that has nothing in flight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Protocol

import torch

from spare_megatron.collectives.converting import Conversion
from spare_megatron.collectives.reduction import GradientReduction
from spare_megatron.kernels.host_memory import PinnedBlocks, recorded

BUCKET_BYTES = 16 << 20
"""Above some MiB the time to fill and drain the ring does not show any more, and larger buckets gain nothing."""
NCCL_BUCKET_BYTES = 64 << 20
"""A call of NCCL takes as long as some ten MiB take to move (docs/gpu_costs.md)."""
OVERLAPPED_BUCKETS = 8
"""An overlapped reduction is cut into at least so many buckets, unless they would be smaller than LEAST_BYTES: a single
bucket could not leave before everything is computed."""
LEAST_BYTES = 16 << 10
ALIGNMENT = 64
"""Buckets start at multiples of this many elements."""
SHARED = 840 * ALIGNMENT
"""Large buckets are multiples of this many elements, so that up to eight members, and 10, 12, 14 or 15, can cut them in
equal chunks that are multiples of ALIGNMENT."""
WINDOW = 4
"""Number of buckets of converted sums that have wire memory at the same time. Where a bucket's wire holds a copy, the
bucket so many places behind it is copied only when its sum has been taken."""
HEADER_STEP = 128
"""Header sizes are multiples of this many values: groups that disagree on a few scalars still exchange headers of the
same size, so that the digests can show the difference."""


@dataclass(frozen=True)
class Bucket:
    """Elements ``start:stop`` of flat tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """What groups must agree on before they add their buckets."""

    method: str
    shapes: tuple[tuple[int, torch.dtype, torch.dtype, torch.dtype], ...]
    """For each tensor: elements, and the dtypes of accumulator, wire and result."""
    scalars: tuple[str, ...]
    bucket_bytes: int
    converted: int = 0
    """The sums of the first so many tensors are converted."""
    check_vector_size: int = 0

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        scalars: Mapping[str, float],
        method: GradientReduction,
        bucket_bytes: int,
        conversion: Conversion | None = None,
    ) -> BucketLayout:
        """The layout of a request. Raises AssertionError for a tensor that is not flat and contiguous."""
        converted = 0 if conversion is None else conversion.tensors
        for number, tensor in enumerate(tensors):
            assert tensor.dim() == 1, f"tensor {number} to reduce has shape {tuple(tensor.shape)}, not one dimension"
            assert tensor.is_contiguous(), f"tensor {number} to reduce is not contiguous"
        results = [method.result_dtype(tensor.dtype) for tensor in tensors]
        check_vector_size = 0
        if conversion is not None:
            results[:converted] = [conversion.dtype] * converted
            check_vector_size = conversion.check_vector_size
        shapes = tuple(
            (tensor.numel(), tensor.dtype, method.wire_dtype(tensor.dtype), result)
            for tensor, result in zip(tensors, results, strict=True)
        )
        return cls(method.name, shapes, tuple(sorted(scalars)), bucket_bytes, converted, check_vector_size)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order in which they travel. They are at least two where there are two elements, so that
        there is always a moment after one bucket was sent and before the last one ends."""
        buckets = self._cut(self.bucket_bytes)
        if len(buckets) == 1 and buckets[0].stop > 1:
            only = buckets[0]
            middle = max(1, only.stop // 2 // ALIGNMENT * ALIGNMENT)
            return (Bucket(only.tensor, 0, middle), Bucket(only.tensor, middle, only.stop))
        return buckets

    def is_converted(self, number: int) -> bool:
        """Whether the sum of bucket ``number`` is converted."""
        return self.buckets[number].tensor < self.converted

    @cached_property
    def digest(self) -> int:
        """A hash of the layout, which groups compare."""
        return _digest(repr(self))

    def _cut(self, bucket_bytes: int) -> tuple[Bucket, ...]:
        buckets: list[Bucket] = []
        for number, (size, _, wire, _) in enumerate(self.shapes):
            most = bucket_bytes // wire.itemsize
            unit = SHARED if most >= 8 * SHARED else ALIGNMENT
            parts = -(-size // max(unit, most // unit * unit))
            step = -(-size // parts) if parts else 0
            step = -(-step // unit) * unit
            buckets += [Bucket(number, start, min(start + step, size)) for start in range(0, size, step or 1)]
        return tuple(buckets)


def _digest(text: str) -> int:
    """40 bits of a hash: n of them sum exactly in float64 for any number of groups below 8192."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big")


@lru_cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that does not wait for what the training stream computes."""
    return torch.cuda.Stream(device, priority=-1)


class Header:
    """A digest and scalars, summed like a bucket: where all n members send the same digest, the sum is n times it.

    It is written and read while a backward pass is queued on the device, and waits for none of that."""

    def __init__(self, digest: int, names: tuple[str, ...], device: torch.device) -> None:
        size = -(-(1 + len(names)) // HEADER_STEP) * HEADER_STEP
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=torch.cuda.is_available())
        self.values = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._sent, self._names = digest, names

    @classmethod
    def of(cls, scalars: Mapping[str, float], device: torch.device, about: object = None) -> Header:
        """A header for ``scalars`` whose digest is of their names and of the text of ``about``, on ``device``."""
        names = tuple(sorted(scalars))
        header = cls(_digest(repr((names, about))), names, device)
        header.write(scalars)
        return header

    def write(self, scalars: Mapping[str, float]) -> None:
        """Write the digest and this group's scalars into :attr:`values`."""
        values = [float(self._sent), *(float(scalars[name]) for name in self._names)]
        self._host.zero_()
        self._host[: len(values)].copy_(torch.tensor(values, dtype=torch.float64))
        if self.values is not self._host:
            self.values.copy_(self._host, non_blocking=True)

    def read(self, groups: int) -> dict[str, float] | None:
        """The summed scalars, or None when the groups do not agree on the digest. The sum is known to be complete; that
        of one group is what it wrote."""
        if self.values is not self._host and groups > 1:
            stream = _reading_stream(self.values.device)
            with torch.cuda.stream(stream):
                self._host.copy_(self.values, non_blocking=True)
            stream.synchronize()
        values = self._host.tolist()
        if values[0] != float(groups * self._sent):
            return None
        return dict(zip(self._names, values[1:], strict=False))


def overlapped_bytes(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> int:
    """The bucket size of an overlapped reduction; the same on every member, because their tensors have the same
    sizes."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return min(bucket_bytes, max(LEAST_BYTES, total // OVERLAPPED_BUCKETS))


class User(Protocol):
    """Something whose operations may still write into a buffer: a communicator."""

    @property
    def busy(self) -> bool:
        """Whether some operation that was started may still touch its buffer."""


class Buffers:
    """The header, wire buffers and results of one reduction."""

    def __init__(
        self, layout: BucketLayout, wire_device: torch.device, result_device: torch.device, staged: bool
    ) -> None:
        """``staged``: wires and results never share memory, even where their devices and dtypes are equal."""
        self.layout, self.staged = layout, staged
        self.user: User | None = None
        self.tail: Header | None = None
        """The header that travels last, with the scalars, in an overlapped reduction; kept as long as these buffers."""
        pin = wire_device.type == "cpu" and torch.cuda.is_available()
        self.header = Header(layout.digest, layout.scalars, wire_device)
        self.check_vector = torch.zeros(layout.check_vector_size, dtype=torch.int64, device=wire_device, pin_memory=pin)

        blocks = PinnedBlocks() if pin else None

        def wires_of(sizes: Iterable[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
            if blocks is not None:
                return [blocks.take((size,), dtype) for size, dtype in sizes]
            return [torch.empty(size, dtype=dtype, device=wire_device) for size, dtype in sizes]

        travelling = [
            (one.stop - one.start, layout.shapes[one.tensor][2])
            for one in layout.buckets
            if one.tensor < layout.converted
        ]
        assert len({dtype for _, dtype in travelling}) <= 1, "converted sums of several dtypes"
        self._window = wires_of(
            [max(travelling, key=itemgetter(0))] * min(WINDOW, len(travelling)) if travelling else []
        )
        kept = layout.shapes[layout.converted :]
        self._apart = len(travelling) if pin and staged else -1
        """The number of the first bucket that has a wire of its own, and not a part of its tensor's: large tensors do
        not fit the blocks of page-locked memory. -1: none has."""
        buckets = ((one.stop - one.start, layout.shapes[one.tensor][2]) for one in layout.buckets[self._apart :])
        self._wires = wires_of(buckets if self._apart >= 0 else ((size, wire) for size, _, wire, _ in kept))
        self.results = (
            *(
                torch.empty(size, dtype=dtype, device=result_device)
                for size, _, _, dtype in layout.shapes[: layout.converted]
            ),
            *(
                self._wires[number]
                if wire == dtype and not staged
                else torch.empty(size, dtype=dtype, device=result_device)
                for number, (size, _, wire, dtype) in enumerate(kept)
            ),
        )

    def wire(self, number: int) -> torch.Tensor:
        """The wire buffer of bucket ``number``; where it is converted, that of the bucket WINDOW before it, too."""
        bucket = self.layout.buckets[number]
        if self.layout.is_converted(number):
            return self._window[number % WINDOW][: bucket.stop - bucket.start]
        if self._apart >= 0:
            return self._wires[number - self._apart]
        return self._wires[bucket.tensor - self.layout.converted][bucket.start : bucket.stop]

    def result(self, number: int) -> torch.Tensor:
        """The part of the results into which the sum of bucket ``number`` is decoded or converted."""
        bucket = self.layout.buckets[number]
        return self.results[bucket.tensor][bucket.start : bucket.stop]

    def ready_fence(self) -> Callable[[], None] | None:
        """A function that waits until everything written so far is complete, for the thread that sends it; None where
        no wait is needed. CUDA kernels run behind the thread that starts them, and that thread must not wait for
        them."""
        return ready_fence((*self._window, *self._wires, *self.results))


def ready_fence(written: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """:meth:`Buffers.ready_fence` of some tensors."""
    device = next((one.device for one in written if one.is_cuda), None)
    return None if device is None else recorded(device).synchronize


class BufferPool:
    """Hands out one set of buffers at a time. Used only by the thread that reduces."""

    def __init__(self, wire_device: torch.device, result_device: torch.device, staged: bool) -> None:
        self._places = (wire_device, result_device, staged)
        self._sets: list[Buffers] = []

    def free(self, layout: BucketLayout) -> bool:
        """Whether :meth:`take` would need no new memory."""
        return all(kept.layout != layout for kept in self._sets) or self._idle(layout) is not None

    def take(self, layout: BucketLayout, user: User) -> Buffers:
        """A set of buffers that nobody but ``user`` writes to. The results of the last reduction are no longer
        valid."""
        chosen = self._idle(layout) or Buffers(layout, *self._places)
        chosen.user = user
        busy = [kept for kept in self._sets if kept is not chosen and kept.user is not None and kept.user.busy]
        self._sets = [*busy, chosen]
        return chosen

    def _idle(self, layout: BucketLayout) -> Buffers | None:
        for kept in self._sets:
            if kept.layout == layout and (kept.user is None or not kept.user.busy):
                return kept
        return None
