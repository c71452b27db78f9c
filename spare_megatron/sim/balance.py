"""Slow groups give pieces up inside a step: what that would gain, and what the controller would need for it.

When the first group is done, every group reports what it has started; what it has started stays with it. Then the
earliest time is sought at which all can be done, if a group gives up what it cannot compute by then and live hosts of
the same shards with time left take it. Pieces go straight from a group to a host, not along chains, so this is a lower
bound of the gain. The real controller would need this report frozen before it draws the plan (rule 4 of
docs/protocol.md says that plans only grow); it is not built. After a death inside the step the patch is shared out
first; the shards of its pieces are taken from the standing assignment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import Placement
from spare_megatron.theory.endured import Floats

Ints = NDArray[np.int64]
ROUNDS = 10
"""Halvings of the interval in which the time of completion lies."""


def completion_s(
    finish: Floats, per_piece: Floats, alive: NDArray[np.bool_], units: Ints, placement: Placement, earliest: float
) -> float:
    """When every piece is computed, if the reports come at ``earliest`` or when the first group is done.

    ``finish`` [N] when each group would be done alone, ``per_piece`` [N] seconds, ``units`` [r, N] as in an assignment
    (no rows: every group hosts every shard)."""
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
    """Whether hosts of the same shards take the surplus, layer after layer."""
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
