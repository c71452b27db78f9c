"""Computes how long the groups compute in a step in which some of them are lost: the patches end beside the step or
after it.

Times are in shards. The load x of a group takes x times a normal of mean 1 and deviation ``jitter``. A group lost at t
leaves its K pieces to hosts, which compute them after their own load, and not before t.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr

from spare_megatron.planning.endured import Floats
from spare_megatron.planning.ratio import binomial

POINTS = 161
MOMENTS = 8
"""Number of moments of a loss over which is averaged."""
WIDTH = 5.0
"""Standard deviations on each side over which is integrated."""
JITTER_MIN = 1e-4
"""A smaller deviation is taken for this one: then sums over the points still are accurate."""
SHARE_MIN = 1e-4


@dataclass(frozen=True)
class PatchSpread:
    """How the pieces of a lost group are spread over hosts."""

    hosts: tuple[tuple[tuple[tuple[float, float], ...], int], ...]
    """(((shards, the chance that a host takes so many), ...), number of such hosts)."""

    @property
    def most(self) -> float:
        """The most that a host takes, in shards."""
        return max(shards for taken, _ in self.hosts for shards, _ in taken)


def evenly(pieces: int, hosts: int) -> PatchSpread:
    """A shard's pieces on its other hosts."""
    least, more = divmod(pieces, hosts)
    levels = ((least + 1, more), (least, hosts - more))
    return PatchSpread(tuple((((taken / pieces, 1.0),), count) for taken, count in levels if taken and count))


@cache
def at_random(pieces: int, hosts: int) -> PatchSpread:
    """Pieces of many shards, each on one of ``hosts`` hosts that nothing distinguishes: a binomial number for each."""
    chance = binomial(pieces, 1 / hosts)
    kept = [(n / pieces, float(chance[n])) for n in range(pieces + 1) if chance[n:].sum() * hosts > SHARE_MIN]
    total = sum(share for _, share in kept)
    return PatchSpread(((tuple((shards, share / total) for shards, share in kept), hosts),))


@dataclass(frozen=True)
class PatchedStep:
    """A step's computing, in shards."""

    failure_free: float
    """Expected time until the last group is done, where none is lost."""
    patched: float
    """The same with losses at their rate."""
    after: float
    """Expected time of a patch that begins when all groups are done."""


@lru_cache(maxsize=10_000)
def patched_step(
    loads: tuple[tuple[float, float], ...],
    host_load: float,
    spreads: tuple[tuple[PatchSpread, float], ...],
    losses: float,
    rebuild: float,
    jitter: float,
) -> PatchedStep:
    """The expected times of a step.

    All loads are done by y with the probability F(y). Losses are Poisson. Of one at t the patch is done by y with the
    probability G_t(y), a product over its hosts of

        P(max(x, t) + p s <= y),      s normal,

    for own load x and share p of the patch, and 0 before the communicators are rebuilt. (How fast a host computes its
    own load is left out: hosts that have less left at t get more of the patch.) So all is done by y with probability
    F(y) exp(-losses * integral over t of (1 - G_t(y))), whose complement is integrated over y.

    Args:
        loads: (load in shards, number of live groups that have it).
        host_load: own load of a host that patches.
        spreads: how a patch is spread, and for which share of the losses.
        losses: expected losses in the time of one shard.
        rebuild: time to form communicators.
        jitter: see above.
    """
    wide = max(jitter, JITTER_MIN)
    there = [(load, count) for load, count in loads if load > 0 and count > 0]
    top = max(load for load, _ in there)
    low = top * (1 - WIDTH * wide)
    most = max(spread.most for spread, _ in spreads)
    high = max((top + most) * (1 + WIDTH * wide), top * (1 + WIDTH * wide) + max(most * (1 + WIDTH * wide), rebuild))
    y = np.linspace(low, high, POINTS)
    log_done = sum((count * log_ndtr((y / load - 1) / wide) for load, count in there), np.zeros(POINTS))
    failure_free = low + _integral(-np.expm1(log_done), y)
    after = sum(share * _alone(spread, wide) for spread, share in spreads)
    if not losses:
        return PatchedStep(failure_free, failure_free, after)
    moments = (np.arange(MOMENTS) + 0.5)[:, None] / MOMENTS * failure_free
    open_ = np.zeros((MOMENTS, POINTS))
    for spread, share in spreads:
        done = _patch_done(spread, host_load, moments, y[None, :], wide)
        open_ += share * (1 - done * (y[None, :] >= moments + rebuild))
    patched = low + _integral(-np.expm1(log_done - losses * failure_free * open_.mean(axis=0)), y)
    return PatchedStep(failure_free, patched, after)


@cache
def _alone(spread: PatchSpread, jitter: float) -> float:
    """Expected time of a patch that begins when all groups are done."""
    y = np.linspace(0, spread.most * (1 + WIDTH * jitter), POINTS)
    return _integral(1 - _patch_done(spread, 0.0, np.zeros((1, 1)), y[None, :], jitter)[0], y)


def _patch_done(spread: PatchSpread, load: float, moment: Floats, y: Floats, jitter: float) -> Floats:
    all_done = np.ones(np.broadcast_shapes(moment.shape, y.shape))
    for taken, count in spread.hosts:
        one = np.zeros_like(all_done)
        for shards, share in taken:
            one += share * ndtr(((y - np.maximum(load, moment)) / shards - 1) / jitter) if shards else share
        all_done *= one**count
    return all_done


def _integral(values: Floats, at: Floats) -> float:
    return float((values[1:] + values[:-1]).sum() / 2 * (at[1] - at[0]))
