"""Computes for which share of a job's time k groups are lost."""

from __future__ import annotations

import numpy as np
from scipy.special import betainc

from spare_megatron.planning.endured import Floats
from spare_megatron.planning.ratio import binomial


def time_shares(
    num_groups: int,
    survival: Floats,
    mtbf_s: float,
    job_s: float,
    *,
    rejoin_s: float | None = None,
    standby_groups: int = 0,
    restart_after: int | None = None,
) -> Floats:
    """share[k], k = 0 .. N - 1. Each group is lost at a rate of 1 / (N m).

    Without re-join, k groups are lost by t with the probability of k hits in N trials of p(t) = 1 - exp(-t / (N m)).
    Its integral over t up to the job's end is N m / (N - k) * P(more than k are lost by then): the time for which the
    state lasts, times the chance that it has ended. It is weighted with the chance that k losses are endured. With
    re-join after T a group is away for the share T / (N m + T) of the time.

    Args:
        num_groups: N.
        survival: survival[k] is the probability that k losses are endured, k = 0 .. N.
        mtbf_s: m, the mean time between losses in the whole job while all groups live.
        job_s: the length of the job. One that is longer than a job attempt is taken as one job attempt.
        rejoin_s: T; None where a lost group stays lost.
        standby_groups: the first n losses leave k = 0.
        restart_after: losses after which a planned restart ends the job attempt.
    """
    each_s = num_groups * mtbf_s
    if rejoin_s is not None:
        times = binomial(num_groups + standby_groups, rejoin_s / (each_s + rejoin_s))
    else:
        losses = np.arange(num_groups + standby_groups)
        lost = np.maximum(losses - standby_groups, 0)
        ended = betainc(losses + 1, num_groups + standby_groups - losses, -np.expm1(-job_s / each_s))
        times = survival[lost] * each_s / (num_groups - lost) * ended
        if restart_after is not None:
            times = times[: max(1, restart_after)]
    states = np.clip(np.arange(len(times)) - standby_groups, 0, num_groups - 1)
    found = np.bincount(states, weights=times, minlength=num_groups)
    total = float(found.sum())
    return found / total if total > 0 else np.asarray(np.arange(num_groups) == 0, dtype=np.float64)
