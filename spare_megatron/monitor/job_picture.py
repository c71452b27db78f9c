"""One picture of a job, from all that its run directory has. Pure.

The terminal, the report and whatever else shows a job take their figures from here, so they show the same ones.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.config.job import JobDescription
from spare_megatron.coordinator.journal import Record
from spare_megatron.monitor.job_history import Failure, JobHistory
from spare_megatron.monitor.step_parts import UsualStep
from spare_megatron.monitor.wall_time import TimeParts, WallTime, WallTimeBook, follows_at_once


@dataclass
class StepSeries:
    """What the plots show of each committed step, in the order of the lines of metrics.jsonl."""

    time_unix_s: array[float] = field(default_factory=lambda: array("d"))
    """When it was committed."""
    step: array[int] = field(default_factory=lambda: array("q"))
    step_time_s: array[float] = field(default_factory=lambda: array("d"))
    live_groups: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    """NaN where nobody reported it."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the step of one line."""
        for name in ("time_unix_s", "step", "step_time_s", "live_groups"):
            getattr(self, name).append(line[name])
        self.loss.append(float("nan") if line["loss"] is None else line["loss"])


@dataclass(frozen=True)
class FailureCost:
    """One failure, and what it cost."""

    failure: Failure
    parts: TimeParts
    """Seconds by part (watch.wall_time). Of several failures in one step the first one has all of it."""
    back_s: Mapping[int, float]
    """Group -> seconds until it was a member again in the same job attempt; groups that were not are left out."""
    started_again: bool = False
    """Whether another job attempt has begun since."""

    @property
    def total_s(self) -> float:
        """What it cost, in seconds."""
        return sum(self.parts.values())


class JobPicture:
    """Takes what is new in a run directory, and has all that is known of the job."""

    def __init__(self) -> None:
        self.history = JobHistory()
        self.series = StepSeries()
        self.status: Mapping[str, Any] = {}
        """status.json; empty before it is there."""
        self.job = JobDescription()
        """job.json; the defaults before it is there."""
        self.lines_left_out = 0
        """How many lines of metrics.jsonl an older version wrote."""
        self.has_launcher = self.has_left = False
        """Whether a launcher has started the job, and whether it has left and starts no other job attempt."""
        self._book = WallTimeBook(self.history)

    def take(self, records: Iterable[Record], lines: Iterable[Mapping[str, Any]]) -> None:
        """Take new records of the journal, and new lines of metrics.jsonl. The records must go at least as far as the
        lines."""
        for record in records:
            self.history.take(record)
        for line in lines:
            self.series.add(line)
            self._book.take(line)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and no launcher starts it again by itself."""
        if not self.history.job_attempts or self.has_left:
            return self.has_left
        job_attempt = self.history.job_attempt
        return job_attempt.ended_s is not None and not (self.has_launcher and follows_at_once(job_attempt))

    def quiet_s(self, now_unix_s: float) -> float:
        """For how long the status of a job that goes on has been the same, in seconds."""
        return 0.0 if self.is_over else max(0.0, now_unix_s - self.status.get("time_unix_s", now_unix_s))

    @property
    def usual(self) -> UsualStep:
        """A usual step, as lately seen."""
        return self._book.usual

    def wall_time(self) -> WallTime:
        """Where the wall time went by now."""
        return self._book.result()

    def failures(self, wall_time: WallTime) -> list[FailureCost]:
        """All failures with their cost, in their order."""
        steps, job_attempts = dict(wall_time.steps), dict(wall_time.job_attempts)
        returns_s, newest = self._returns_s(), max((one.number for one in self.history.job_attempts), default=0)
        found = []
        ended = {failure.job_attempt: failure for failure in self.history.failures if not failure.masked}
        for failure in self.history.failures:
            if failure.masked:
                parts = steps.pop((failure.job_attempt, failure.step), {})
            else:  # the last one has ended the job attempt
                parts = job_attempts.pop(failure.job_attempt, {}) if failure is ended[failure.job_attempt] else {}
            found.append(FailureCost(failure, parts, _back_s(failure, returns_s), newest > failure.job_attempt))
        return found

    def _returns_s(self) -> Mapping[tuple[int, int], list[float]]:
        """(job attempt, group) -> the times at which it was a member again, in order."""
        returns_s: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for one in self.history.returns:
            returns_s[one.job_attempt, one.group].append(one.time_s)
        for times_s in returns_s.values():
            times_s.sort()
        return returns_s


def _back_s(failure: Failure, returns_s: Mapping[tuple[int, int], list[float]]) -> dict[int, float]:
    """Group -> seconds from the failure to the group's first return after it."""
    back: dict[int, float] = {}
    for group in failure.groups:
        times_s = returns_s.get((failure.job_attempt, group), [])
        place = bisect_left(times_s, failure.time_s)
        if place < len(times_s):
            back[group] = times_s[place] - failure.time_s
    return back
