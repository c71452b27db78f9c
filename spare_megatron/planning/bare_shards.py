"""Computes how often a loss leaves a shard without a live host, and for how long the step then waits for its pieces:
for groups that adopt the shard, or for one of its hosts that is coming back. docs/theory.md, section 4.

A shard without a live host is called bare.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spare_megatron.planning.endured import Floats

MOMENTS = 64
"""Number of moments of a loss, evenly spaced over the computing of a step, over which is averaged."""


@dataclass(frozen=True)
class Rescue:
    """Who computes the pieces of a bare shard."""

    wait_s: float
    """Seconds from the loss until they can begin: adopters open the data, a host that comes back takes the state."""
    hosts: int
    """Number of groups among which the K pieces are shared."""


def bare_chance(survival: Floats, lost: NDArray[np.int64] | int, more: NDArray[np.int64] | int = 1) -> Floats:
    """The chance that one of the next ``more`` losses after ``lost`` leaves some shard bare: 1 - S_(k + more) / S_k.

    Where S_k is 0, with so many lost, it is 1. ``survival`` is [N + 1], S_k at k."""
    last = len(survival) - 1
    now = survival[np.minimum(lost, last)]
    onward = survival[np.minimum(np.asarray(lost) + more, last)]
    return np.asarray(np.clip(np.where(now > 0, 1 - onward / np.maximum(now, 1e-300), 1.0), 0.0, 1.0))


def waiting_s(rescue: Rescue, own_s: Floats, computing_s: Floats, reduce_s: float, shard_s: float) -> Floats:
    """The mean time by which a step ends later because one of its losses left a shard bare, in seconds.

    The loss comes at a uniform time t of the step, which computes for C and reduces for a. The pieces are begun at the
    later of t + A and the end of the hosts' own work x, and take p: while the step computes it ends later by

        max(0, max(x, t + A) + p - C),      p = shard_s / hosts,

    and in the reduction, which waits for them and begins anew, by A + p.

    Args:
        rescue: A = ``wait_s`` and the number of hosts.
        own_s: x, for each state.
        computing_s: C, for each state.
        reduce_s: a.
        shard_s: time in which one group computes the K pieces of a shard.
    """
    own, computing = np.atleast_1d(np.asarray(own_s, dtype=float)), np.atleast_1d(np.asarray(computing_s, dtype=float))
    pieces_s = shard_s / rescue.hosts
    moments = (np.arange(MOMENTS) + 0.5) / MOMENTS * computing[:, None]
    ends = np.maximum(own[:, None], moments + rescue.wait_s) + pieces_s
    later = np.maximum(ends - computing[:, None], 0.0).mean(axis=1)
    step_s = np.maximum(computing + reduce_s, 1e-9)
    return np.asarray((later * computing + (rescue.wait_s + pieces_s) * reduce_s) / step_s)
