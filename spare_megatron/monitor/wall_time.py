"""Says where the wall time of a job went, over all its job attempts, from its history and the lines of metrics.jsonl.
Pure.

*Effective training time* is what the steps that count would have taken with all groups alive, evenly fast and
undisturbed. Everything else has a name (:data:`PARTS`), and what has none is a part of its own. Wall time begins with
the process of the first coordinator and ends with the end of the last job attempt, or with the last but one committed
step of a job that runs; the time between an end and a new start by a user or a queue is left out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spare_megatron.config.exits import PLANNED
from spare_megatron.monitor.job_history import AttemptHistory, JobHistory
from spare_megatron.monitor.step_parts import StepCircumstances, UsualStep, parts_of

PARTS = {
    "train": "effective training",
    "start": "start up to the first update",
    "slowest": "waiting for the slowest group",
    "fewer": "pieces of groups that are gone",
    "detect": "failures: until decided",
    "agree": "failures: until all had dropped the old communicators",
    "rebuild": "failures: new communicators",
    "patch": "failures: lost pieces computed again",
    "again": "attempts made again",
    "save": "saves",
    "transfer": "transfer of state to groups that come back",
    "coordinator": "a coordinator started again",
    "restart": "restarts of the job",
    "redone": "work lost at the end of a job attempt",
    "end": "last save and end",
    "unknown": "attributed to nothing",
}
"""Name -> what it is called."""
FAILURE_FREE_STEPS = 63
"""The number of last failure-free steps of which the medians are taken."""
RENEWED_STEPS = 16
"""After so many of them, medians are taken anew only every so many."""
RESTART_WITHIN_S = 600.0
"""A job attempt whose coordinator comes later than that after the end of the job attempt before was started by a user
or a queue."""
ROUNDED_S = 1e-5
"""Lengths of steps are rounded to a microsecond: a smaller difference between two lines is none."""
TimeParts = Mapping[str, float]
"""Name of the part -> seconds."""


@dataclass(frozen=True)
class WallTime:
    """Where the time went, in seconds."""

    parts: TimeParts
    """All of PARTS; together the wall time."""
    steps: Mapping[tuple[int, int], TimeParts]
    """(job attempt, step) -> what a failure in it cost, by part, of every step in which a group was lost and the job
    went on.
    """
    job_attempts: Mapping[int, TimeParts]
    """Number of a job attempt -> what its end cost, of every job attempt that was wiped out or failed, or after which
    the launcher itself started the next one; 'restart' is in it only there."""

    @property
    def wall_s(self) -> float:
        """The wall time."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """A part of the wall time, 0 to 1."""
        return self.parts[part] / self.wall_s if self.wall_s else 0.0


@dataclass
class _TrainedAttempt:
    """The committed steps of one job attempt."""

    ended_s: float
    """When its last step was committed, seconds since 1970."""
    start_s: float | None = None
    """From the start of its coordinator to its first step."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    train_s: array[float] = field(default_factory=lambda: array("d"))
    rests: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=FAILURE_FREE_STEPS))
    """(rest, compute, reduce) of failure-free steps, as in UsualStep."""

    usual: UsualStep = field(default_factory=UsualStep)
    """The medians of the failure-free steps, renewed now and then."""
    number: int = 0
    """Of the failure-free steps so far."""

    def failure_free(self, rest_s: float, compute_s: float, reduce_s: float) -> None:
        """Take a failure-free step."""
        self.rests.append((rest_s, compute_s, reduce_s))
        self.number += 1
        if self.number < RENEWED_STEPS or self.number % RENEWED_STEPS == 0:
            self.usual = UsualStep(*map(median, zip(*self.rests, strict=True)))


