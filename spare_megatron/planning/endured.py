"""Computes how many losses of groups a placement endures before the fatal one, after which a shard has no host.

Groups are lost in random order. ``endured`` chooses between two methods: an expansion over pairs of shards (for large
N; a few percent of the cost) and a seeded Monte Carlo of the placement (for small N, or shards that share many hosts).
Against 20,000 simulated orders at N = 200, 600, 1000, 4000 and r = 2..20 the result is within 1%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXPANSION_GROUPS_MIN = 400
"""From this N on the error of the expansion is at most 0.5% (independent offsets, r up to 20)."""
EXPANSION_OF_FEW_HOSTS = (150, 9)
"""(N, r): from this N on, for at most this r, the error of the expansion is at most 0.8%."""
SAMPLED_ORDERS = 4000
SAMPLED_ORDERS_OF_MANY_HOSTS = 1500
"""Number of orders of losses in a Monte Carlo, for r < 5 and for r >= 5. The standard deviation of one order is about
1.3 / r of the mean, so the standard error is at most 1% (r = 2) and 0.7% (r = 5)."""
GRID = 4000
"""Points of the integral over the share of groups lost."""


@dataclass(frozen=True)
class Endured:
    """The mean number of losses endured before the fatal one, and the probability of enduring each number."""

    mean: float
    survival: Floats
    """[N + 1]: survival[k] is the probability that no shard is lost with k groups. survival[0] = 1."""
    method: str
    """'expansion', 'monte carlo' or 'exact'."""


def endured(num_groups: int, offsets: Sequence[int], seed: int = 0) -> Endured:
    """The losses that the cyclic placement with these offsets endures. ``seed`` is that of the Monte Carlo."""
    redundancy = len(offsets)
    if redundancy == num_groups:
        return certain(num_groups, num_groups - 1)
    if redundancy == 1:
        return certain(num_groups, 0)
    counts = shared_counts(num_groups, offsets)
    groups_min, hosts_max = EXPANSION_OF_FEW_HOSTS
    enough = num_groups >= EXPANSION_GROUPS_MIN or (num_groups >= groups_min and redundancy <= hosts_max)
    if enough and int(counts.max(initial=0)) <= 1:
        return _expansion(num_groups, redundancy, counts)
    return _monte_carlo(num_groups, offsets, seed)


def certain(num_groups: int, losses: int) -> Endured:
    """The result where exactly ``losses`` losses are endured in every order."""
    survival = (np.arange(num_groups + 1) <= losses).astype(np.float64)
    return Endured(float(losses), survival, "exact")


def replication(num_groups: int, redundancy: int) -> Endured:
    """The losses that replication endures: blocks of r consecutive groups compute the same r shards (the last block may
    be smaller).

    At a lost share p no block of b groups is gone with probability prod(1 - p^b): exact up to the integral's grid."""
    blocks = [redundancy] * (num_groups // redundancy)
    if num_groups % redundancy:
        blocks.append(num_groups % redundancy)
    p = _grid()
    alive = np.prod([1 - p**b for b in set(blocks) for _ in range(blocks.count(b))], axis=0)
    return _from_share(num_groups, p, alive, "exact")


def shared_counts(num_groups: int, offsets: Sequence[int]) -> NDArray[np.int64]:
    """[N - 1]: hosts that two shards at distance 1..N-1 have in common."""
    marks = np.asarray(offsets, dtype=np.int64)
    differences = (marks[:, None] - marks[None, :]) % num_groups
    return np.bincount(differences.ravel(), minlength=num_groups)[1:].astype(np.int64)


def _grid() -> Floats:
    return (np.arange(GRID) + 0.5) / GRID


def _expansion(num_groups: int, redundancy: int, counts: NDArray[np.int64]) -> Endured:
    """Counts lost shards of which no later neighbour is lost as well, so that a cluster of them counts once. A shard is
    lost with probability q = p^r; then a neighbour with c hosts in common survives with 1 - p^(r - c), against 1 - q
    for a shard without common hosts. Independent sets of such shards give P(none lost) = (1 - q * alone)^N."""
    p = _grid()
    q = p**redundancy
    alone = np.zeros_like(p)
    for shared, pairs in zip(*np.unique(counts[counts > 0], return_counts=True), strict=True):
        alone += pairs / 2 * (np.log1p(-(p ** (redundancy - int(shared)))) - np.log1p(-q))
    # For large p, beyond the expansion's range, the pair term grows again; the probability of survival never does.
    log_alive = np.minimum.accumulate(num_groups * np.log1p(-q * np.exp(alone)))
    return _from_share(num_groups, p, np.exp(log_alive), "expansion")


def _from_share(num_groups: int, p: Floats, alive: Floats, method: str) -> Endured:
    """The result from the probability ``alive`` of no lost shard at each lost share p, by: sum over k of P(alive at k)
    = (N + 1) * integral of P(alive at p) dp."""
    mean = float((num_groups + 1) * alive.mean() - 1)
    lost = np.arange(num_groups + 1)
    survival = np.interp(lost / num_groups, p, alive, left=1.0, right=0.0)
    survival[0] = 1.0
    return Endured(mean, _scaled(survival, mean), method)


def _scaled(survival: Floats, mean: float) -> Floats:
    """``survival`` stretched along k until its sum is the mean: before, the two differ by effects of order 1 / N."""
    lost = np.arange(len(survival), dtype=np.float64)
    total = float(survival[1:].sum())
    if total <= 0 or mean <= 0:
        return survival
    stretched = np.interp(lost * total / mean, lost, survival, right=0.0)
    stretched[0] = 1.0
    return stretched


def _monte_carlo(num_groups: int, offsets: Sequence[int], seed: int) -> Endured:
    rng = np.random.default_rng((seed, num_groups, len(offsets)))
    orders = SAMPLED_ORDERS if len(offsets) < 5 else SAMPLED_ORDERS_OF_MANY_HOSTS
    fatal = np.empty(orders, dtype=np.int64)
    block = max(1, 4_000_000 // num_groups)
    for low in range(0, orders, block):
        shape = (min(block, orders - low), num_groups)
        turn = rng.permuted(np.broadcast_to(np.arange(num_groups, dtype=np.int32), shape), axis=1)
        last = turn.copy()
        for offset in offsets[1:]:
            # hosts of shard i are the groups i - offset
            np.maximum(last, np.roll(turn, offset, axis=1), out=last)
        fatal[low : low + shape[0]] = last.min(axis=1)
    survival = 1 - np.cumsum(np.bincount(fatal, minlength=num_groups + 1)) / orders
    # alive[k]: losses 1 .. k, that is turns 0 .. k - 1, were all endured.
    alive = np.concatenate([[1.0], survival[:num_groups]])
    return Endured(float(fatal.mean()), alive, "monte carlo")
