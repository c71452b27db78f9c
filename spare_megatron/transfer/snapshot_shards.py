"""A snapshot shard as bytes: a header, then the raw bytes of all tensors in the order of their names.

The header is JSON: the name, dtype and shape of each tensor, and the values; equal snapshot shards have equal headers.
The bytes of all tensors form one *byte space*. Part i of d is a contiguous range of it, whatever tensors it cuts. A
*chunk* is CHUNK_BYTES of a part, and has one checksum.

May assume: tensors are contiguous. Promises: only the bytes of the requested range are copied; a tensor in host memory
is filled in place; bytes of a peer are read as JSON and numbers only, and never executed.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from spare_megatron.kernels import digest
from spare_megatron.kernels.host_memory import copy_to_host
from spare_megatron.transfer.transport import SnapshotShard

CHUNK_BYTES = 4 << 20
ALIGNED_BYTES = 64
"""Parts begin at multiples of this."""
HEADER_BYTES_MAX = 64 << 20


class TensorSpan(NamedTuple):
    """A range of the bytes of one tensor."""

    name: str
    start: int
    stop: int


class ByteSpace:
    """Where the bytes of each tensor of a snapshot shard lie."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors`` may be on any device, also on meta."""
        self._names = sorted(name for name in tensors if tensors[name].nbytes)
        sizes = [tensors[name].nbytes for name in self._names]
        self._ends = list(itertools.accumulate(sizes))
        self.size = self._ends[-1] if sizes else 0
        """The bytes of all tensors."""

    def part(self, number: int, parts: int) -> tuple[int, int]:
        """Start and stop of part ``number`` of ``parts``; they follow each other, and any may be empty."""
        return self._boundary(number, parts), self._boundary(number + 1, parts)

    def spans(self, start: int, stop: int) -> Iterator[TensorSpan]:
        """What start..stop is of each tensor, in order."""
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[number - 1] if number else 0
            end = min(stop, self._ends[number])
            yield TensorSpan(self._names[number], start - first, end - first)
            start, number = end, number + 1

    def _boundary(self, number: int, parts: int) -> int:
        return min(self.size, -(-self.size * number // parts // ALIGNED_BYTES) * ALIGNED_BYTES)


def pack_header(snapshot_shard: SnapshotShard) -> bytes:
    """The header of a snapshot shard. Raises ValueError where it is longer than HEADER_BYTES_MAX, or where a tensor is
    not contiguous; TypeError where a value is not JSON's."""
    entries = []
    for name in sorted(snapshot_shard.tensors):
        tensor = snapshot_shard.tensors[name]
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name} of strides {tensor.stride()} is not contiguous; give .contiguous()")
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    words = json.dumps({"tensors": entries, "values": dict(snapshot_shard.values)}, sort_keys=True).encode()
    if len(words) > HEADER_BYTES_MAX:
        raise ValueError(f"the header of the snapshot shard has {len(words)} bytes, but {HEADER_BYTES_MAX} is the most")
    return words


def read_header(words: bytes) -> SnapshotShard:
    """The snapshot shard of a header, with tensors on the meta device. Raises ValueError where it is no header."""
    try:
        header = json.loads(words)
        entries, values = header["tensors"], header["values"]
        tensors = {
            str(name): torch.empty([int(size) for size in shape], dtype=_dtype(kind), device="meta")
            for name, kind, shape in entries
        }
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError) as error:
        raise ValueError(f"this is no header of a snapshot shard ({error}): {words[:100]!r}") from error
    if not isinstance(values, dict) or len(tensors) != len(entries):
        raise ValueError(f"this is no header of a snapshot shard: {words[:100]!r}")
    return SnapshotShard(tensors, values)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name}")
    return found


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor that is not empty, as uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether a connection can fill this tensor directly."""
    return tensor.device.type == "cpu"


class SendBuffer:
    """A copy of one part of a snapshot shard, as a donor serves it."""

    def __init__(self, snapshot_shard: SnapshotShard, part: int, parts: int) -> None:
        """Copy the part. Raises as :func:`pack_header` does."""
        self.header = pack_header(snapshot_shard)
        self.part, self.parts = part, parts
        self.freed = False
        """Nobody may have it any more; whoever is sending it stops."""
        self._space = ByteSpace(snapshot_shard.tensors)
        self._start, stop = self._space.part(part, parts)
        self.size = stop - self._start
        self._bytes = torch.empty(self.size, dtype=torch.uint8)
        spans = self._space.spans(self._start, stop)
        copy_to_host((flat_bytes(snapshot_shard.tensors[name])[first:end] for name, first, end in spans), self._bytes)

    def chunk(self, number: int) -> tuple[int, memoryview]:
        """The checksum and the bytes of a chunk."""
        first = number * CHUNK_BYTES
        end = min(self.size, first + CHUNK_BYTES)
        spans = list(self._space.spans(self._start + first, self._start + end))
        pieces = self._bytes[first:end].split([span.stop - span.start for span in spans])
        return digest(pieces), self._bytes[first:end].numpy().data


class ReceiveBuffer:
    """Where one part of a snapshot shard arrives, chunk by chunk, in order: the memory of the tensors themselves or,
    for those of other devices, memory of two chunks from which they are filled: one while the other arrives."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> None:
        """Other devices are written on what is their current stream here."""
        self._space = ByteSpace(tensors)
        self._tensors = {name: flat_bytes(tensor) for name, tensor in tensors.items() if tensor.nbytes}
        self._start, stop = self._space.part(part, parts)
        self.size = stop - self._start
        self.reached = 0
        """How many bytes of the part are here; those of whole chunks are right."""
        far = {tensor.device for tensor in self._tensors.values() if not in_memory(tensor)}
        self._streams = [torch.cuda.current_stream(device) for device in far if device.type == "cuda"]
        size = CHUNK_BYTES if far else 0
        self._staging = torch.empty(2, size, dtype=torch.uint8, pin_memory=bool(self._streams)).unbind()
        self._unloaded: list[list[torch.cuda.Event]] = [[], []]
        """Recorded when the devices have read it."""
        self.chunk = 0
        """The number of the present chunk."""
        self._open: list[tuple[TensorSpan, torch.Tensor]] = []
        """What the present chunk is of each tensor, with the memory in which it arrives."""
        self._next = 0
        """Of the open memory, the part that is being filled."""
        self._filled = 0
        """Bytes of it."""
        self._open_chunk()

    @property
    def done(self) -> bool:
        """All of the part is here and right."""
        return self.reached == self.size and not self._open

    @property
    def due(self) -> int:
        """How many bytes of the present chunk are missing."""
        return self._end - self.reached

    def room(self) -> memoryview:
        """The memory of the next bytes, as far as it is contiguous; empty when the chunk is here."""
        return self._open[self._next][1][self._filled :].numpy().data if self.due else memoryview(b"")

    def advance(self, size: int) -> None:
        """Note that the next ``size`` bytes have come, into :meth:`room`."""
        self.reached += size
        self._filled += size
        if self._filled == len(self._open[self._next][1]):
            self._next, self._filled = self._next + 1, 0

    def settle(self, checksum: int) -> bool:
        """Go on with the next chunk where the present one is right; false where it must come again."""
        if digest([memory for _, memory in self._open]) != checksum:
            self.reached = self._first
            self._next, self._filled = 0, 0
            return False
        self._unload()
        self.chunk += 1
        self._open_chunk()
        return True

    def _open_chunk(self) -> None:
        self._first = self.reached
        self._end = min(self.size, self._first + CHUNK_BYTES)
        self._open, at = [], 0
        self._next = self._filled = 0  # of _open, the one that is being filled, and how far
        staging = self._staging[self.chunk % 2]
        for event in self._unloaded[self.chunk % 2]:
            event.synchronize()
        for span in self._space.spans(self._start + self._first, self._start + self._end):
            size, tensor = span.stop - span.start, self._tensors[span.name]
            near = in_memory(tensor)
            self._open.append((span, tensor[span.start : span.stop] if near else staging[at : at + size]))
            at += size

    def _unload(self) -> None:
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            for span, memory in self._open:
                tensor = self._tensors[span.name]
                if not in_memory(tensor):
                    tensor[span.start : span.stop].copy_(memory, non_blocking=True)
            self._unloaded[self.chunk % 2] = [stream.record_event() for stream in self._streams]
