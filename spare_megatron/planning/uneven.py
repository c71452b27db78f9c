"""Computes how long a step computes in which some groups have a piece more than the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from spare_megatron.planning.endured import Floats

POINTS = 401
WIDTH = 9.0
"""Standard deviations on each side over which is integrated."""


def heavy_groups(num_groups: int, lost: NDArray[np.int64], pieces: int) -> NDArray[np.int64]:
    """How many live groups have ceil(N K / (N - k)) pieces; the others have one less. K = ``pieces``."""
    living = num_groups - lost
    most = -(-num_groups * pieces // living)
    return np.asarray(num_groups * pieces - (most - 1) * living)


def slowest_of_both(jitter: float, loads: Floats, counts: NDArray[np.int64]) -> Floats:
    """[states]: expected time of the last group. ``loads`` and ``counts`` are [2, states]: so many groups (or none)
    take their load times a normal of mean 1 and deviation ``jitter`` each.

    E max = low + integral of 1 - F from low on, F(t) = product of Phi((t / load - 1) / jitter)^count."""
    there = np.where(counts > 0, loads, 0.0)
    if jitter == 0:
        return np.asarray(there.max(axis=0))
    high = there.max(axis=0) * (1 + jitter * WIDTH)
    low = there.max(axis=0) * (1 - jitter * WIDTH)
    times = low + (high - low) * np.linspace(0.0, 1.0, POINTS)[:, None]
    log_done = np.zeros_like(times)
    for load, count in zip(loads, counts, strict=True):
        log_done += count * log_ndtr((times / np.where(count > 0, load, 1.0) - 1) / jitter)
    return np.asarray(low + (1 - np.exp(log_done)).sum(axis=0) * (high - low) / (POINTS - 1))
