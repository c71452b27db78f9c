"""Computes how many groups are without work while groups are lost and come back: those that are away, and those that
are back but have got no pieces yet.

A new assignment makes the largest load as small as possible, and moves as few pieces as possible for it. The least
largest load c = ceil(N K / (N - k)) is the same for many k. So as long as it stays, a group that comes back gets next
to nothing, and the load is spread as if it were still away.
"""

from __future__ import annotations

import numpy as np
from scipy.special import pdtr

from spare_megatron.planning.endured import Floats

SHARE_MIN = 1e-5
"""States in which a job is for a smaller share of its time are ignored."""


def without_work(num_groups: int, pieces: int, away: Floats) -> Floats:
    """share[i], i = 0 .. N - 1: for which share of the time i groups are without work; ``away``[k] is that of k groups
    away.

    Let the largest load be that of lo + 1 .. hi groups away, and k be away. Since the last time at which only lo were,
    i - lo groups have been lost, or so many that i = hi.

    The number away is a birth-death process with rates a and k, a the mean number (times in units of a stay away).
    Backwards in time it is the same process: so i - k, the returns since k was lo, is distributed as the losses until
    it will be lo. With h_b(k) the chance of b losses before the number has fallen from k to lo, i = k + b has the
    chance h_b(k), where

        h_b(k) = k / (a + k) h_b(k - 1) + a / (a + k) h_(b - 1)(k + 1),      h_0(lo) = 1,

    and all the rest, also what rises above hi before, has i = hi."""
    mean = float((away * np.arange(num_groups)).sum())
    share = np.zeros(num_groups)
    low = -1
    while low < num_groups - 1:
        load = -(-num_groups * pieces // (num_groups - low - 1))
        high = min(num_groups - 1, num_groups - -(-num_groups * pieces // load))
        within = away[low + 1 : high + 1]
        if within.sum() > SHARE_MIN:
            share[low + 1 : high + 1] += _spread(low, mean, within)
        low = high
    return np.asarray(share / share.sum())


def _spread(low: int, mean: float, within: Floats) -> Floats:
    """The shares ``within`` of the numbers away low + 1, low + 2, ... up to hi, by the number without work."""
    if low < 0:
        return within
    away = np.arange(low + 1, low + 1 + len(within), dtype=np.float64)
    found = np.zeros(len(away))
    falls = away / (mean + away)
    # Few come so far from the lower end: then all of them have i = hi.
    if pdtr(low, mean) < SHARE_MIN**2:
        found[-1] = within.sum()
        return found
    before = np.zeros(len(away) + 1)
    left = within.copy()
    for losses in range(len(away)):
        chance, here = np.zeros(len(away) + 1), 1.0 if losses == 0 else 0.0
        for at in range(len(away) - losses):
            here = falls[at] * here + (1 - falls[at]) * before[at + 1]
            chance[at] = here
        last = len(away) - losses
        hit = within[:last] * chance[:last]
        found[losses:] += hit
        left[:last] -= hit
        before = chance
        if left.sum() < SHARE_MIN * within.sum():
            break
    found[-1] += left.sum()
    return found