class WallTimeBook:
    """Adds up the lines of metrics.jsonl, each when the next one is there, because that may have its save."""

    def __init__(self, history: JobHistory) -> None:
        """``history`` knows the records up to those of the lines that are taken."""
        self._history = history
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._failed: dict[tuple[int, int], TimeParts] = {}
        self._job_attempts: dict[int, _TrainedAttempt] = {}
        self._last: Mapping[str, Any] | None = None
        self._saves: dict[tuple[int, int], float] = {}
        """(job attempt, step) -> for how long a save kept a group from beginning it, of steps whose line is not added
        yet."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take the next line."""
        self._saves |= {(line["life"], step): seconds for step, seconds in line.get("saves_s", ())}
        if self._last is not None:
            self._add(self._last)
        self._last = line

    def _add(self, line: Mapping[str, Any]) -> None:
        job_attempt = self._history.numbered(line["life"])
        trained = self._job_attempts.setdefault(
            job_attempt.number, _TrainedAttempt(job_attempt.begun_s or job_attempt.opened_s)
        )
        trained.start_s = line.get("start_s", trained.start_s)
        hole_s = line["time_unix_s"] - trained.ended_s - line["step_time_s"]
        found = parts_of(line, trained.usual, self._circumstances(line, job_attempt))
        if found.failure_free:
            trained.failure_free(found.rest_s, line["compute_even_s"], line["reduce_least_s"])
        for part, seconds in found.parts.items():
            self._totals[part] += seconds
        self._totals["unknown"] += hole_s if abs(hole_s) > ROUNDED_S else 0.0
        if line["recovery"] is not None:
            self._failed[job_attempt.number, line["step"]] = {
                p: s for p, s in found.parts.items() if p in _OF_A_FAILURE
            }
        trained.ended_s = line["time_unix_s"]
        trained.steps.append(line["step"])
        trained.train_s.append(found.parts.get("train", 0.0))

    def _circumstances(self, line: Mapping[str, Any], job_attempt: AttemptHistory) -> StepCircumstances:
        step, ended_s = line["step"], line["time_unix_s"]
        began_s = ended_s - line["step_time_s"]
        return StepCircumstances(
            save_s=self._saves.pop((job_attempt.number, step), 0.0),
            served=step in job_attempt.served,
            repeated=step in job_attempt.repeated,
            first=step <= job_attempt.spec.first_step + 2,
            without_coordinator=any(began_s < time_s < ended_s for time_s in job_attempt.coordinators_s),
        )

    @property
    def usual(self) -> UsualStep:
        """A usual step of the newest job attempt that has one."""
        return next((one.usual for one in reversed(self._job_attempts.values()) if one.rests), UsualStep())

    def result(self) -> WallTime:
        """Where the time went by now. The last step of a job attempt that goes on is not in it yet."""
        if self._last is not None and self._is_over(self._last["life"]):
            self._add(self._last)
            self._last = None
        parts, costs, undone_s, before = dict(self._totals), dict[int, TimeParts](), self._undone_s(), None
        for job_attempt in self._history.job_attempts:
            trained = self._trained(job_attempt)
            if before is not None and self._is_restart(before, job_attempt):
                restart_s = _began_s(job_attempt) - _end_s(before)
                costs[before.number] = {
                    "restart": restart_s,
                    "redone": undone_s[job_attempt.number] + self._tail_s(before),
                }
                parts["restart"] += restart_s
            else:
                parts["start"] += (
                    _began_s(job_attempt) - job_attempt.opened_s if trained.start_s is None else trained.start_s
                )
                if before is not None and _is_lost(before):
                    costs[before.number] = {"redone": undone_s[job_attempt.number] + self._tail_s(before)}
            if job_attempt.ended_s is not None and job_attempt.begun_s is not None:
                parts["redone" if _is_lost(job_attempt) else "end"] += job_attempt.ended_s - trained.ended_s
            parts["redone"] += undone_s[job_attempt.number]
            parts["train"] -= undone_s[job_attempt.number]
            before = job_attempt
        if before is not None and _is_lost(before):
            costs[before.number] = {"redone": self._tail_s(before)}
        return WallTime(parts, dict(self._failed), costs)

    def _is_over(self, number: int) -> bool:
        """Whether no further step of this job attempt can follow."""
        job_attempt = self._history.numbered(number)
        return job_attempt.ended_s is not None or job_attempt is not self._history.job_attempt

    def _trained(self, job_attempt: AttemptHistory) -> _TrainedAttempt:
        return self._job_attempts.get(job_attempt.number) or _TrainedAttempt(_began_s(job_attempt))

    def _undone_s(self) -> dict[int, float]:
        """Number of each job attempt -> the training time of the steps of earlier job attempts that it begins behind.
        Each step is undone once: ``steps`` are those that count before the job attempt, in their order."""
        steps, train_s = array("q"), array("d")
        undone_s = {}
        for job_attempt in self._history.job_attempts:
            kept = bisect_right(steps, job_attempt.spec.first_step)
            undone_s[job_attempt.number] = sum(train_s[kept:])
            trained = self._trained(job_attempt)
            steps[kept:], train_s[kept:] = trained.steps, trained.train_s
        return undone_s

    def _is_restart(self, before: AttemptHistory, job_attempt: AttemptHistory) -> bool:
        """Whether the launcher itself started ``job_attempt`` after ``before``, by when its coordinator was there."""
        start_s = self._trained(job_attempt).start_s
        there_s = job_attempt.opened_s if start_s is None else _began_s(job_attempt) - start_s
        return follows_at_once(before) and there_s - _end_s(before) <= RESTART_WITHIN_S

    def _tail_s(self, job_attempt: AttemptHistory) -> float:
        """What followed the last step of a job attempt that has ended, where it was in vain."""
        lost = _is_lost(job_attempt) and job_attempt.begun_s is not None
        return _end_s(job_attempt) - self._trained(job_attempt).ended_s if lost else 0.0


def _began_s(job_attempt: AttemptHistory) -> float:
    """When the first step of a job attempt began; else when it ended, or when it was opened."""
    return job_attempt.begun_s or job_attempt.ended_s or job_attempt.opened_s


def _end_s(job_attempt: AttemptHistory) -> float:
    """When a job attempt ended that has ended."""
    assert job_attempt.ended_s is not None
    return job_attempt.ended_s


def _is_lost(job_attempt: AttemptHistory) -> bool:
    """Whether a job attempt has ended without the save of its last step."""
    return job_attempt.ended_s is not None and job_attempt.outcome not in ("finished", "left")


_OF_A_FAILURE = ("detect", "agree", "rebuild", "patch", "again")


def follows_at_once(job_attempt: AttemptHistory) -> bool:
    """Whether a launcher that is still there starts the job again by itself after ``job_attempt``."""
    planned = job_attempt.outcome == "left" and job_attempt.reason.startswith(PLANNED)
    return job_attempt.ended_s is not None and (planned or job_attempt.outcome == "wipe-out")
