"""Computes the load of the most loaded survivor, in shards, after k losses and on the mean until the wipe-out.

The least possible load is the larger of two: the bound c(k), the mean load of all survivors rounded up, and what small
sets of shards with few live hosts demand of these hosts (``shortage``). With r >= 7 hosts such a set appears only just
before it is lost, and the bound alone was exact in every simulated order; with fewer hosts the mean load is above the
bound, by 40% for r = 2, 8% for r = 3, 2% for r = 4 (N = 4000).
Independent offsets are assumed; against the protocol machine's own plans see docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from spare_megatron.planning.endured import Endured, Floats
from spare_megatron.planning.shortage import short_on_ring, short_sets, triangles_per_shard

HOSTS_LOCAL_MAX = 8
"""Above this redundancy local shortage is not added to the bound."""
UNITS_MAX = 16
"""Most units into which a shard is divided to count short sets; for more pieces per shard the count is interpolated."""
SHARES = 10
"""Number of lost shares at which short sets are counted; in between the logarithm of the count is interpolated."""
SURVIVAL_MIN = 1e-4
"""States k with a lower probability of being reached are ignored."""


@dataclass(frozen=True)
class MaxLoad:
    """Load of the most loaded survivor, in shards."""

    after: Floats
    """after[k]: expected load after k losses, given that no shard is lost; k = 0 .. the last state above
    SURVIVAL_MIN."""
    mean: float
    """Mean over the states k = 0, 1, ..., each weighted with the probability that a job reaches it."""


def work(
    num_groups: int, offsets: Sequence[int], pieces_per_shard: int, endured: Endured, adoption: bool = False
) -> MaxLoad:
    """The load with independent offsets. ``pieces_per_shard`` = 1 is shard granularity; ``endured`` must be computed
    for the same offsets. With ``adoption`` ``after`` goes on to N - 1: shards without a live host, which others have
    adopted, are in no short set."""
    redundancy = len(offsets)
    reached = np.flatnonzero(endured.survival >= SURVIVAL_MIN)
    last = num_groups - 1 if adoption else min(int(reached[-1]), num_groups - 1)
    lost = np.arange(last + 1)
    bound = bounds(num_groups, lost, pieces_per_shard)
    after = bound
    if 2 <= redundancy <= HOSTS_LOCAL_MAX and redundancy < num_groups and len(lost) > 1:
        after = bound + _above(num_groups, offsets, pieces_per_shard, lost, bound, adoption)
    weights = endured.survival[lost]
    return MaxLoad(after, float((after * weights).sum() / weights.sum()))


def bounds(num_groups: int, lost: NDArray[np.int64], pieces_per_shard: int) -> Floats:
    """ceil(N K / (N - k)) / K for every k."""
    return -(-num_groups * pieces_per_shard // (num_groups - lost)) / pieces_per_shard


def _above(
    num_groups: int,
    offsets: Sequence[int],
    pieces: int,
    lost: NDArray[np.int64],
    bound: Floats,
    adoption: bool,
) -> Floats:
    """Expected excess over the bound: integral over loads x >= bound of P(some set needs more than x | none lost).

    Short sets of size n are Poisson in number for large N: P(none) = exp(-N (v(x) - v(wipe-out)))."""
    units, redundancy = min(pieces, UNITS_MAX), len(offsets)
    caps = np.arange(units, redundancy * units + 1)
    caps = caps[caps <= 3 * units]
    more = np.zeros((len(caps), len(lost)))
    for row, chances in enumerate(_short(num_groups, offsets, units, caps, lost, adoption)):
        more[row] = chances
        if float(chances.max()) < SURVIVAL_MIN:
            break
    loads = caps / units
    steps = np.arange(pieces, int(caps[-1]) * pieces // units) / pieces
    return np.array([_integral(loads, more[:, k], steps, bound[k], pieces) for k in range(len(lost))])


def _short(
    num_groups: int,
    offsets: Sequence[int],
    units: int,
    caps: NDArray[np.int64],
    lost: NDArray[np.int64],
    adoption: bool,
) -> Iterator[Floats]:
    """For each cap an array over k: the probability that some set of shards needs more than ``cap`` units per host,
    given that no shard is lost; with ``adoption``: of shards that are not."""
    redundancy, triangles = len(offsets), triangles_per_shard(num_groups, offsets)
    if not adoption and redundancy == 2 and gcd(num_groups, offsets[1] - offsets[0]) == 1:
        yield from (short_on_ring(num_groups, lost, units, int(cap)) for cap in caps)
        return
    chance = _chance(num_groups, redundancy, lost)
    share = np.geomspace(1 / num_groups, max(chance[-1], 2 / num_groups), SHARES)
    # ln v is nearly linear in ln p.
    log_lost = np.log(np.maximum(chance, 1e-9))
    for cap in caps:
        extra = short_sets(redundancy, units, int(cap), share, triangles) - share**redundancy
        log_extra = np.interp(log_lost, np.log(share), np.log(np.maximum(extra, 1e-18)))
        yield np.append(0.0, -np.expm1(-num_groups * np.exp(log_extra[1:])))


def _chance(num_groups: int, redundancy: int, lost: NDArray[np.int64]) -> Floats:
    """The probability p of independent losses for which the smallest short sets, two shards with one live host, are as
    likely as after exactly k = ``lost`` losses: p^d = C(N - d, k - d) / C(N, k) with d = 2 (r - 1)."""
    dead = np.arange(min(2 * (redundancy - 1), num_groups - 1))
    ratios = np.maximum(lost[:, None] - dead, 0) / (num_groups - dead)
    return np.asarray(ratios.prod(axis=1) ** (1 / len(dead)))


def _integral(loads: Floats, more: Floats, steps: Floats, bound: float, pieces: int) -> float:
    return float(np.interp(steps[steps >= bound - 1e-9], loads, more).sum() / pieces)
