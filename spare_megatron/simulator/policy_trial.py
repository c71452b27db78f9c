"""The part of a trial that all policies share: clock, failures, restarts of the whole job, checkpoints, counts.

A policy is a subclass that runs a step (``_step``). Time is in simulated seconds. Random numbers come from generators
of the trial's seed, with one of its own for failures, so that all policies meet the same failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import build_placement
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.failures import Ring, failures_of
from spare_megatron.simulator.intervals import save_interval_s
from spare_megatron.simulator.job_control import JobControl

RATIO_MAX = 50.0
"""A trial stops at this many times the failure-free time: the job makes no progress."""
JITTER_BLOCK = 64


@dataclass
class TrialCounts:
    """The counts of one trial."""

    failures: int = 0
    """Deaths of live groups while the job trained."""
    masked: int = 0
    wipe_outs: int = 0
    soft_wipe_outs: int = 0
    """Losses of the last hosts of shards, which others have adopted."""
    planned_restarts: int = 0
    joins: int = 0
    """Groups that a commit admitted."""
    learners_lost: int = 0
    """Deaths of groups that were being brought up to date."""
    steps_run: int = 0
    """Number of commits, with those of recomputed steps."""
    steps_recomputed: int = 0
    patched: int = 0
    """Number of patches that were computed after failures."""
    down_s: float = 0.0
    """Seconds of restarts and, in the published policies, rebuilds."""
    save_s: float = 0.0
    work: float = 0.0
    """Sum over commits of the largest load, in shards."""
    away_s: float = 0.0
    """Sum over commits of the seconds of their step, times the groups that did not train at its end; one in a smaller
    shape counts for the share of its speed at home that it lacks."""
    slowest_s: float = 0.0
    """Sum over commits of the seconds by which the slowest group takes longer than the mean group."""


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial."""

    time_s: float
    ratio: float | None
    """Time / that of the failure-free run without redundancy, saves and jitter; None where the job makes no
    progress."""
    availability: float
    mean_work: float
    seed: int
    tally: TrialCounts = field(default_factory=TrialCounts)
    events: int = 0
    """Number of protocol events."""
    away: float = 0.0
    """Mean share of the groups that did not train."""


class PolicyTrial:
    """One trial of one policy."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        seed: int,
        trace: Sequence[Ring] | None = None,
        domains: Mapping[str, Sequence[int]] | None = None,
        check: bool = False,
    ) -> None:
        """``check`` tests every invariant of the protocol machine after each event: slow above some hundred groups."""
        policy.check(cluster)
        self.cluster, self.policy, self.seed = cluster, policy, seed
        self.failures = failures_of(cluster, seed, trace, domains)
        self._jitter = np.random.default_rng((seed, 2))
        self._normals: NDArray[np.float64] = np.zeros((0, cluster.num_groups))
        self._slowness = np.ones(cluster.num_groups)
        slow = np.random.default_rng((seed, 5)).choice(cluster.num_groups, cluster.stragglers, replace=False)
        self._slowness[slow] = cluster.straggler_slowdown
        self.now_s = 0.0
        self.alive: NDArray[np.bool_] = np.ones(cluster.num_groups, dtype=np.bool_)
        self.held: list[int] = []
        """Groups that failed and are not known to be dead yet: the next :meth:`poll` or step finds them."""
        self.tally = TrialCounts()
        self.control = JobControl(self._spec(), check)
        self.saved_step = 0
        self.last_save_s = 0.0
        self.saving: tuple[float, int] | None = None
        self.furthest = 0
        self.interval_s = save_interval_s(cluster, policy)
        self.failure_free_s = policy.steps * (cluster.compute_s + cluster.reduce_s)
        self.limit_s = RATIO_MAX * self.failure_free_s
        """Simulated seconds after which the trial stops without progress."""

    # -------------------------------------------------------------------------------------------- what a policy defines

    def _spec(self) -> JobSpec:
        """The job's specification for the protocol machine."""
        raise NotImplementedError

    def _members(self) -> list[int]:
        """The groups with which a job attempt begins, as the protocol machine numbers them."""
        return list(range(self.cluster.num_groups))

    def _step(self) -> bool:
        """Run one step up to its commit; False when it ended in a wipe-out."""
        raise NotImplementedError

    def _boundary(self) -> None:
        """Save or restart as planned after a commit."""
        self._save_if_due()

    def _recover(self) -> None:
        """Go on after a wipe-out: by default all groups restart from the checkpoint."""
        self._restart()
        # The published simulation redoes the saved step as well.
        self._open(max(0, self.saved_step - 1))

    def _away(self) -> float:
        """The number of groups that do not train."""
        return float(np.count_nonzero(~self.alive))

    # ------------------------------------------------------------------------------------------------------- the trial

    def run(self) -> TrialResult:
        """Run the whole job."""
        steps = self.policy.steps
        self._open(0)
        while (committed := self.control.state.committed[0]) < steps:
            if self.now_s > self.limit_s:
                return self._outcome(None)
            began = self.now_s
            if self._step():
                self.tally.steps_run += 1
                self.tally.away_s += (self.now_s - began) * self._away()
                self.tally.steps_recomputed += self.control.state.committed[0] <= self.furthest
                self.furthest = max(self.furthest, committed + 1)
                if committed + 1 < steps:
                    self._boundary()
            else:
                self.tally.wipe_outs += 1
                self._recover()
        return self._outcome(self.now_s / self.failure_free_s)

    def _outcome(self, ratio: float | None) -> TrialResult:
        runs = max(1, self.tally.steps_run)
        available = 1.0 - self.tally.down_s / self.now_s if self.now_s else 1.0
        away = self.tally.away_s / (self.now_s * self.cluster.num_groups) if self.now_s else 0.0
        return TrialResult(
            self.now_s,
            ratio,
            available,
            self.tally.work / runs,
            self.seed,
            tally=self.tally,
            events=self.control.events,
            away=away,
        )

    def _open(self, first_step: int) -> None:
        self.control.open(first_step, self._members())

    def speeds(self) -> NDArray[np.float64]:
        """[N]: relative duration of this step on every group."""
        if not self.cluster.jitter:
            return self._slowness.copy()
        if not len(self._normals):
            self._normals = self._jitter.standard_normal((JITTER_BLOCK, self.cluster.num_groups))
        row, self._normals = self._normals[0], self._normals[1:]
        drawn: NDArray[np.float64] = (1.0 + self.cluster.jitter * row) * self._slowness
        return drawn

    def slowest(self) -> float:
        """The longest relative duration of a live group in this step."""
        return float(self.speeds()[self.alive].max())

    def poll(self, until_s: float) -> list[int]:
        """Mark the live groups that failed up to a time as dead; returns them."""
        if self.failures.first > until_s and not self.held:
            return []
        hit = [*self.held, *(group for _, group in self.failures.due(until_s))]
        self.held = []
        return self.bury(hit)

    def bury(self, groups: Iterable[int]) -> list[int]:
        """Mark ``groups`` as dead; returns those that were alive."""
        dead = [group for group in dict.fromkeys(groups) if self.alive[group]]
        self.alive[dead] = False
        self.tally.failures += len(dead)
        return dead

    # --------------------------------------------------------------------------------------- checkpoints and restarts

    def _save_if_due(self) -> None:
        """Save at the first step boundary that is an interval after the last save."""
        if self.saving is not None and self.now_s >= self.saving[0]:
            self.saved_step, self.saving = self.saving[1], None
        if self.now_s - self.last_save_s >= self.interval_s and self.saving is None:
            self._save()

    def _save(self) -> None:
        step = self.control.state.committed[0]
        self.last_save_s = self.now_s
        if self.policy.async_save:
            self.saving = (self.now_s + self.cluster.save_s, step)
            return
        self.now_s += self.cluster.save_s
        self.tally.save_s += self.cluster.save_s
        self.saved_step, self.last_save_s = step, self.now_s

    def _restart(self) -> None:
        """Restart all groups. A group that fails before it is ready starts anew and all wait for it; one that fails
        after it is ready is found dead when the job goes on. Where failures come faster than restarts this would never
        end, so waiting ends at ``limit_s``, where the trial stops without progress."""
        began = self.now_s
        self.failures.due(began)
        self.held, self.saving = [], None
        ready = np.full(self.cluster.num_groups, began + self.cluster.restart_s)
        while ready.max() <= self.limit_s and (rings := self.failures.due(float(ready.max()))):
            for at, group in rings:
                if not self.policy.reading.restart_repeats:
                    continue
                if at <= ready[group]:
                    ready[group] = at + self.cluster.restart_s
                else:
                    self.held.append(group)
        self.now_s = float(ready.max())
        if self.policy.reading.clocks_restart:
            self.failures.restart(self.now_s)
        self.last_save_s = self.now_s
        self.tally.down_s += self.now_s - began
        self.alive[:] = True


