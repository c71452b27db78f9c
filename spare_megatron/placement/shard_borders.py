"""The layout of state shards: which elements of a rank position's flat gradient buffers belong to which shard.

*State shard* i of S (0 <= i < S) is an S-th of the elements of each gradient buffer of each rank position or, where the
ranks of a group divide a buffer's sum among them (D > 1 with a distributed optimizer), of the part that this rank
keeps. With these elements goes all that the optimizer has for them: fp32 copies, moments, momentum. What it has for no
single element (step counters, loss scale, learning-rate schedule, scales of sums) is not sharded.

Invariants:

1. Each element belongs to exactly one shard, also padding.
2. A border lies where the update of what follows needs nothing from before it: inside a parameter at multiples of the
   parameter's *unit*, counted from its first element, or between two parameters.
3. A border is less than one unit before i S-ths of the buffer. So where the buffer is a row of whole equal units, sizes
   differ by at most one of them, and else by less than two of the largest ones.
4. The layout is a function of the buffer and S alone. S is the number of groups at the job's first start, and is kept
   in its checkpoints. Neither live groups nor what was trained change it, so it is the same on one position of all
   groups at all times.

The worst bug would be an element that belongs to no shard: its state would be neither compared nor fetched.
``tests/pure/test_shard_borders.py`` draws layouts and would find it there. ``tests/megatron/test_optimizer_shards.py``
looks for every element of real optimizers, at the place in the buffers that megatron-core gives it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class UnitRun(NamedTuple):
    """Elements ``start`` to ``stop`` of a buffer, which are a parameter or a part of one."""

    start: int
    stop: int
    first: int
    """The index in the parameter of the element at ``start``."""
    unit: int
    """At least 1: the update of so many elements, counted from the parameter's first one, needs nothing from others."""

    def cut(self, element: int) -> int:
        """The last place in this run, up to ``element`` inside it, at which a border may lie."""
        return max(self.start, element - (self.first + element - self.start) % self.unit)


class ShardSpan(NamedTuple):
    """Elements ``start`` to ``stop`` of a buffer, all of one shard."""

    shard: int
    start: int
    stop: int


class BufferBorders:
    """Where the shards of one buffer begin and end."""

    def __init__(self, runs: Sequence[UnitRun], size: int, shards: int) -> None:
        """
        Args:
            runs: the buffer's parameters, in order and without overlap; what lies between them is padding.
            size: elements of the buffer.
            shards: S, at least 1.
        """
        starts = [run.start for run in runs]

        def border(element: int) -> int:
            number = bisect_right(starts, element) - 1
            inside = number >= 0 and element < runs[number].stop
            return runs[number].cut(element) if inside else element

        self.borders = (*(border(size * number // shards) for number in range(shards)), size)
        """S + 1 elements, not decreasing, from 0 to the size: shard i is from number i to number i + 1."""

    def spans(self, start: int, stop: int) -> Iterator[ShardSpan]:
        """The elements ``start`` to ``stop``, cut at the borders, in order."""
        shard = bisect_right(self.borders, start) - 1
        while start < stop:
            end = min(stop, self.borders[shard + 1])
            if start < end:
                yield ShardSpan(shard, start, end)
            start, shard = end, shard + 1
