"""Computes how often a failure clock that is set now rings in a time: the renewal function of a Weibull law."""

from __future__ import annotations

from functools import cache
from math import expm1, gamma

import numpy as np

from spare_megatron.planning.endured import Floats

LIFETIMES = 6.0
"""Mean times between rings for which the renewal equation is solved; beyond, a clock rings once in its mean time."""
POINTS = 600


def renewals(lifetimes: float, shape: float) -> float:
    """M(t): the expected number of rings within t = ``lifetimes`` mean times between rings, of a clock set at 0.

    M(t) = F(t) + integral over u of M(t - u) dF(u). A clock of shape 1 rings t times; with a smaller shape rings follow
    closer upon a ring, with a larger one later."""
    if shape == 1.0 or lifetimes <= 0:
        return max(lifetimes, 0.0)
    step = LIFETIMES / POINTS
    table = _solved(shape)
    if lifetimes >= LIFETIMES:
        return float(table[-1] + lifetimes - LIFETIMES)
    if lifetimes >= 2 * step:
        return float(np.interp(lifetimes / step, np.arange(POINTS + 1), table))
    # Two rings within so short a time are rare: M = F (1 + F).
    rung = -expm1(-((lifetimes * gamma(1 + 1 / shape)) ** shape))
    return rung * (1 + rung)


@cache
def _solved(shape: float) -> Floats:
    """[POINTS + 1]: M at evenly spaced times. M(t - u) is taken as the mean of its values at the ends of an interval of
    u."""
    times = np.arange(POINTS + 1) * (LIFETIMES / POINTS)
    rung = -np.expm1(-((times * gamma(1 + 1 / shape)) ** shape))
    more = np.diff(rung)
    found = np.zeros(POINTS + 1)
    for n in range(1, POINTS + 1):
        # found[n] stands on both sides: in the first interval M(t - u) is the mean of found[n] and found[n - 1].
        ends = (found[n - 1 :: -1] + np.concatenate([[0.0], found[n - 1 : 0 : -1]])) / 2
        found[n] = (rung[n] + (more[:n] * ends).sum()) / (1 - more[0] / 2)
    return found
