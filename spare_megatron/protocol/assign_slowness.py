"""What lasting slowness means for an assignment: how many pieces a group can compute by an end. Pure.

A group's *slowness* is how long a piece takes it, an *end* when a group is done, both in sixteenths of the time that a
usual group takes for a piece. So a group can own end // slowness pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.plural import counted
from spare_megatron.protocol.assign_types import USUAL

NAMED_MAX = 4
"""A reason names at most this many slow groups."""


def slowness_of(num_groups: int, live: Iterable[int], slow: Mapping[int, int]) -> NDArray[np.int64]:
    """[N]: the slowness of each group: that in ``slow`` where the group is ``live`` and in it, else ``USUAL``."""
    slowness = np.full(num_groups, USUAL, dtype=np.int64)
    for group in slow.keys() & set(live) if slow else ():
        slowness[group] = slow[group]
    return slowness


def least_end(slowness: NDArray[np.int64], units: int) -> int:
    """The least end by which groups of this ``slowness`` can compute ``units`` pieces together; there is one or more
    of them."""
    fastest = int(slowness.min())
    if fastest == slowness.max():
        return -(-units // len(slowness)) * fastest
    low, high = 0, fastest * units
    while low < high:
        middle = (low + high) // 2
        if int((middle // slowness).sum()) >= units:
            high = middle
        else:
            low = middle + 1
    return low


def in_words(slowness: NDArray[np.int64], loads: NDArray[np.int64]) -> str:
    """The slow groups, how many times as long as others they take, and what they own; empty where there are none."""
    slow = np.flatnonzero(slowness > USUAL).tolist()
    if not slow:
        return ""
    named = [
        f"group {group} takes {slowness[group] / USUAL:.2f} times as long for a piece and has {loads[group]}"
        for group in slow[:NAMED_MAX]
    ]
    more = [f"{counted(len(slow) - NAMED_MAX, 'more group')} are slow"] * (len(slow) > NAMED_MAX)
    return "; " + ", ".join(named + more)