class Returns:
    """The machines under repair and the standbys of a trial: which of them takes the place of which group, and when."""

    def __init__(self, standby_groups: int) -> None:
        self.slowness: NDArray[np.float64] = np.ones(1)
        """How many times as long as at home groups take for a piece: [N], or [1] for all of them."""
        self.go_home: set[int] = set()
        """The groups in smaller shapes that are to leave with a commit, to come back in their home shape."""
        self._all_standbys = self.standbys = standby_groups
        self._repairs: list[float] = []
        self._missing: list[int] = []

    @property
    def next_s(self) -> float:
        """The time at which the next machine is repaired; infinite without one."""
        return self._repairs[0] if self._repairs else np.inf

    def strikes(self, group: int) -> bool:
        """Whether a failure of a group hits what it has in use."""
        return True

    def left(self, group: int, at_s: float) -> None:
        """Note that one of ``go_home`` has left."""
        raise NotImplementedError

    def died(self, group: int, at_s: float, rejoin_s: float | None, struck: bool = True) -> int | None:
        """Note that a group died; returns the place that a standby takes at once, or None without a standby.
        ``struck``: a failure was the reason, not an offer that it could not take; machines of whole groups are
        repaired after either."""
        self._missing.append(group)
        if rejoin_s is not None:
            heapq.heappush(self._repairs, at_s + rejoin_s)
        if not self.standbys:
            return None
        self.standbys -= 1
        return self._missing.pop(0)

    def repaired(self, until_s: float) -> list[int]:
        """The places that machines repaired up to a time take; machines without a free place become standbys."""
        places: list[int] = []
        while self._repairs and self._repairs[0] <= until_s:
            heapq.heappop(self._repairs)
            if self._missing:
                places.append(self._missing.pop(0))
            else:
                self.standbys += 1
        return places

    def reset(self) -> None:
        """Note a restart of the whole job, after which no machine is under repair."""
        self._repairs, self._missing, self.standbys = [], [], self._all_standbys


def job_spec(policy: Policy, num_groups: int, redundancy: int, pieces: int, granularity: str) -> JobSpec:
    """The specification of a job from step 0, with the placement that a real job would have."""
    placement = build_placement(num_groups, redundancy, policy.placement)  # type: ignore[arg-type]
    return JobSpec(
        num_groups,
        pieces,
        placement.offsets,
        granularity,
        first_step=0,
        last_step=policy.steps,
        min_groups=1,
        fingerprint="",
    )
