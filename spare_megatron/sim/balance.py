"""Models slow groups that give pieces to faster ones during a step (``--balance``): what --spare-relief does for real.

When the first group has computed its pieces, every group reports which pieces it has started; these stay with it. Then
the earliest time is computed by which all pieces can be done if each group gives up those that it cannot compute by
then and live hosts of the same shards take them. Pieces go directly from a group to a host, and not along chains as in
a real job (controller.rebalance), so the gain is a lower bound. After a death during the step its patch is assigned
first; the shards of pieces are taken from the standing assignment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import Placement
from spare_megatron.theory.endured import Floats

Ints = NDArray[np.int64]
ROUNDS = 10
"""Number of bisections of the interval in which the time of completion lies."""


def completion_s(
    finish: Floats, per_piece: Floats, alive: NDArray[np.bool_], units: Ints, placement: Placement, earliest: float
) -> float:
    """The time at which every piece is computed, in seconds.

    Args:
        finish: [N] times at which the groups would be done without giving pieces up.
        per_piece: [N] seconds per piece.
        alive: [N] whether a group lives.
        units: [r, N] pieces as in an assignment; without rows every group hosts every shard.
        placement: which groups host which shard.
        earliest: time before which groups do not report; they report when the first one is done, at the earliest then.
    """
    own = finish[alive]
    report = max(earliest, float(own.min()))
    left = np.where(alive, np.floor(np.maximum(finish - report, 0.0) / per_piece + 1e-9), 0).astype(np.int64)
    free_at = np.maximum(finish - left * per_piece, report)
    low, high = float(free_at[alive].max()), float(own.max())
    for _ in range(ROUNDS if high > low else 0):
        middle = (low + high) / 2
        room = np.where(alive, np.floor((middle - free_at) / per_piece + 1e-9), 0).astype(np.int64)
        if _fits(np.maximum(left - room, 0), np.maximum(room - left, 0), units, placement):
            high = middle
        else:
            low = middle
    return high


def _fits(surplus: Ints, room: Ints, units: Ints, placement: Placement) -> bool:
    """Whether hosts of the same shards have room for the surplus pieces of all groups, assigned layer by layer."""
    if surplus.sum() > room.sum():
        return False
    if not len(units):
        return True
    hosts = placement.hosts().T
    by_shard = np.zeros_like(surplus)
    for layer, group_of in enumerate(hosts):
        given = np.minimum(surplus[group_of], units[layer])
        by_shard += given
        surplus = surplus.copy()
        surplus[group_of] -= given
    for group_of in hosts:
        taken = np.minimum(by_shard, room[group_of])
        by_shard = by_shard - taken
        room = room.copy()
        room[group_of] -= taken
    return not by_shard.any()
