"""Memory of the host through which tensors of a device come and go.

A copy runs beside the host only from and to page-locked memory. torch rounds each allocation of it up to a power of
two, so that it may be twice what was asked for, and it takes long to get.

May assume: copies and what reads or writes their device's memory are queued on one stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

BLOCK_BYTES = 64 << 20
"""Smaller tensors share blocks of this size."""
ALIGNED_BYTES = 64
RING_BYTES = 16 << 20
"""What is copied at a time on its way into other memory."""


class PinnedBlocks:
    """Page-locked memory for tensors that are kept: what the rounding of one leaves is for others."""

    def __init__(self) -> None:
        self._rooms: list[torch.Tensor] = []
        """What is left of each block."""

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that nobody else has, with any values."""
        wanted = math.prod(size) * dtype.itemsize
        padded = -(-wanted // ALIGNED_BYTES) * ALIGNED_BYTES
        number = next((number for number, room in enumerate(self._rooms) if len(room) >= padded), len(self._rooms))
        if number == len(self._rooms):
            rounded = 1 << max(padded - 1, BLOCK_BYTES - 1).bit_length()
            self._rooms.append(torch.empty(rounded, dtype=torch.uint8, pin_memory=True))
        room, self._rooms[number] = self._rooms[number][:wanted], self._rooms[number][padded:]
        return room.view(dtype).view(tuple(size))


class DeviceEvent(Protocol):
    """The part of :class:`torch.cuda.Event` that is used."""

    def synchronize(self) -> None: ...


def recorded(device: torch.device) -> DeviceEvent:
    """An event behind what is queued on the current stream of a CUDA device. That need not be the device of the thread,
    which in a new one is number 0: an event that is recorded without a stream would wait for nothing."""
    event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
    event.record(torch.cuda.current_stream(device))
    return event


def copy_to_host(sources: Iterable[torch.Tensor], destination: torch.Tensor) -> None:
    """Fill ``destination``, on the host, with ``sources``, one after the other; all are flat uint8. Returns when all is
    there; what comes from a device comes behind what is queued on its current stream."""
    at = 0
    far: list[tuple[torch.Tensor, torch.Tensor]] = []
    for source in sources:
        place = destination[at : at + len(source)]
        if source.is_cuda:
            far.append((source, place))
        else:
            place.copy_(source)
        at += len(source)
    if far:
        ring = torch.empty(2, RING_BYTES, dtype=torch.uint8, pin_memory=True).unbind()
        copy_by_ring(far, ring, recorded)


def copy_by_ring(
    copies: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ring: Sequence[torch.Tensor],
    event_behind: Callable[[torch.device], DeviceEvent],
) -> None:
    """Make ``copies``, pairs of a source and its destination, through the tensors of ``ring``, which are of one size:
    while one goes on into its destination, the next one is filled. ``event_behind``: :func:`recorded`."""
    filled: list[tuple[DeviceEvent, torch.Tensor, torch.Tensor]] = []

    def empty_oldest() -> None:
        event, memory, place = filled.pop(0)
        event.synchronize()
        place.copy_(memory)

    for number, (source, place) in enumerate(_cut(copies, len(ring[0]))):
        if len(filled) == len(ring):
            empty_oldest()
        memory = ring[number % len(ring)][: len(source)]
        memory.copy_(source, non_blocking=True)
        filled.append((event_behind(source.device), memory, place))
    while filled:
        empty_oldest()


def _cut(copies: Iterable[tuple[torch.Tensor, torch.Tensor]], most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for source, place in copies:
        yield from zip(source.split(most), place.split(most), strict=True)
