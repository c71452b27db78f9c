"""What every policy shares: the clock, failures, restarts of the whole job, checkpoints, and what is counted.

A policy is a subclass that says how a step goes (``_step``). Time is simulated seconds; the only randomness are the two
generators of the trial's seed, one for failures and one for jitter, so that policies meet the same failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spare_megatron.controller.messages import JobSpec
from spare_megatron.placement import build_placement
from spare_megatron.sim.cluster import Cluster, Policy
from spare_megatron.sim.failures import Ring, failures_of
from spare_megatron.sim.intervals import save_interval_s
from spare_megatron.sim.job_control import JobControl

RATIO_MAX = 50.0
"""A job that takes this many times the failure-free time is called impossible: it does not progress."""
JITTER_BLOCK = 64


@dataclass
class TrialCounts:
    """What one trial counted."""

    failures: int = 0
    """Deaths of live groups while the job trained."""
    failures_in_restart: int = 0
    masked: int = 0
    wipe_outs: int = 0
    planned_restarts: int = 0
    joins: int = 0
    """Groups that a commit admitted."""
    steps_run: int = 0
    """Commits, those that were made again too."""
    steps_recomputed: int = 0
    patched: int = 0
    """Failures after which pieces were computed again."""
    down_s: float = 0.0
    """Restarts and rebuilds."""
    save_s: float = 0.0
    work: float = 0.0
    """Sum over commits of the largest load, in shards."""
    slowest_s: float = 0.0
    """Sum over commits of the wait for the slowest group beyond a group of mean speed."""


@dataclass(frozen=True)
class TrialResult:
    """One trial."""

    time_s: float
    ratio: float | None
    """Against the failure-free run without redundancy, saves and jitter; None: the job does not progress."""
    availability: float
    mean_work: float
    seed: int
    tally: TrialCounts = field(default_factory=TrialCounts)
    events: int = 0
    """Controller events."""


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
        """``check`` tests every invariant of the controller after each event: slow above some hundred groups."""
        policy.check(cluster)
        self.cluster, self.policy, self.seed = cluster, policy, seed
        self.failures = failures_of(cluster, seed, trace, domains)
        self._jitter = np.random.default_rng((seed, 2))
        self._normals: NDArray[np.float64] = np.zeros((0, cluster.num_groups))
        self.now_s = 0.0
        self.alive: NDArray[np.bool_] = np.ones(cluster.num_groups, dtype=np.bool_)
        self.held: list[int] = []
        """Groups that failed when nobody looked: they are found dead at the next look."""
        self.tally = TrialCounts()
        self.control = JobControl(self._spec(), check)
        self.saved_step = 0
        self.last_save_s = 0.0
        self.saving: tuple[float, int] | None = None
        self.furthest = 0
        self.interval_s = save_interval_s(cluster, policy)
        self.failure_free_s = policy.steps * (cluster.compute_s + cluster.reduce_s)
        self.limit_s = RATIO_MAX * self.failure_free_s
        """Beyond this time the job is called impossible."""

    # -------------------------------------------------------------------------------------------- what a policy defines

    def _spec(self) -> JobSpec:
        """The job as the controller sees it."""
        raise NotImplementedError

    def _members(self) -> list[int]:
        """The controller's groups at the beginning of a life."""
        return list(range(self.cluster.num_groups))

    def _step(self) -> bool:
        """Run one step up to its commit; False when it ended in a wipe-out."""
        raise NotImplementedError

    def _boundary(self) -> None:
        """After a commit: saves and planned restarts."""
        self._save_if_due()

    def _recover(self) -> None:
        """After a wipe-out: by default all groups restart from the checkpoint."""
        self._restart()
        # The published simulation redoes the saved step as well.
        self._open(max(0, self.saved_step - 1))

    # ------------------------------------------------------------------------------------------------------- the trial

    def run(self) -> TrialResult:
        """The whole job."""
        steps = self.policy.steps
        self._open(0)
        while (committed := self.control.state.committed[0]) < steps:
            if self.now_s > self.limit_s:
                return self._outcome(None)
            if self._step():
                self.tally.steps_run += 1
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
        return TrialResult(
            self.now_s, ratio, available, self.tally.work / runs, self.seed, self.tally, self.control.events
        )

    def _open(self, first_step: int, offsets: Sequence[int] | None = None) -> None:
        self.control.open(first_step, self._members(), offsets)

    def speeds(self) -> NDArray[np.float64]:
        """[N]: relative duration of this step on every group."""
        if not len(self._normals):
            self._normals = self._jitter.standard_normal((JITTER_BLOCK, self.cluster.num_groups))
        row, self._normals = self._normals[0], self._normals[1:]
        drawn: NDArray[np.float64] = 1.0 + self.cluster.jitter * row
        return drawn

    def slowest(self) -> float:
        """The longest relative duration of a live group in this step."""
        if not self.cluster.jitter:
            return 1.0
        return float(self.speeds()[self.alive].max())

    def poll(self, until_s: float) -> list[int]:
        """Live groups that failed up to a time and were not known to: they are dead now."""
        if self.failures.first > until_s and not self.held:
            return []
        hit = [*self.held, *(group for _, group in self.failures.due(until_s))]
        self.held = []
        return self.bury(hit)

    def bury(self, groups: Iterable[int]) -> list[int]:
        """Those of the groups that were alive; they are dead now."""
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
        """All groups start again. One that fails meanwhile starts its own time anew and all wait for it; one that is
        ready and fails while it waits is found dead when the job goes on. Where failures come faster than restarts this
        would never end: beyond the limit it is a job that does not progress, and nobody waits any more."""
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
                    self.tally.failures_in_restart += 1
                else:
                    self.held.append(group)
        self.now_s = float(ready.max())
        if self.policy.reading.clocks_restart:
            self.failures.restart(self.now_s)
        self.last_save_s = self.now_s
        self.tally.down_s += self.now_s - began
        self.alive[:] = True


class Returns:
    """Groups' machines under repair, and standbys: who takes which place when."""

    def __init__(self, standby_groups: int) -> None:
        self._all_standbys = self.standbys = standby_groups
        self._repairs: list[float] = []
        self._missing: list[int] = []

    @property
    def next_s(self) -> float:
        """When the next machine comes out of repair."""
        return self._repairs[0] if self._repairs else np.inf

    def died(self, group: int, at_s: float, rejoin_s: float | None) -> int | None:
        """A group died; the place that a standby takes at once, if there is one."""
        self._missing.append(group)
        if rejoin_s is not None:
            heapq.heappush(self._repairs, at_s + rejoin_s)
        if not self.standbys:
            return None
        self.standbys -= 1
        return self._missing.pop(0)

    def repaired(self, until_s: float) -> list[int]:
        """Places that repaired machines take up to a time; those that find no free place are standbys."""
        places: list[int] = []
        while self._repairs and self._repairs[0] <= until_s:
            heapq.heappop(self._repairs)
            if self._missing:
                places.append(self._missing.pop(0))
            else:
                self.standbys += 1
        return places

    def reset(self) -> None:
        """The whole job restarted: everything is whole again."""
        self._repairs, self._missing, self.standbys = [], [], self._all_standbys


def job_spec(policy: Policy, num_groups: int, redundancy: int, pieces: int, granularity: str) -> JobSpec:
    """A job from step 0 on the placement that a real one would get."""
    placement = build_placement(num_groups, redundancy, policy.placement)  # type: ignore[arg-type]
    return JobSpec(num_groups, pieces, placement.offsets, granularity, 0, policy.steps, 1, "")
