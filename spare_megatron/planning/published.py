"""The closed forms of SPARe (arXiv 2603.00357), as published, one function each.

They are asymptotic in N: ``endurable_failures`` is up to 8% off at N = 64 and within 2.5% from N = 600 on
(docs/theory.md has the table), and counts the fatal loss in part. Plans are made with
``spare_megatron.planning.endured`` and ``depth`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, floor, lgamma, log, log2, sqrt

PatchWork = Callable[[int], float]


def depth_bound(num_groups: int, lost: int) -> int:
    """c(k) = ceil(N / (N - k)): the least number of whole shards that the most loaded survivor computes.

    Valid for 0 <= k < N. Source: arXiv 2603.00357, lower bound after k group failures."""
    return -(-num_groups // (num_groups - lost))


def load_bound(num_groups: int, lost: int, pieces_per_shard: int) -> float:
    """The bound with shards cut in K pieces: ceil(N K / (N - k)) / K shards; for K = 1 it is ``depth_bound``."""
    return -(-num_groups * pieces_per_shard // (num_groups - lost)) / pieces_per_shard


def endurable_failures(num_groups: int, redundancy: int) -> float:
    """mu(N, r) = Gamma(1/r) / r * N^(1 - 1/r): losses until some shard has no host. r >= 1, independent offsets.

    Source: arXiv 2603.00357 (published error 1.13%)."""
    return exp(lgamma(1 / redundancy) - log(redundancy) + (1 - 1 / redundancy) * log(num_groups))


def mean_depth(num_groups: int, redundancy: int, patch_work: PatchWork | None = None) -> float:
    """Sbar(N, r) = (1 / floor(mu)) * sum over k < floor(mu) of c(k) + rho_k; ``patch_work(k)`` is rho_k, else 0.

    Valid where mu < N. Source: arXiv 2603.00357."""
    endured = max(1, min(floor(endurable_failures(num_groups, redundancy)), num_groups))
    total = sum(depth_bound(num_groups, lost) + (patch_work(lost) if patch_work else 0.0) for lost in range(endured))
    return total / endured


def availability(interval_s: float, time_to_wipe_out_s: float, restart_s: float, save_s: float) -> float:
    """A(Tc) = Tf / (Tf + Tr + Tc/2) * (1 - Ts / Tc), at least 0. Valid for Tc > Ts.

    Source: arXiv 2603.00357; this form is inferred from the published optimum."""
    useful = time_to_wipe_out_s / (time_to_wipe_out_s + restart_s + interval_s / 2)
    return max(0.0, useful * (1 - save_s / interval_s))


def best_interval_s(time_to_wipe_out_s: float, restart_s: float, save_s: float) -> float:
    """Tc* = Ts + sqrt(Ts^2 + 2 Ts (Tf + Tr)): the interval at which A(Tc) is largest. Source: arXiv 2603.00357."""
    return save_s + sqrt(save_s**2 + 2 * save_s * (time_to_wipe_out_s + restart_s))


def best_availability(time_to_wipe_out_s: float, restart_s: float, save_s: float) -> float:
    """A* = A(Tc*); 1 without costs."""
    interval_s = best_interval_s(time_to_wipe_out_s, restart_s, save_s)
    if interval_s <= 0:
        return time_to_wipe_out_s / (time_to_wipe_out_s + restart_s)
    return availability(interval_s, time_to_wipe_out_s, restart_s, save_s)


def time_to_train(num_groups: int, redundancy: int, mtbf_s: float, restart_s: float, save_s: float) -> float:
    """J(r) = Sbar(N, r) / A*(mu(N, r) * m), relative to the failure-free run; infinite where A* is 0.

    Source: arXiv 2603.00357."""
    endured_s = endurable_failures(num_groups, redundancy) * mtbf_s
    available = best_availability(endured_s, restart_s, save_s)
    return mean_depth(num_groups, redundancy) / available if available > 0 else float("inf")


def best_redundancy(num_groups: int) -> int:
    """r* ~ floor(log2 N + 0.833). Source: arXiv 2603.00357.

    8, 10, 10 for N = 200, 600, 1000, where the published runs have 9, 8, 9."""
    return max(1, min(num_groups, floor(log2(num_groups) + 0.833)))
