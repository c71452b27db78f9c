"""Computes how often a set of shards is short of hosts, so that some group must take more than a given load.

A plan with largest load x (in shards) exists iff every set of a shards has at least a / x live hosts (Hall). Groups
are lost independently with probability p. The graph of shards and hosts around any shard or group is a tree (each shard
has r hosts, each group r shards), up to cycles that independent offsets make rare. On a tree, from the leaves inwards:

- a shard asks a host for what its other live hosts have no room for: X = max(0, K - sum of their room);
- a host has room for what the others of its shards do not ask of it: s = max(0, C - sum of what they ask).

Iterating the distributions of X and s gives those of a long tree ("cavity method"). A short set then shows at each of
its nodes and edges, and a tree has one node more than edges: sets = shards short + groups short - edges short.
That count per shard is v(r, x, p), x = C / K; by the integrality of flows it depends on K and C only through x.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from spare_megatron.planning.endured import Floats

ROUNDS = 6
"""Number of iterations, which is the longest chain that counts; longer ones do not matter where short sets are rare."""


def triangles_per_shard(num_groups: int, offsets: Sequence[int]) -> float:
    """Number, per shard, of sets of three shards of which each pair shares another group. Independent offsets do not
    avoid these smallest cycles, because differences of offsets commute. It is at least C(r, 3), and more where the sum
    of two differences is a third."""
    marks = np.asarray(offsets)
    pairs = (marks[:, None] - marks[None, :])[~np.eye(len(marks), dtype=bool)] % num_groups
    thirds = np.bincount(pairs, minlength=num_groups)[-(pairs[:, None] + pairs[None, :]) % num_groups]
    r = len(marks)
    # Each set is counted six times: from three shards, in two orders. Three shards of one group are counted too, in
    # r (r - 1) (r - 2) terms.
    return float(thirds.sum() - r * (r - 1) * (r - 2)) / 6


def short_sets(redundancy: int, units: int, cap: int, share: Floats, triangles: float = 0.0) -> Floats:
    """v, the number of short sets per shard, at each lost share p, for shards of ``units`` pieces and at most ``cap``
    pieces per group.
    ``triangles``: :func:`triangles_per_shard`.

    With ``cap`` below ``units / (1 - p)`` the survivors as a whole have too little room: v is large then, but does not
    count small sets."""
    lost = share[:, None]
    other = redundancy - 1
    asked = np.zeros((len(share), units + 1))
    asked[:, 0] = 1.0
    for _ in range(ROUNDS):
        room = _room(_sum(asked, other, cap + 1), units, cap)
        asked = _asked(_seen(room, lost), other, units)
    demand = _sum(asked, redundancy, cap + 1)
    room = _room(_sum(asked, other, cap + 1), units, cap)
    supply = _sum(_seen(room, lost), redundancy, units)
    shards_short = supply[:, :units].sum(axis=1)
    groups_short = (1 - share) * demand[:, cap + 1]
    below = np.cumsum(room, axis=1) - room
    edges_short = redundancy * (1 - share) * (asked[:, 1:] * (below + room)[:, :-1]).sum(axis=1)
    on_trees = np.maximum(shards_short + groups_short - edges_short, share**redundancy)
    if 2 * cap >= 3 * units:
        return np.asarray(on_trees)
    # A triangle's three shards have only two live hosts when two of the groups that they share are all that lives: for
    # r = 3 that is as frequent as two shards with one host.
    return np.asarray(on_trees + 3 * triangles * share ** (3 * redundancy - 5) * (1 - share) ** 2)


def short_on_ring(num_groups: int, lost: NDArray[np.int64], units: int, cap: int) -> Floats:
    """For r = 2 the exact probability that some set is short after ``lost`` losses, given that no shard is lost.

    Groups and shards alternate on a ring; n live groups between two lost ones have n + 1 shards. Of N groups on a ring
    k can be lost with at least m live ones between any two in N / (N - k m) * C(N - k m, k) ways."""
    run = 1
    while (run + 1) * units > run * cap:
        run += 1
        if run > num_groups:
            return np.where(lost > 0, 1.0, 0.0)
    some = np.maximum(lost, 1)
    more = -np.expm1(_log_ways(num_groups, some, run) - _log_ways(num_groups, some, 1))
    return np.where(lost > 0, more, 0.0)


def _log_ways(num_groups: int, lost: NDArray[np.int64], apart: int) -> Floats:
    free = num_groups - lost * apart
    fits = free >= lost
    some = np.where(fits, free, lost)
    ways = np.log(num_groups / some) + gammaln(some + 1) - gammaln(lost + 1) - gammaln(some - lost + 1)
    return np.where(fits, ways, -np.inf)


def _seen(room: Floats, lost: Floats) -> Floats:
    """Distribution of the room that a shard finds at a host, which has none with probability ``lost``."""
    seen = (1 - lost) * room
    seen[:, 0] += lost[:, 0]
    return seen


def _room(demand: Floats, units: int, cap: int) -> Floats:
    """[*, units + 1]: distribution of min(units, cap - demand), 0 where demand exceeds the cap."""
    room = np.zeros((len(demand), units + 1))
    full = cap - units
    room[:, units] = demand[:, : full + 1].sum(axis=1)
    room[:, :units] = demand[:, full + 1 : cap + 1][:, ::-1]
    room[:, 0] += demand[:, cap + 1]
    return room


def _asked(room: Floats, others: int, units: int) -> Floats:
    """[*, units + 1]: distribution of units minus the room of the others, at least 0."""
    return _sum(room, others, units)[:, ::-1]


def _sum(one: Floats, times: int, last: int) -> Floats:
    """[*, last + 1]: distribution of the sum of ``times`` independent ones; the last entry is 'last or more'."""
    result = np.zeros((len(one), last + 1))
    result[:, 0] = 1.0
    power = _clipped(one, last)
    while times:
        if times & 1:
            result = _convolved(result, power, last)
        times >>= 1
        if times:
            power = _convolved(power, power, last)
    return result


def _convolved(one: Floats, two: Floats, last: int) -> Floats:
    size = 2 * last + 1
    length = 1 << (size - 1).bit_length()
    product = np.fft.irfft(np.fft.rfft(one, length) * np.fft.rfft(two, length), length)[:, :size]
    return _clipped(np.maximum(product, 0.0), last)


def _clipped(one: Floats, last: int) -> Floats:
    clipped = np.zeros((len(one), last + 1))
    kept = min(one.shape[1], last + 1)
    clipped[:, :kept] = one[:, :kept]
    clipped[:, last] += one[:, last + 1 :].sum(axis=1)
    # Without this, rounding grows with the power of the number of hosts in every round.
    clipped /= clipped.sum(axis=1, keepdims=True)
    return clipped
