"""Computes the time to train of a job whose lost groups come back while the others train. docs/theory.md, section 4,
derives each line."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from spare_megatron.theory.catching_up import without_a_share_s
from spare_megatron.theory.depth import bounds
from spare_megatron.theory.endured import Floats
from spare_megatron.theory.idle import without_work
from spare_megatron.theory.patched_step import PatchSpread, at_random, evenly, patched_step
from spare_megatron.theory.ratio import Costs, ExpectedRun, binomial, restart_time_s, save_intervals
from spare_megatron.theory.renewals import renewals
from spare_megatron.theory.uneven import heavy_groups

STATES = 24
"""Most numbers of groups without work for which a step is computed; in between its time is interpolated."""
SHARE_MIN = 1e-5
ROUNDS = 4


@dataclass(frozen=True)
class Sharing:
    """How a job shares the work of lost groups."""

    redundancy: int
    pieces: int
    """K, pieces of a shard; 1 in shard granularity."""
    work: Floats
    """work[k]: load of the most loaded group after k losses, in shards."""
    survival: Floats
    """survival[k]: the probability that k losses are endured, k = 0 .. N."""
    patch: float | None = None
    """Shards that a loss adds to its step; None: what the patch of the lost group's pieces takes."""


def steady_course(num_groups: int, sharing: Sharing, costs: Costs) -> ExpectedRun | None:
    """The expected course of a job of N groups; None where it makes no progress."""
    assert costs.rejoin_s is not None
    base_s = costs.compute_s + costs.reduce_s
    each_s = num_groups * costs.mtbf_s
    step_s = base_s
    for _ in range(ROUNDS):
        lives = costs.steps * step_s / each_s
        away_s = without_a_share_s(costs.rejoin_s, costs.transfer_s, costs.result_s, step_s, each_s)
        if away_s == inf:
            return None
        rung = renewals(lives, costs.weibull_shape)
        # A ring within the stay away strikes nobody. The stay begins in the middle of a step, with the loss.
        rate = rung / lives / each_s / (1 + renewals((away_s - step_s / 2) / each_s, costs.weibull_shape))
        away = _away(num_groups, costs, rate, away_s)
        # Of the losses this share is a group's first; before that its pieces are those of one shard.
        first = -np.expm1(-rung) / rung if rung > 0 else 1.0
        step_s = _mean_step_s(num_groups, sharing, costs, rate, away, float(first))
    return _course(num_groups, sharing, costs, rate, away, step_s)


def _away(num_groups: int, costs: Costs, rate: float, away_s: float) -> Floats:
    """[N]: for which share of the time k groups have no share of the plans. Standbys replace those that are repaired,
    but not those that catch up."""
    assert costs.rejoin_s is not None
    if not costs.standby_groups:
        return binomial(num_groups, rate * away_s / (1 + rate * away_s))[:num_groups]
    repaired_s, learning_s = costs.rejoin_s, away_s - costs.rejoin_s
    members = num_groups + costs.standby_groups
    under_repair = binomial(members, rate * repaired_s / (1 + rate * repaired_s))
    missing = np.append(under_repair[: costs.standby_groups + 1].sum(), under_repair[costs.standby_groups + 1 :])
    learning = binomial(num_groups, rate * learning_s / (1 + rate * learning_s))
    return np.asarray(np.convolve(missing, learning)[:num_groups])


def _mean_step_s(num_groups: int, sharing: Sharing, costs: Costs, rate: float, away: Floats, first: float) -> float:
    """The mean time of a step with its losses, of those with each number of groups without work."""
    idle = without_work(num_groups, sharing.pieces, away)
    states = np.flatnonzero(idle > SHARE_MIN)
    if len(states) > STATES:
        states = states[np.unique(np.linspace(0, len(states) - 1, STATES).round().astype(int))]
    times = [_step_s(num_groups, sharing, costs, rate, int(state), first) for state in states]
    mean_s = float((idle * np.interp(np.arange(num_groups), states, times)).sum())
    # What sets of shards with few live hosts demand of these hosts beyond the least load of all.
    known = np.arange(min(len(sharing.work), num_groups))
    above = sharing.work[known] - bounds(num_groups, known, sharing.pieces)
    return mean_s + float((away[known] * above).sum() / away[known].sum()) * costs.compute_s


