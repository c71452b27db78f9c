"""Computes the time to train of a job whose lost groups come back while the others train. docs/theory.md, section 4,
derives each line."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from spare_megatron.planning.bare_shards import Rescue, bare_chance, waiting_s
from spare_megatron.planning.catching_up import without_a_share_s
from spare_megatron.planning.depth import bounds
from spare_megatron.planning.endured import Floats
from spare_megatron.planning.idle import without_work
from spare_megatron.planning.patched_step import PatchSpread, at_random, evenly, patched_step
from spare_megatron.planning.ratio import Costs, ExpectedRun, binomial, restart_time_s, save_intervals
from spare_megatron.planning.renewals import renewals
from spare_megatron.planning.uneven import heavy_groups

STATES = 24
"""Most numbers of groups without work for which a step is computed; in between its time is interpolated."""
SHARE_MIN = 1e-5
ROUNDS = 4
STEP_EXACT = 1e-4
"""A step's time that a round changes by a smaller share is the result."""


@dataclass(frozen=True)
class Sharing:
    """How a job shares the work of lost groups."""

    redundancy: int
    pieces: int
    """K, pieces of a shard; 1 in shard granularity."""
    work: Floats
    """work[k]: load of the most loaded group after k losses, in shards."""
    survival: Floats
    """survival[k]: the probability that every shard has a live host after k losses, k = 0 .. N."""
    patch: float | None = None
    """Shards that a loss adds to its step; None: what the patch of the lost group's pieces takes."""
    adoption: Rescue | None = None
    """Who adopts a shard that has lost its last host; None: the job restarts from the checkpoint."""


def steady_course(num_groups: int, sharing: Sharing, costs: Costs) -> ExpectedRun | None:
    """The expected course of a job of N groups; None where it makes no progress."""
    assert costs.rejoin_s is not None
    base_s = costs.compute_s + costs.reduce_s
    each_s = num_groups * costs.mtbf_s
    step_s = base_s
    for _ in range(ROUNDS):
        lifetimes = costs.steps * step_s / each_s
        away_s = without_a_share_s(costs.rejoin_s, costs.transfer_s, costs.result_s, step_s, each_s)
        if away_s == inf:
            return None
        rung = renewals(lifetimes, costs.weibull_shape)
        # A ring within the stay away strikes nobody. The stay begins in the middle of a step, with the loss.
        rate = rung / lifetimes / each_s / (1 + renewals((away_s - step_s / 2) / each_s, costs.weibull_shape))
        absent = _absent(num_groups, costs, rate, away_s)
        # Of the losses this share hits a group whose pieces are still those of its own shard.
        mixing = rung * (1 + displaced(sharing.pieces, sharing.redundancy))
        first = -np.expm1(-mixing) / mixing if mixing > 0 else 1.0
        before_s = step_s
        step_s = _mean_step_s(num_groups, sharing, costs, rate, absent.away, float(first))
        step_s += _bare_s(num_groups, sharing, costs, rate, absent=absent, away_s=away_s, step_s=step_s)
        if abs(step_s - before_s) < STEP_EXACT * step_s:
            break
    return _course(num_groups, sharing, costs, rate, absent, step_s)


@dataclass(frozen=True)
class Absent:
    """For which share of the time how many groups are away."""

    away: Floats
    """[N]: k groups have no share of the plans."""
    repaired: Floats
    """[N + n + 1]: of the groups and the n standbys k are under repair; as many as there are standbys are replaced."""


def _absent(num_groups: int, costs: Costs, rate: float, away_s: float) -> Absent:
    """Standbys replace groups that are repaired, but not those that catch up."""
    assert costs.rejoin_s is not None
    spare = costs.standby_groups
    repaired_s, learning_s = costs.rejoin_s, away_s - costs.rejoin_s
    under_repair = binomial(num_groups + spare, rate * repaired_s / (1 + rate * repaired_s))
    if not spare:
        away = binomial(num_groups, rate * away_s / (1 + rate * away_s))[:num_groups]
        return Absent(away, under_repair)
    missing = np.append(under_repair[: spare + 1].sum(), under_repair[spare + 1 :])
    learning = binomial(num_groups, rate * learning_s / (1 + rate * learning_s))
    return Absent(np.asarray(np.convolve(missing, learning)[:num_groups]), under_repair)


def _rescue(sharing: Sharing, costs: Costs, away_s: float) -> Rescue:
    """Who computes the pieces of a shard that has lost its last host: up to r adopters, or a host that comes back. That
    one is at a uniform time of its w seconds, of which the first S are those of the state: it needs S^2 / 2 w more."""
    if sharing.adoption is not None:
        return sharing.adoption
    assert costs.rejoin_s is not None
    return Rescue(costs.transfer_s**2 / 2 / max(away_s - costs.rejoin_s, 1e-9), 1)


def _bare_s(
    num_groups: int, sharing: Sharing, costs: Costs, rate: float, *, absent: Absent, away_s: float, step_s: float
) -> float:
    """What losses of last hosts add to the mean step, as far as they do not end the job attempt."""
    lost = np.arange(num_groups)
    losses = absent.away * (num_groups - lost) * rate
    bare = float((losses * bare_chance(sharing.survival, lost)).sum())
    if sharing.adoption is None:
        bare = max(0.0, bare - _fatal_rate(num_groups, sharing, costs, rate, absent))
    own_s = costs.compute_s * num_groups / (num_groups - float((absent.away * lost).sum()))
    computing_s = max(step_s - costs.reduce_s, own_s)
    rescue = _rescue(sharing, costs, away_s)
    later = waiting_s(rescue, np.array(own_s), np.array(computing_s), costs.reduce_s, costs.compute_s)
    return bare * step_s * float(later[0])


