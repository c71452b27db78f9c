"""Computes the time to train of a job that loses groups, relative to a failure-free run, and the best save interval.

A job goes through states k = 0, 1, ... lost groups. Per-group failure clocks of mean N x m are assumed, so state k
lasts N m / (N - k) on the mean and is reached with probability survival[k]. Without re-join a cycle ends with the
fatal loss, or with a planned restart after a given number of losses; then all groups come back. With re-join the number
of lost groups is binomial in the steady state. docs/theory.md derives each line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, gamma

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr, xlog1py, xlogy

from spare_megatron.planning.bare_shards import Rescue, bare_chance, waiting_s
from spare_megatron.planning.endured import Floats, certain

INTERVALS = 60
"""Number of save intervals tried, spaced evenly in their logarithm."""
INTERVAL_MAX_S = 14_400.0
"""Longest save interval, four hours, even where losses of groups do not require any: faults that end all groups at once
are not in this model."""
GROUPS_MAX = 1e7
COUNTS = 400
"""Number of counts of groups for which the time of the slowest is computed; in between it is interpolated."""
PLANNED_GAIN_MIN = 0.002
"""A planned restart is chosen only when it lowers the time to train by this share."""


@dataclass(frozen=True)
class Costs:
    """Times of a cluster and a job, in seconds."""

    mtbf_s: float
    """Mean time between losses anywhere in the whole cluster while all groups live."""
    restart_s: float
    save_s: float
    compute_s: float
    """Time in which a group computes one shard."""
    reduce_s: float
    rebuild_s: float = 0.1
    weibull_shape: float = 1.0
    rejoin_s: float | None = None
    """Time from a loss until the group can take the state of the others; None where only a restart brings it back."""
    transfer_s: float = 0.0
    """Time in which it takes that state; 0: at once."""
    result_s: float = 0.0
    """Time in which it takes the result of a step."""
    standby_groups: int = 0
    save_interval_s: float | None = None
    """Time between two saves; None: the best."""
    jitter: float = 0.05
    """Relative standard deviation of a group's compute time; a step ends at the slowest group."""
    steps: int = 10_000


@dataclass(frozen=True)
class ExpectedRun:
    """Expected course of a job."""

    ratio: float
    """Time to train / failure-free time without redundancy, jitter and saves."""
    availability: float
    """1 - time of restarts / total time, as the simulator has it; saves, rebuilds and repeated steps count as up."""
    interval_steps: int
    interval_s: float
    restart_after: int | None
    """Number of lost groups with which a planned restart is better than going on, as ``--spare-restart-after`` and
    spare-simulate count them: groups that a standby has replaced are not lost. None where it never is."""
    restarts_s: float
    """Mean time between restarts, planned or not; infinite where there are none."""


def slowest(jitter: float, groups: NDArray[np.int64] | int) -> Floats:
    """Expected largest of n normal times of mean 1: 1 + jitter * e(n), e(n) = integral of x n phi(x) Phi(x)^(n - 1) dx.

    Exact up to n = 27, within 0.01% of the excess beyond. The closed form Phi^-1(0.5264^(1/n)) (Chen & Tyler, Commun.
    Stat. Simul. Comput. 28, 1999) is 6.2%, 2.6%, 1.4% too high at n = 2, 3, 4 and 0.7% too low at 200."""
    log_counts, largest = _largest_normal()
    log_groups = np.log(np.maximum(np.asarray(groups, dtype=np.float64), 1.0))
    return np.asarray(1 + jitter * np.interp(log_groups, log_counts, largest))


@cache
def _largest_normal() -> tuple[Floats, Floats]:
    """(ln n, e(n)) at counts spaced evenly in their logarithm, by the trapezoidal rule."""
    counts = np.unique(np.geomspace(1, GROUPS_MAX, COUNTS).round())
    x, step = np.linspace(-9.0, 9.0, 721, retstep=True)
    log_density = np.log(counts)[:, None] - x**2 / 2 + (counts[:, None] - 1) * log_ndtr(x)
    return np.log(counts), np.asarray((x * np.exp(log_density)).sum(axis=1) * step / np.sqrt(2 * np.pi))


def restart_time_s(num_groups: int, costs: Costs) -> float:
    """Expected seconds of a restart, in which a group that fails while it starts begins anew and all wait for it.

    One group is ready by t with probability G(t); all are after the integral of 1 - G^N. A group's first failure comes
    at the steady rate 1 / (N m), further ones by a fresh Weibull clock."""
    base = costs.restart_s
    if base <= 0:
        return 0.0
    mean = num_groups * costs.mtbf_s
    scale = mean / gamma(1 + 1 / costs.weibull_shape)
    first = min(base / mean, 0.95)
    again = float(-np.expm1(-((base / scale) ** costs.weibull_shape)))
    grid = 64
    # Density of the delay before the last start, in steps of base / grid, over up to 8 failed starts.
    delay = np.zeros(9 * grid)
    failed = np.zeros_like(delay)
    failed[:grid] = first / grid
    delay[0] = 1 - first
    ages = np.arange(grid + 1) / grid * base / scale
    fresh = np.diff(-np.expm1(-(ages**costs.weibull_shape)))
    for _ in range(8):
        delay += failed * (1 - again)
        failed = np.convolve(failed, fresh)[: len(delay)]
    ready = np.minimum(np.cumsum(delay), 1.0)
    return float(base + base / grid * (1 - ready**num_groups).sum())


