"""Runs one job under a schedule of faults for some minutes, and lets it end whole: all groups back, then asked to
leave.

What is wrong with the job while it runs (it ends by itself, no step is committed for long, a group does not come back)
ends the soak with an AssertionError that says so.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._chaos import WEATHER, WEIGHTS, schedule
from benchmarks._soak_models import Model
from benchmarks._soak_samples import Samples
from benchmarks._strikes import Strikes, members
from benchmarks._unfit_hosts import UnfitHosts
from benchmarks._weather import Weather
from spare_megatron.config.exits import ExitCode
from tests.process.harness import Job
from tests.process.returning import AFTER

LOOK_S, SAMPLE_S, ANNOUNCE_S = 0.05, 4.0, 10.0
STALL_S = 90.0
"""A job that commits no step for this long is stuck: half as long again as the progress time-out."""
START_S, BACK_S, LEAVE_S = 180.0, 420.0, 120.0
"""How long the first step, the return of all groups (whose restarts may be 300 s away) and the end may take."""


@dataclass
class Soak:
    """One soaked job."""

    model: Model
    seed: int
    duration_s: float
    mean_gap_s: float
    run_dir: Path
    announce: Callable[[str], None]
    restarts: Mapping[str, object]
    """The launcher's flags about restarts of groups."""
    weather: Weather | None = None
    hosts: UnfitHosts | None = None
    """Hosts that are fit for a part of their group now and then."""
    samples: Samples = field(default_factory=Samples)
    strikes: Strikes = field(init=False)
    job: Job = field(init=False)
    whole_after_s: float = 0.0
    """Time from the last fault until all groups trained together."""
    _began_s: float = 0.0
    _sampled_s: float = 0.0
    _reported_s: float = 0.0
    _step: int = -1
    _moved_s: float = 0.0

    def __post_init__(self) -> None:
        model = self.model
        faults = schedule(
            self.seed,
            self.duration_s,
            model.groups,
            model.group_size,
            self.mean_gap_s,
            model.heartbeat_s,
            WEATHER if self.weather else WEIGHTS,
        )
        self.strikes = Strikes(self.run_dir, faults, model.hosts(), self._now_s, self.weather)

    @property
    def scratch(self) -> Path:
        """The folder of the job's temporary files."""
        return self.run_dir / "tmp"

    def run(self) -> None:
        """Run the job to its end. Raises AssertionError where it does not go on or does not end as it should."""
        self.scratch.mkdir(parents=True)
        if self.weather is not None:
            self.weather.begin()
        self.job = self.model.start(self.run_dir, self.restarts, self.scratch, self.weather)
        try:
            self._until("the first step", self._is_whole, START_S)
            self._began_s = self._moved_s = time.monotonic()
            self._until("the end of the schedule", lambda: self._now_s() >= self.duration_s, self.duration_s + 60.0)
            self.strikes.end()
            if self.hosts is not None:
                self.hosts.end()
            ended_s = self._now_s()
            self._until("the return of all groups", self._is_home, BACK_S)
            self.whole_after_s = self._now_s() - ended_s
            step = self.strikes.look()["step"]
            self._until("some more steps", lambda: self.strikes.look().get("step", 0) >= step + AFTER, STALL_S)
            self.samples.look_at_ports()
            self.job.kill(self.job.process.pid, number=signal.SIGTERM)
            self.job.finish(code=ExitCode.REQUEUE, timeout_s=LEAVE_S)
        finally:
            self.strikes.end()
            self.job.end()
            if self.weather is not None:
                self.weather.end()

    def _until(self, what: str, true: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not true():
            status = self.strikes.look()
            if self._began_s:
                self.strikes.act()
                self._look(status)
                if self.hosts is not None:
                    self.hosts.look(self._now_s())
            if self.job.process.poll() is not None:
                raise AssertionError(f"the job ended before {what}, with exit code {self.job.process.returncode}")
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s:g} s: {what}; the job's status is {status}")
            time.sleep(LOOK_S)

    def _look(self, status: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        if status.get("step", self._step) != self._step:
            self._step, self._moved_s = status["step"], now_s
        if now_s - self._moved_s > STALL_S:
            raise AssertionError(f"no step was committed for {STALL_S:g} s; the job's status is {status}")
        if now_s - self._sampled_s > SAMPLE_S:
            self._sampled_s = now_s
            self.samples.look(self.job.process.pid, self._now_s(), self.strikes.returns)
        if now_s - self._reported_s > ANNOUNCE_S:
            self._reported_s = now_s
            strikes = self.strikes
            self.announce(
                f"{self._now_s():6.0f} s  step {status.get('step', 0)}  {len(status.get('live', ()))} of "
                f"{self.model.groups} groups, {len(status.get('learners', ()))} learn  faults {strikes.carried_out}, "
                f"{strikes.skipped.total()} left out  returns {strikes.returns}"
            )

    def _is_whole(self) -> bool:
        """All groups are members that train."""
        status = self.strikes.look()
        lines = self.job.metrics[-1:] if len(members(status)) == self.model.groups else []
        return bool(lines) and lines[0]["live_groups"] == self.model.groups

    def _is_home(self) -> bool:
        """They are, and each has all its ranks and is not asked to leave."""
        if not self._is_whole() or self.strikes.look()["drained"]:
            return False
        ranks = Counter(one["group"] for one in self.job.ranks() if one["pid"])
        return all(ranks[group] == self.model.group_size for group in range(self.model.groups))

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s if self._began_s else 0.0
