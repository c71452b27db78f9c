"""Chooses how many microbatches make a piece: C, which divides the M microbatches of a shard.

Exact sums add a share s(C), about s(1) / C, to the computing of a microbatch (``planning.reduction_cost``). But
survivors share a dead group's work in whole pieces, so after losses the largest load is a multiple of C microbatches.
``without_figures`` needs nothing but M and s: a step takes no longer than with C = 1, whatever was lost before it.
``with_figures`` takes the least expected time of a step, where the rate of losses is known. docs/theory.md, section 8,
derives both.

The last bits of sums depend on C, so a job that is to repeat bit for bit keeps the C of its first start. What is chosen
without measured figures is the same on every rank and at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spare_megatron.config.piece_sizes import sizes_that_fit
from spare_megatron.planning.choose import lasting_load
from spare_megatron.planning.cluster_figures import LLAMA3_MTBF_GPU_HOURS, ClusterFigures
from spare_megatron.planning.ratio import PatchCost, slowest
from spare_megatron.planning.time_shares import time_shares
from spare_megatron.planning.uneven import heavy_groups, slowest_of_both

TIE = 0.001
"""Sizes whose times differ by at most this share count as equal; the least of them is taken."""
SHARE_MIN = 1e-6
"""States in which a job is for a smaller share of its time are ignored."""
Share = Callable[[int], float]
"""C -> s(C), the time of rounding and adding over that of computing."""


@dataclass(frozen=True)
class PieceSize:
    """A choice of C, and why."""

    microbatches: int
    """C."""
    pieces_per_shard: int
    """K = M / C."""
    times: dict[int, float]
    """C -> what was minimised: the time of a step over that without losses and rounding; the expected one, or without
    figures the longest that C can make of a step."""
    reason: str


def without_figures(shards: Sequence[int], share: Share, moves: bool = True) -> PieceSize:
    """The default: min over C of (1 + (C - 1) / M) (1 + s(C)), the worst step that C can bring.

    Args:
        shards: microbatches of a shard, for each batch size of the job; M is the least.
        share: s(C).
        moves: whether a group can compute single pieces of another; else granularity costs nothing.
    """
    least = min(shards)
    extra = {size: (size - 1) / least if moves else 0.0 for size in sizes_that_fit(shards)}
    times = {size: (1 + more) * (1 + share(size)) for size, more in extra.items()}
    best = _best(times)
    reason = f"{_named(best, least)}, for which rounding takes {_percent(share(best))} of computing"
    if best > 1:
        reason += f" instead of {_percent(share(1))}"
        if moves:
            more = _percent(extra[best])
            reason += f"; after losses a group computes at most {more} of a shard more, which takes less than is saved"
    elif len(times) > 1 and moves and share(1) > 0:
        other = min(size for size in times if size > 1)
        saved = _percent(share(1) - share(other))
        reason += f"; {other} would save {saved}, and could cost {_percent(extra[other])} of a shard after losses"
    return PieceSize(best, least // best, times, reason)


def with_figures(
    cluster: ClusterFigures,
    redundancy: int,
    shards: Sequence[int],
    share: Share,
    restart_after: int | None = None,
) -> PieceSize:
    """The C with the least expected time of a step over the job attempt.

    Args:
        cluster: figures of cluster and job; ``compute_s`` without rounding. ``pieces_per_shard`` is not used.
        redundancy: hosts of a shard.
        shards: microbatches of a shard, for each batch size of the job; the largest one counts.
        share: s(C).
        restart_after: number of lost groups with which a planned restart brings all back.
    """
    most, sizes = max(shards), sizes_that_fit(shards)
    times = {size: step_time(cluster, redundancy, most // size, share(size), restart_after) for size in sizes}
    best = _best(times)
    place = sizes.index(best)
    others = sorted({1, *sizes[max(0, place - 1) : place + 2]} - {best})
    reported = [f"with {size} it would be {_percent(share(size))} and {times[size]:.3f}" for size in others]
    reason = (
        f"{_named(best, most)}: rounding takes {_percent(share(best))} of computing, and a step takes "
        f"{times[best]:.3f} times that without losses and rounding"
    )
    return PieceSize(best, most // best, times, "; ".join([reason, *reported]))


def step_time(
    cluster: ClusterFigures, redundancy: int, pieces: int, share: float, restart_after: int | None = None
) -> float:
    """The expected time of a step with K = ``pieces`` and s = ``share``, over that without losses, rounding and jitter:
    the mean over the states k, each for its share of the job's time. Saves and restarts hardly depend on K.

    Few groups have the largest load where few are lost, and all wait for the slowest of many others anyway."""
    num_groups = cluster.num_groups
    survival, loads = lasting_load(cluster, redundancy, pieces)
    base_s = cluster.compute_s + cluster.reduce_s
    shares = time_shares(
        num_groups,
        survival,
        cluster.mtbf_s,
        cluster.steps * base_s,
        rejoin_s=cluster.rejoin_s,
        standby_groups=cluster.standby_groups,
        restart_after=None if restart_after is None else restart_after + cluster.standby_groups,
    )
    lost = np.flatnonzero(shares > SHARE_MIN)
    work, living = loads.after[np.minimum(lost, len(loads.after) - 1)], num_groups - lost
    heavy = heavy_groups(num_groups, lost, pieces)
    last = slowest_of_both(cluster.jitter, np.stack([work, work - 1 / pieces]), np.stack([heavy, living - heavy]))
    # A patch is computed by r - 1 groups, whose load is the mean one before it.
    patched = last
    for shards, groups in PatchCost.spread(pieces, max(1, redundancy - 1)).beside:
        patched = np.maximum(patched, (num_groups / living + shards) * slowest(cluster.jitter, groups))
    compute_s = cluster.compute_s * (1 + share)
    step_s = last * compute_s + cluster.reduce_s
    step_s += (patched - last) * compute_s * step_s * living / (num_groups * cluster.mtbf_s)
    weights = shares[lost]
    return float((step_s * weights).sum() / weights.sum() / base_s)


def for_job(
    *,
    num_groups: int,
    group_size: int,
    redundancy: int,
    shards: Sequence[int],
    share: Share,
    steps: int,
    shard_s: float | None = None,
    mtbf_gpu_hours: float | None = None,
    granularity: str = "microbatch",
) -> PieceSize:
    """The choice at a job's first start, from what every rank knows before anything is measured.

    Args:
        num_groups: N.
        group_size: M, ranks of a group.
        redundancy: hosts of a shard.
        shards: microbatches of a shard, for each batch size of the job.
        share: s(C).
        steps: steps of the job.
        shard_s: seconds in which a group computes a shard, as ``reduction_cost.shard_s`` models it for a GPU; None
            where nobody knows: then losses are not weighed (:func:`without_figures`).
        mtbf_gpu_hours: as --spare-mtbf-gpu-hours; default: Llama 3's.
        granularity: as --spare-granularity.
    """
    if num_groups == 1 or redundancy == 1 or granularity == "shard":
        return without_figures(shards, share, moves=False)
    if shard_s is None:
        return without_figures(shards, share)
    hours = LLAMA3_MTBF_GPU_HOURS if mtbf_gpu_hours is None else mtbf_gpu_hours
    cluster = ClusterFigures(
        gpus=num_groups * group_size,
        gpus_per_group=group_size,
        mtbf_s=hours * 3600 / (num_groups * group_size),
        restart_s=0.0,
        save_s=0.0,
        compute_s=shard_s,
        reduce_s=0.0,
        steps=max(1, steps),
    )
    return with_figures(cluster, redundancy, shards, share)


def _best(times: dict[int, float]) -> int:
    least = min(times.values())
    return min(size for size, time in times.items() if time <= least * (1 + TIE))


def _named(size: int, microbatches: int) -> str:
    return f"pieces of {size} of the {microbatches} microbatches of a shard"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