def losses_factor(num_groups: int, costs: Costs, horizon_s: float) -> float:
    """Losses in a job of this length, divided by those at the steady rate: new clocks of shape < 1 fail early.

    Renewal theory: m(t) = t / mean + (cv^2 - 1) / 2 for long jobs; the cumulative hazard of one clock for short
    ones."""
    shape = costs.weibull_shape
    lifetimes = horizon_s / (num_groups * costs.mtbf_s)
    if shape == 1.0 or lifetimes <= 0:
        return 1.0
    hazard = (lifetimes * gamma(1 + 1 / shape)) ** shape
    variation = gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1
    if shape > 1:
        return float(min(1.0, max(hazard, lifetimes + (variation - 1) / 2) / lifetimes))
    return float(max(1.0, min(hazard, lifetimes + (variation - 1) / 2) / lifetimes))


@dataclass(frozen=True)
class PatchCost:
    """What survivors compute in addition after a loss in the middle of a step, in shards."""

    shards: float = 0.0
    """Shards that are computed after the step, while all groups wait."""
    beside: tuple[tuple[float, int], ...] = ()
    """(shards, groups): this number of groups computes so many shards more, beside their own work of the step."""

    @staticmethod
    def spread(pieces: int, hosts: int) -> PatchCost:
        """The cost of a shard's ``pieces`` that are spread evenly over ``hosts`` groups."""
        least, more = divmod(pieces, hosts)
        levels = ((least + 1, more), (least, hosts - more))
        return PatchCost(beside=tuple((taken / pieces, count) for taken, count in levels if taken and count))

    def cost_s(self, work: Floats, living: NDArray[np.int64], costs: Costs) -> Floats:
        """Seconds by which the step takes longer, for each state: little where few groups patch, because all wait for
        the slowest group anyway."""
        usual = work * slowest(costs.jitter, living)
        longest = usual
        for shards, groups in self.beside:
            longest = np.maximum(longest, (work + shards) * slowest(costs.jitter, groups))
        return np.asarray((longest - usual + self.shards) * costs.compute_s)


def outcome(
    num_groups: int,
    work: Floats,
    survival: Floats,
    patch: PatchCost,
    *,
    costs: Costs,
    planned: bool = True,
    adoption: Rescue | None = None,
) -> ExpectedRun | None:
    """The expected course of a job of N groups; None where it makes no progress.

    Args:
        num_groups: N.
        work: work[k] is the load of the most loaded group after k losses, in shards.
        survival: survival[k] is the probability that every shard has a live host after k losses, k = 0 .. N.
        patch: what a loss in the middle of a step adds.
        costs: times of cluster and job.
        planned: whether planned restarts are considered.
        adoption: who adopts a shard that has lost its last host; None: the job restarts from the checkpoint.
    """
    base_s = costs.compute_s + costs.reduce_s
    horizon_s = costs.steps * base_s
    found: ExpectedRun | None = None
    for _ in range(3):
        rate = losses_factor(num_groups, costs, horizon_s)
        found = _cycles(
            num_groups,
            work,
            survival,
            patch,
            costs=costs,
            rate=rate,
            horizon_s=horizon_s,
            planned=planned,
            adoption=adoption,
        )
        if found is None:
            return None
        horizon_s = costs.steps * base_s * found.ratio
    return found


def _steps_s(num_groups: int, work: Floats, lost: NDArray[np.int64], costs: Costs) -> Floats:
    return work * costs.compute_s * slowest(costs.jitter, num_groups - lost) + costs.reduce_s


def _masked_s(
    num_groups: int, work: Floats, lost: NDArray[np.int64], step_s: Floats, patch: PatchCost, costs: Costs
) -> Floats:
    """What a masked loss at a uniform time of a step adds to it, on the mean. docs/theory.md, section 4.

    While the step computes, groups go on during the rebuild: it costs only what outlasts the computing that is left and
    the patch. In the reduction nothing is left beside it, and half of the reduction is repeated."""
    patch_s = patch.cost_s(work, num_groups - lost, costs)
    compute_s = step_s - costs.reduce_s
    beyond_s = np.maximum(costs.rebuild_s - patch_s, 0.0)
    within_s = np.minimum(beyond_s, compute_s)
    outlasting = within_s * (beyond_s - within_s / 2)
    reducing = costs.reduce_s * (beyond_s + costs.reduce_s / 2)
    return np.asarray(patch_s + (outlasting + reducing) / np.maximum(step_s, 1e-9))


