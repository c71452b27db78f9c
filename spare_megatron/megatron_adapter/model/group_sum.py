"""Sums a buffer over the ranks of a group that share its parameters (context and inner data ranks), out of place.

Where megatron-core's distributed optimizer splits the optimizer's state over these ranks, each of them needs only the
sum of its own part of every bucket: then the sum is a reduce-scatter instead of an all-reduce, and only that part is
reduced over groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class BufferSlice:
    """Elements ``start`` to ``stop`` of a buffer, which begin at element ``at`` of the tensor that a rank sums over
    groups."""

    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, summed: torch.Tensor) -> torch.Tensor:
        """These elements of ``summed``, the tensor that a rank sums over groups; a view."""
        return summed[self.at : self.at + self.size]

    def cut(self, start: int, stop: int) -> BufferSlice | None:
        """The elements that are also in ``start`` to ``stop``; None where there are none."""
        first, end = max(start, self.start), min(stop, self.stop)
        return BufferSlice(first, end, self.at + first - self.start) if first < end else None


def parts_of(buffer: Any, group: dist.ProcessGroup, rank: int | None = None) -> list[BufferSlice]:
    """The parts of a megatron-core gradient buffer whose sum ``rank`` of the group (default: this one) keeps: all of
    it, or its shard of each bucket (as megatron-core's ``shard_buffer``)."""
    if not buffer.ddp_config.use_distributed_optimizer or group.size() == 1:
        return [BufferSlice(0, buffer.grad_data.numel(), 0)]
    rank, parts, at = group.rank() if rank is None else rank, [], 0
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // group.size()
        parts.append(BufferSlice(bucket.offset + rank * size, bucket.offset + (rank + 1) * size, at))
        at += size
    return parts


class GroupSum:
    """A flat tensor of this rank, which is not changed, and its sum over ``group``."""

    def __init__(self, mine: torch.Tensor, group: dist.ProcessGroup, parts: Sequence[BufferSlice]) -> None:
        """``parts`` are the parts of the sum that this rank keeps (:func:`parts_of`)."""
        self.mine, self.group, self.parts = mine, group, parts
        self.scattered = sum(part.size for part in parts) < mine.numel()
        size = sum(part.size for part in parts)
        self._sum = mine.new_empty(size) if group.size() > 1 else None

    def over_ranks(self) -> torch.Tensor:
        """The sum of this rank's parts, in memory that the next call reuses; the tensor itself where no other rank
        shares it. Collective over ``group``."""
        if self._sum is None:
            return self.mine
        if not self.scattered:
            self._sum.copy_(self.mine)
            dist.all_reduce(self._sum, group=self.group)
            return self._sum
        ranks, rank = self.group.size(), self.group.rank()
        for part in self.parts:
            first = part.start - rank * part.size
            bucket = self.mine[first : first + ranks * part.size]
            dist.reduce_scatter_tensor(part.of(self._sum), bucket, group=self.group)
        return self._sum