def _fatal_rate(num_groups: int, sharing: Sharing, costs: Costs, rate: float, absent: Absent) -> float:
    """Wipe-outs in a second. A host that is coming back saves its shard, as those that adopt it do. So without adoption
    all hosts must be under repair and not replaced; with it, nobody may be left."""
    spare = costs.standby_groups
    under = np.arange(len(absent.repaired))
    missing = np.minimum(np.maximum(under - spare, 0), num_groups - 1)
    losses = absent.repaired * (num_groups - missing) * rate
    if sharing.adoption is not None:
        return float(losses[missing == num_groups - 1].sum())
    return float((losses * bare_chance(sharing.survival, missing, np.where(under >= spare, 1, 0))).sum())


def _mean_step_s(num_groups: int, sharing: Sharing, costs: Costs, rate: float, away: Floats, first: float) -> float:
    """The mean time of a step with its losses, of those with each number of groups without work."""
    idle = without_work(num_groups, sharing.pieces, away)
    states = np.flatnonzero(idle > SHARE_MIN)
    if len(states) > STATES:
        states = states[np.unique(np.linspace(0, len(states) - 1, STATES).round().astype(int))]
    mean_away = float((away * np.arange(num_groups)).sum())
    times = [
        _step_s(num_groups, sharing, costs, rate, idle=int(state), away=mean_away, first=first) for state in states
    ]
    mean_s = float((idle * np.interp(np.arange(num_groups), states, times)).sum())
    # What sets of shards with few live hosts demand of these hosts beyond the least load of all.
    known = np.arange(min(len(sharing.work), num_groups))
    above = sharing.work[known] - bounds(num_groups, known, sharing.pieces)
    return mean_s + float((away[known] * above).sum() / away[known].sum()) * costs.compute_s


def _step_s(
    num_groups: int, sharing: Sharing, costs: Costs, rate: float, *, idle: int, away: float, first: float
) -> float:
    pieces, compute_s = sharing.pieces, costs.compute_s
    living = num_groups - idle
    load = -(-num_groups * pieces // living)
    heavy = int(heavy_groups(num_groups, np.array([idle]), pieces)[0])
    loads = ((load / pieces, heavy), ((load - 1) / pieces, living - heavy))
    # Who is back and has no piece yet leaves none when it is lost.
    losses = rate * num_groups * min(1.0, living / (num_groups - away))
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
        return step.failure_free * compute_s * (1 + losses * patch_s) + _reduced_s(costs, losses, patch_s)
    return step.patched * compute_s + _reduced_s(costs, losses, step.after * compute_s)


def _reduced_s(costs: Costs, losses: float, patch_s: float) -> float:
    """The mean time of a reduction. A loss at s repeats s, after the patch and the rebuild."""
    reduce_s = costs.reduce_s
    return reduce_s * (1 + losses * (reduce_s / 2 + max(patch_s, costs.rebuild_s)))


def _spreads(num_groups: int, sharing: Sharing, first: float) -> tuple[tuple[PatchSpread, float], ...]:
    """In the share ``first`` of losses a group's pieces are those of its own shard, which r - 1 others host; in the
    others it has pieces of all its shards."""
    pieces, others = sharing.pieces, max(1, sharing.redundancy - 1)
    hosts = min(sharing.redundancy * others, num_groups - 1)
    return (evenly(pieces, others), first), (at_random(pieces, hosts), 1 - first)


def displaced(pieces: int, redundancy: int) -> float:
    """How many shards' worth of pieces changes its host at other groups when the K pieces of a lost one are shared out.

    They fall on r - 1 hosts, of which each keeps one more than before and passes as many of its own shard on, to
    r - 1 others, and so on: q_1 = K / (r - 1), q_(l + 1) = (q_l - 1) / (r - 1), and (r - 1)^l groups pass q_l - 1."""
    others, total, groups = max(1, redundancy - 1), 0.0, 1.0
    taken = float(pieces)
    while (taken := taken / others) > 1:
        groups *= others
        taken -= 1
        total += groups * taken
    return total / pieces


def _course(
    num_groups: int, sharing: Sharing, costs: Costs, rate: float, absent: Absent, step_s: float
) -> ExpectedRun | None:
    """Wipe-outs and saves."""
    lost = np.arange(num_groups)
    endures = np.ones(num_groups) if sharing.adoption is not None else sharing.survival[:num_groups]
    fatal_rate = _fatal_rate(num_groups, sharing, costs, rate, absent)
    fresh_s = float((endures / ((num_groups - lost) * rate)).sum())
    up_s = max(1 / fatal_rate if fatal_rate > 0 else np.inf, min(fresh_s, 1e30))
    base_s = costs.compute_s + costs.reduce_s
    horizon_s = costs.steps * step_s
    intervals: NDArray[np.int64] = save_intervals(step_s, costs)
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