def _step_s(num_groups: int, sharing: Sharing, costs: Costs, rate: float, idle: int, first: float) -> float:
    pieces, compute_s = sharing.pieces, costs.compute_s
    living = num_groups - idle
    load = -(-num_groups * pieces // living)
    heavy = int(heavy_groups(num_groups, np.array([idle]), pieces)[0])
    loads = [(load / pieces, heavy), ((load - 1) / pieces, living - heavy)]
    losses = rate * num_groups
    step = patched_step(
        loads,
        num_groups / living,
        _spreads(num_groups, sharing, first),
        losses * compute_s if sharing.patch is None else 0.0,
        costs.rebuild_s / compute_s,
        costs.jitter,
    )
    if sharing.patch is not None:
        patch_s = sharing.patch * compute_s
        return step.calm * compute_s * (1 + losses * patch_s) + _reduced_s(costs, losses, patch_s)
    return step.patched * compute_s + _reduced_s(costs, losses, step.after * compute_s)


def _reduced_s(costs: Costs, losses: float, patch_s: float) -> float:
    """The mean time of a reduction. A loss at s repeats s, after the patch and the rebuild."""
    reduce_s = costs.reduce_s
    return reduce_s * (1 + losses * (reduce_s / 2 + max(patch_s, costs.rebuild_s)))


def _spreads(num_groups: int, sharing: Sharing, first: float) -> list[tuple[PatchSpread, float]]:
    """Before its first loss a group's pieces are those of its own shard, which r - 1 others host. When it is back it
    has pieces of all its shards."""
    pieces, others = sharing.pieces, max(1, sharing.redundancy - 1)
    hosts = min(sharing.redundancy * others, num_groups - 1)
    return [(evenly(pieces, others), first), (at_random(pieces, hosts), 1 - first)]


def _course(
    num_groups: int, sharing: Sharing, costs: Costs, rate: float, away: Floats, step_s: float
) -> ExpectedRun | None:
    """Wipe-outs and saves. From state k the next loss is fatal with probability 1 - S_(k+1) / S_k."""
    lost = np.arange(num_groups)
    losses = (num_groups - lost) * rate
    now, onward = sharing.survival[:num_groups], sharing.survival[1 : num_groups + 1]
    fatal = np.where(now > 0, 1 - onward / np.maximum(now, 1e-300), 1.0)
    fatal_rate = float((away * losses * np.clip(fatal, 0.0, 1.0)).sum())
    fresh_s = float((now / losses).sum())
    up_s = max(1 / fatal_rate if fatal_rate > 0 else np.inf, min(fresh_s, 1e30))
    base_s = costs.compute_s + costs.reduce_s
    horizon_s = costs.steps * step_s
    intervals: NDArray[np.int64] = save_intervals(step_s)
    cycle_s = min(up_s, horizon_s)
    fatal_chance = 1.0 if up_s <= horizon_s else horizon_s / up_s
    steps = cycle_s / (step_s + costs.save_s / intervals) - fatal_chance * (intervals / 2 + 1)
    restart = restart_time_s(num_groups, costs)
    total_s = cycle_s + fatal_chance * restart
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(steps > 0, total_s / steps / base_s, np.inf)
    row = int(np.argmin(ratio))
    if not np.isfinite(ratio[row]) or up_s < costs.restart_s + costs.save_s:
        return None
    return ExpectedRun(
        ratio=float(ratio[row]),
        availability=float(1 - fatal_chance * restart / total_s),
        interval_steps=int(intervals[row]),
        interval_s=float(intervals[row] * (step_s + costs.save_s / intervals[row])),
        restart_after=None,
        restarts_s=float(up_s + restart),
    )
