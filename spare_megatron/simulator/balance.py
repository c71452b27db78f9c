"""Models slow groups that give pieces to faster ones during a step (``--balance``): what --spare-relief does for real.

When the first group has computed its pieces, every group reports which pieces it has started; these stay with it. Then
the earliest time is computed by which all pieces can be done if each group gives up those that it cannot compute by
then. As in a real job (protocol.rebalance) pieces move along chains: who takes a piece may pass one of its own on.
So all groups together must have time for all pieces, and the hosts of a slow group's shards for those that it gives up,
if they pass on as many of their own as their hosts can take in turn, and so forth. After a death during the step its
patch is assigned first; the shards of pieces are taken from the steady-state assignment.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import Placement
from spare_megatron.planning.endured import Floats

Ints = NDArray[np.int64]
ROUNDS = 10
"""Number of bisections of the interval in which the time of completion lies."""
STEP = 0.25
"""The time is that many pieces exact where hosts are what limits it."""
LINKS = 8
"""Longest chain that is looked at."""


class Completion:
    """When every piece of a step is computed."""

    def __init__(
        self,
        finish: Floats,
        per_piece: Floats,
        alive: NDArray[np.bool_],
        units: Ints,
        placement: Placement,
        earliest: float,
    ) -> None:
        """
        Args:
            finish: [N] times at which the groups would be done without giving pieces up, in seconds.
            per_piece: [N] seconds per piece.
            alive: [N] whether a group lives.
            units: [L, N] pieces as in an assignment; without rows every group hosts every shard.
            placement: which groups host which shard.
            earliest: time before which groups do not report; they report when the first one is done, at the earliest
                then.
        """
        own = finish[alive]
        report = max(earliest, float(own.min()))
        left = np.where(alive, np.floor(np.maximum(finish - report, 0.0) / per_piece + 1e-9), 0).astype(np.int64)
        self._free_at = np.maximum(finish - left * per_piece, report)
        self._alive, self._per_piece, self._left = alive, per_piece, left
        self._units, self._placement = units, placement
        low, self._high_s, total = float(self._free_at[alive].max()), float(own.max()), left.sum()
        self.least_s = _earliest(low, self._high_s, lambda until_s: bool(self._slots(until_s).sum() >= total))
        """The time at which all could be done if every group hosted every shard: never after :meth:`time_s`."""

    def time_s(self, near_s: float = 0.0) -> float:
        """The time at which every piece is computed, in seconds; looked for first at ``near_s`` after the least."""
        if not len(self._units):
            return self.least_s
        room = _Room(self._left, self._units, self._placement)
        finest = more = STEP * float(np.median(self._per_piece[self._alive]))
        bound = min(self.least_s + near_s, self._high_s)
        below = self.least_s
        if room.fits(self._slots(bound)):
            while bound > self.least_s:
                lower = max(bound - more, self.least_s)
                if not room.fits(self._slots(lower)):
                    below = lower
                    break
                bound, more = lower, 2 * more
        else:
            below, bound = bound, min(bound + more, self._high_s)
            while bound < self._high_s and not room.fits(self._slots(bound)):
                more *= 2
                below, bound = bound, min(bound + more, self._high_s)
        while bound - below > finest:
            middle = (below + bound) / 2
            if room.fits(self._slots(middle)):
                bound = middle
            else:
                below = middle
        return bound

    def _slots(self, until_s: float) -> Ints:
        """[N] how many pieces every group has time for."""
        room = np.floor((until_s - self._free_at) / self._per_piece + 1e-9)
        return np.where(self._alive, np.maximum(room, 0.0), 0.0).astype(np.int64)


def _earliest(low: float, high: float, enough: Callable[[float], bool]) -> float:
    """A time at which there is enough, near the first one; there is at ``high``."""
    for _ in range(ROUNDS if high > low else 0):
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


class _Room:
    """Whether the hosts of what groups cannot compute themselves can take it, assigned layer by layer."""

    def __init__(self, left: Ints, units: Ints, placement: Placement) -> None:
        """``left``: [N] how many pieces groups have; ``units`` and ``placement``: see :class:`Completion`."""
        layers, rows = placement.by_layer, np.flatnonzero(units.any(axis=1))
        self._hosts, self._real = layers.hosts, layers.real
        self._left, self._left_float = left, left.astype(np.float64)
        self._others = np.ascontiguousarray(placement.hosts().T)
        of_group = np.take_along_axis(units[rows], layers.stacks[rows], axis=1)
        self._up_to = of_group.cumsum(axis=0)
        """[L, N]: a group's pieces of its shards up to this layer."""
        self._place = layers.hosts[rows] + np.arange(len(rows))[:, None] * len(left)
        """[L, N]: where a shard's pieces at a layer are in such a table."""

    def fits(self, slots: Ints) -> bool:
        """Whether that is so where the groups have time for ``slots`` [N] pieces."""
        more = self._left - slots
        surplus, spare = np.maximum(more, 0), np.maximum(-more, 0)
        room = np.minimum(self._takes(surplus, spare), slots)
        given = np.minimum(self._up_to, surplus)
        given[1:] -= given[:-1].copy()
        by_shard = given.take(self._place).sum(axis=0)
        shards = np.flatnonzero(by_shard)
        by_shard, hosts = by_shard[shards], self._hosts[:, shards]
        real = None if self._real is None else self._real[:, shards]
        for layer, group_of in enumerate(hosts):
            taken = np.minimum(by_shard, room[group_of])
            if real is not None:
                taken *= real[layer]
            by_shard -= taken
            room[group_of] -= taken
        return not by_shard.any()

    def _takes(self, surplus: Ints, spare: Ints) -> Ints:
        """[N] pieces that each group can take, of which it passes on as many of its own as their hosts can take."""
        others = max(1, len(self._others) - 1)
        own, takes = (spare - surplus).astype(np.float64), spare.astype(np.float64)
        theirs = np.empty(self._others.shape)
        for _ in range(LINKS):  # a host keeps an equal share of what it takes for each of the shards that it hosts
            onward = takes.take(self._others, out=theirs, mode="clip").sum(axis=0)
            onward -= takes
            onward /= others
            np.minimum(onward, self._left_float, out=onward)
            onward += own
            takes = np.maximum(onward, 0.0, out=onward)
        return np.floor(takes + 1e-9).astype(np.int64)
