"""How many shards two groups of a cyclic placement share.

Group g hosts the shards (g + offset) mod N. Two groups at distance d (mod N) share one shard for every ordered pair
of offsets whose difference is d, so the whole table of overlaps is the N - 1 counts of differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def difference_counts(num_groups: int, offsets: Sequence[int]) -> NDArray[np.int64]:
    """counts[d], d in 0..N-1: ordered pairs of different offsets whose difference is d mod N."""
    marks = np.asarray(offsets, dtype=np.int64)
    differences = (marks[:, None] - marks[None, :]) % num_groups
    counts = np.bincount(differences.ravel(), minlength=num_groups).astype(np.int64)
    counts[0] -= len(marks)
    return counts


def max_overlap(num_groups: int, offsets: Sequence[int]) -> int:
    """The largest number of shards that two different groups share."""
    counts = difference_counts(num_groups, offsets)
    return int(counts[1:].max(initial=0))


def overlap_bound(num_groups: int, redundancy: int) -> int:
    """No placement of r offsets mod N has a smaller largest overlap than this: r(r-1) differences fall on the N - 1
    distances, and on the distance N/2 (even N) they fall in twos."""
    needed = redundancy * (redundancy - 1)
    bound = 0
    while needed > _room(num_groups, bound):
        bound += 1
    return bound


def _room(num_groups: int, overlap: int) -> int:
    if num_groups % 2:
        return overlap * (num_groups - 1)
    return overlap * (num_groups - 2) + 2 * (overlap // 2)
