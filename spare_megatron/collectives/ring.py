"""One member's part of a ring all-reduce, as the two streams of bytes that it sends to its right and receives from its
left.

N members cut a flat tensor in N chunks. In step k = 0 .. 2N-3 a member sends chunk S(k) = rank - k (mod N)
to its right and receives chunk S(k+1) from its left. A chunk that comes in the first N-1 steps is a partial sum and
is added; one that comes later is the sum and replaces. So every chunk goes round twice, 2(N-1)/N of the tensor
in each direction, which is the least possible (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
Each chunk is added up once, in one order, so all members get the same bits.

Where sums are converted, a member does that with its chunk, whose sum is complete in step N-2, and results go round in
the later steps: fp32 gradients of int64 sums are 12 bytes an element instead of 16 on the way, and fewer as partial
sums are packed (:mod:`spare_megatron.collectives.packing`).

A *gather* (:class:`Shares`) is only the second half: chunk k is what member k gives, of any size, and goes round once,
or only as far as somebody needs it.

Chunks are cut in segments, and a segment goes out as soon as the segment of the step before has come in: both
directions are busy all the time. The class knows no sockets: its caller moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from spare_megatron.collectives import packing as packing_of
from spare_megatron.collectives.converting import ConvertedBucket

SEGMENT_BYTES = 1 << 20
SLACK_BYTES = 8
"""So many bytes beyond a packed segment compiled code may touch."""


class Packing(NamedTuple):
    """Room for packed segments."""

    incoming: torch.Tensor
    outgoing: torch.Tensor

    @classmethod
    def of(cls, count: int) -> Packing:
        """Room for segments of up to so many elements."""
        size = packing_of.most_bytes(count) + SLACK_BYTES
        return cls(torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8))


@dataclass(frozen=True)
class Shares:
    """What each member gives to a flat tensor that is gathered, one share after the other. By rank, the same on every
    member."""

    numels: tuple[int, ...]
    """Elements."""
    hops: tuple[int, ...]
    """How many members, one after the other to the right of the one that gives a share, receive it."""

    @property
    def borders(self) -> tuple[int, ...]:
        """Where each share begins, and where the last one ends."""
        return tuple(accumulate(self.numels, initial=0))


class RingStreams:
    """One member's part of one all-reduce, in place or from a tensor that is only read, or of one gather, in place."""

    def __init__(
        self,
        wire: torch.Tensor,
        rank: int,
        size: int,
        scratch: torch.Tensor,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
        *,
        shares: Shares | None = None,
        packing: Packing | None = None,
    ) -> None:
        """
        Args:
            wire: flat, contiguous, on the CPU; the same number of elements on every member. The sum is written here.
            scratch: bytes for one segment, the same number on every member; its contents are lost.
            source: what this member adds to the sum, of the shape and dtype of ``wire``; None: what ``wire`` holds.
            converted: what the sum is turned into; ``wire`` then only holds sums that are not complete.
            shares: ``wire`` is gathered, not summed.
            packing: int64 partial sums travel packed; the same on every member.
        """
        self._wire = wire
        self._source = wire if source is None else source
        self._rank = rank
        self._size = size
        self._bytes = wire.view(torch.uint8).numpy().data
        self._source_bytes = self._bytes if source is None else source.view(torch.uint8).numpy().data
        self._converted = converted
        self._result = wire if converted is None else converted.result
        self._result_bytes = self._result.view(torch.uint8).numpy().data
        self._scratch = scratch.view(wire.dtype)
        self._scratch_bytes = scratch.numpy().data
        self._segment = self._scratch.numel()
        chunk, self._hops = -(-wire.numel() // size), None if shares is None else shares.hops
        self._borders = [min(rank * chunk, wire.numel()) for rank in range(size + 1)]
        if shares is not None:
            self._borders, chunk = list(shares.borders), max(shares.numels)
        self._segments = -(-chunk // self._segment)
        """Number of segments of the largest chunk; segment q of a stream belongs to step q // segments."""
        self._adding = 0 if shares is not None else size - 1
        """The number of steps in which what comes is added."""
        self._total = (self._adding + size - 1) * self._segments
        self._packing = packing if wire.dtype == torch.int64 else None
        self._packed_out = (-1, b"")
        """A segment's number, and its bytes as they are sent."""
        self._sent = self._received = 0
        """Numbers of segments that are complete."""
        self._sent_bytes = self._received_bytes = 0
        """Bytes of the segment after those."""
        self._skip_empty()

    @property
    def over(self) -> bool:
        """Whether everything is sent and received."""
        return self._sent == self._total and self._received == self._total

    @property
    def outgoing(self) -> memoryview | None:
        """Bytes that can be sent to the right at once; None when all is sent, or when the next ones depend on bytes
        that have not come from the left yet."""
        if self._sent == self._total or self._sent >= self._received + self._segments:
            return None
        step = self._sent // self._segments
        start, stop = self._leaving(self._sent)
        if step < self._adding and self._packing is not None:
            return self._packed(step, start, stop)[self._sent_bytes :]
        if step >= self._adding:
            held = self._result_bytes
        else:
            held = self._bytes if step else self._source_bytes
        return self._view(held, start, stop, self._itemsize(step))[self._sent_bytes :]

    @property
    def incoming(self) -> memoryview | None:
        """The memory for the next bytes from the left; None when all is received."""
        if self._received == self._total:
            return None
        step = self._received // self._segments
        start, stop = self._coming(self._received)
        if self.comes_packed:
            return self._packed_room(stop - start)[self._received_bytes :]
        if step < self._adding:
            return self._scratch_bytes[: (stop - start) * self._wire.itemsize][self._received_bytes :]
        return self._view(self._result_bytes, start, stop, self._result.itemsize)[self._received_bytes :]

    @property
    def all_sent(self) -> bool:
        """Whether everything is sent; something may still be missing from the left."""
        return self._sent == self._total

    def sent(self, number: int) -> None:
        """Note that the first ``number`` bytes of ``outgoing`` are sent."""
        step = self._sent // self._segments
        start, stop = self._leaving(self._sent)
        self._sent_bytes += number
        size = (stop - start) * self._itemsize(step)
        if step < self._adding and self._packing is not None:
            size = len(self._packed(step, start, stop))
        if self._sent_bytes == size:
            self._sent, self._sent_bytes = self._sent + 1, 0
            self._skip_empty()

    def received(self, number: int) -> None:
        """Note that the first ``number`` bytes of ``incoming`` are filled."""
        step = self._received // self._segments
        start, stop = self._coming(self._received)
        self._received_bytes += number
        count = stop - start
        size = len(self._packed_room(count)) if self.comes_packed else count * self._itemsize(step)
        if self._received_bytes == size:
            if self.comes_packed:
                self._unpack(size, count)
            if step < self._adding:
                self._add(start, stop, complete=step == self._adding - 1)
            self._received, self._received_bytes = self._received + 1, 0
            self._skip_empty()

    @property
    def comes_packed(self) -> bool:
        """Whether the segment that comes next is packed."""
        return self._packing is not None and self._received < self._adding * self._segments

    @property
    def in_parts(self) -> bool:
        """Whether the size of the segment that comes is not known: its widths have not come, or are of a frame that the
        other side has broken off."""
        if self._packing is None or not self.comes_packed:
            return False
        start, stop = self._coming(self._received)
        number = packing_of.blocks(stop - start)
        return self._received_bytes < number or len(self._packed_room(stop - start)) == len(self._packing.incoming)

    def _packed(self, step: int, start: int, stop: int) -> memoryview:
        """The segment that goes, packed when it is asked for first."""
        if self._packed_out[0] != self._sent:
            held = self._wire if step else self._source
            self._packed_out = (self._sent, packing_of.packed(held[start:stop].numpy()).tobytes())
        return memoryview(self._packed_out[1])

    def _packed_room(self, count: int) -> memoryview:
        """Room for the widths of the segment that comes, or, once they have come, for all of it."""
        assert self._packing is not None
        number, room = packing_of.blocks(count), self._packing.incoming.numpy()
        size = number if self._received_bytes < number else packing_of.packed_bytes(room[:number], count)
        return room.data[: size or len(room)]

    def _unpack(self, size: int, count: int) -> None:
        assert self._packing is not None
        packing_of.unpacked(self._packing.incoming.numpy()[:size], count, self._scratch.numpy()[:count])

    def _add(self, start: int, stop: int, complete: bool) -> None:
        mine, come = self._source[start:stop], self._scratch[: stop - start]
        if complete and self._converted is not None:
            self._converted.convert(start, mine, come)
        else:
            torch.add(mine, come, out=self._wire[start:stop])

    def _itemsize(self, step: int) -> int:
        """Bytes of an element that travels in ``step``."""
        return self._wire.itemsize if step < self._adding else self._result.itemsize

    def _leaving(self, number: int) -> tuple[int, int]:
        """(start, stop) of the elements of segment ``number`` of the stream to the right."""
        step = number // self._segments
        return self._range(number, self._rank - step, step)

    def _coming(self, number: int) -> tuple[int, int]:
        """(start, stop) of the elements of segment ``number`` of the stream from the left."""
        step = number // self._segments
        return self._range(number, self._rank - step - 1, step)

    def _range(self, number: int, chunk: int, step: int) -> tuple[int, int]:
        chunk %= self._size
        end = self._borders[chunk + 1]
        start = min(self._borders[chunk] + number % self._segments * self._segment, end)
        if self._hops is not None and step >= self._hops[chunk]:
            return end, end
        return start, min(start + self._segment, end)

    def _view(self, of: memoryview, start: int, stop: int, itemsize: int) -> memoryview:
        return of[start * itemsize : stop * itemsize]

    def _skip_empty(self) -> None:
        """Pass over empty segments: chunks may be shorter than the largest one, or empty."""
        while self._received < self._total and not _length(*self._coming(self._received)):
            self._received += 1
        while self._sent < self._total and not _length(*self._leaving(self._sent)):
            self._sent += 1


def _length(start: int, stop: int) -> int:
    return stop - start