def save_intervals(step_s: float, costs: Costs) -> NDArray[np.int64]:
    """The save intervals that are tried, in steps: the first step boundary after a given one."""
    if costs.save_interval_s is not None:
        return np.array([max(1, ceil(costs.save_interval_s / max(step_s, 1e-9)))])
    most = max(2, int(INTERVAL_MAX_S / max(step_s, 1e-9)))
    return np.unique(np.geomspace(1, most, INTERVALS).astype(np.int64))


def _cycles(
    num_groups: int,
    work: Floats,
    survival: Floats,
    patch: PatchCost,
    *,
    costs: Costs,
    rate: float,
    horizon_s: float,
    planned: bool,
    adoption: Rescue | None,
) -> ExpectedRun | None:
    """No re-join: all cycles are alike. Columns are the losses after which a restart is planned, rows the intervals."""
    standing = np.concatenate([np.zeros(costs.standby_groups, dtype=np.int64), np.arange(len(work))])
    endures = survival if adoption is None else certain(num_groups, num_groups - 1).survival
    reach = endures[standing]
    time_s = num_groups * costs.mtbf_s / rate / (num_groups - standing)
    step_s = _steps_s(num_groups, work[standing], standing, costs)
    starts = np.cumsum(time_s) - time_s
    part = np.clip((horizon_s - starts) / time_s, 0.0, 1.0)
    states = int(np.count_nonzero(part))
    reach, time_s, step_s, part = reach[:states], (time_s * part)[:states], step_s[:states], part[:states]
    onward = _onward(endures, standing)[:states]
    masked_s = _masked_s(num_groups, work[standing[:states]], standing[:states], step_s, patch, costs)
    if adoption is not None:
        bare = bare_chance(survival, standing, np.diff(standing, append=standing[-1] + 1))[:states]
        own_s = costs.compute_s * num_groups / (num_groups - standing[:states])
        computing_s = np.maximum(step_s - costs.reduce_s, own_s)
        masked_s = masked_s + bare * waiting_s(adoption, own_s, computing_s, costs.reduce_s, costs.compute_s)
    disturbed = np.minimum(masked_s * part, time_s)
    fatal = np.cumsum((reach - onward) * part)
    up_s = np.cumsum(reach * time_s)
    intervals = save_intervals(float(step_s[0]), costs)
    made = np.cumsum(
        (reach * (time_s - disturbed))[None, :] / (step_s[None, :] + costs.save_s / intervals[:, None]), axis=1
    )
    repeated = fatal[None, :] * (intervals[:, None] / 2 + 1)
    ended = states < len(standing) or bool(part[-1] < 1)
    alive = np.clip(reach[0] - fatal, 0.0, 1.0)
    if ended:
        alive[-1] = 0.0
    restart = restart_time_s(num_groups, costs)
    total_s = up_s + fatal * restart + alive * (restart + costs.save_s)
    steps = made - repeated
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(steps > 0, total_s[None, :] / steps / (costs.compute_s + costs.reduce_s), np.inf)
    last = states - 1
    column = last
    if planned and states > costs.standby_groups:
        best = costs.standby_groups + int(np.argmin(ratio[:, costs.standby_groups :].min(axis=0)))
        if ratio[:, best].min() < ratio[:, last].min() * (1 - PLANNED_GAIN_MIN):
            column = best
    row = int(np.argmin(ratio[:, column]))
    if not np.isfinite(ratio[row, column]) or up_s[column] < fatal[column] * (costs.restart_s + costs.save_s):
        return None
    down = (fatal[column] + alive[column]) * restart
    mean_step_s = float(up_s[column] / made[row, column])
    ends = float(fatal[column] + alive[column])
    return ExpectedRun(
        ratio=float(ratio[row, column]),
        availability=float(1 - down / total_s[column]),
        interval_steps=int(intervals[row]),
        interval_s=float(intervals[row] * mean_step_s),
        restart_after=column + 1 - costs.standby_groups if column != last else None,
        restarts_s=float(total_s[column] / ends) if ends > 1e-9 else float("inf"),
    )


def binomial(trials: int, chance: float) -> Floats:
    """Probabilities [trials + 1] of 0, 1, ... hits in independent trials that each hit with probability ``chance``."""
    hits = np.arange(trials + 1)
    ways = gammaln(trials + 1) - gammaln(hits + 1) - gammaln(trials - hits + 1)
    return np.asarray(np.exp(ways + xlogy(hits, chance) + xlog1py(trials - hits, -chance)))


def _onward(survival: Floats, standing: NDArray[np.int64]) -> Floats:
    """Probability of reaching the next state, for each state; a loss that a standby replaces is never fatal."""
    after = np.append(standing[1:], standing[-1] + 1)
    return np.asarray(np.append(survival, 0.0)[after])
