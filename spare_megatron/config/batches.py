"""Computes the global batch size of each step: constant, growing as with Megatron's ``--rampup-batch-size``, or
changing at given points as with its ``--step-batch-size-schedule``.

Megatron's rules (megatron-core's ``num_microbatches_calculator``): with a ramp of ``first, increment, samples`` the
size grows by ``increment`` in equal shares of ``samples``; with a schedule it is that of the last point that was
reached. Both are functions of the samples consumed so far. So the size follows from the step alone once a job attempt's
first step and its consumed samples are known, and no failure can change it.

A step whose batch is smaller has fewer pieces of each shard: pieces keep their numbers ``i * K + j`` with the K of the
full batch; those with j beyond the step's own number are empty, and the last one before them may be short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spare_megatron.config.errors import ConfigError

Phase = tuple[int, int, int]
"""(step, samples consumed before that step, global batch size from that step on)."""
Point = tuple[int, int]
"""(samples consumed, global batch size from there on)."""

SCHEDULE = "--step-batch-size-schedule"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)")


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes from a first step on. It must not be asked about earlier steps."""

    phases: tuple[Phase, ...]
    """At least one, in the order of their steps."""

    def size(self, step: int) -> int:
        """The batch size of ``step``, in samples."""
        return self._phase(step)[2]

    def consumed_before(self, step: int) -> int:
        """Samples consumed by all steps before ``step``."""
        first, consumed, size = self._phase(step)
        return consumed + (step - first) * size

    def steps_to(self, samples: int) -> int:
        """The first step before which more than ``samples`` were consumed."""
        for (first, consumed, size), following in zip(self.phases, [*self.phases[1:], None], strict=True):
            if following is None or following[1] > samples:
                return first + max(0, (samples - consumed) // size + 1)
        raise AssertionError("the last phase has no end")

    def _phase(self, step: int) -> Phase:
        found = self.phases[0]
        for phase in self.phases:
            if phase[0] > step:
                break
            found = phase
        return found


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes that the flags ask for; :meth:`schedule` gives those from a checkpoint's step on."""

    full: int
    """The largest batch: ``--global-batch-size``, or the largest of ``points``."""
    unit: int
    """Samples of one microbatch of all data-parallel ranks together: N x D x micro batch size."""
    ramp: Sequence[int] | None = None
    """(first size, increment, samples of the ramp); None: the size is constant."""
    round_down: bool = False
    """``--decrease-batch-size-if-needed``: round a size that is no multiple of the unit down to one."""
    points: tuple[Point, ...] = ()
    """The points of :func:`schedule_points`; empty: there is no schedule."""

    def __post_init__(self) -> None:
        for _, size in self.points:
            self._running(size, SCHEDULE)
        if self.ramp is None:
            return
        first, increment, samples = self.ramp
        reported = f"--rampup-batch-size {first} {increment} {samples}"
        if first < 1 or increment < 1 or samples < 1 or first > self.full:
            raise ConfigError(
                f"{reported} does not begin between 1 and --global-batch-size {self.full} and grow from there; "
                f"use for example --rampup-batch-size {self.unit} {self.unit} {max(samples, 1)}"
            )
        if (self.full - first) % increment:
            raise ConfigError(
                f"{reported}: from {first} to --global-batch-size {self.full} are {self.full - first} samples, not a "
                f"multiple of the increment {increment}; use an increment that divides {self.full - first}"
            )
        for size in range(first, self.full, increment):
            self._running(size, reported)

    def _running(self, size: int, reported: str) -> int:
        """The batch size that is used where the ramp gives ``size``; ConfigError where there is none."""
        if size % self.unit == 0:
            return size
        if self.round_down and size >= self.unit:
            return size // self.unit * self.unit
        advice = "add --decrease-batch-size-if-needed" if size >= self.unit else f"begin at {self.unit}"
        raise ConfigError(
            f"{reported}: the batch size {size} is not a multiple of {self.unit}, the data-parallel ranks x "
            f"--micro-batch-size; use multiples of {self.unit}, or {advice}"
        )

    def schedule(self, first_step: int = 1, consumed: int = 0) -> BatchSchedule:
        """The batch sizes from ``first_step`` on, where ``consumed`` samples were consumed before it."""
        if self.points:
            return BatchSchedule(tuple(self._pointed(first_step, consumed)))
        if self.ramp is None or self.full == self.ramp[0]:
            return BatchSchedule(((first_step, consumed, self.full),))
        first, increment, samples = self.ramp
        stages = (self.full - first) // increment
        share = samples / stages
        phases: list[Phase] = []
        step = first_step
        for stage in range(stages + 1):
            if consumed > samples:
                stage = stages
            elif stage < stages and consumed >= (stage + 1) * share:
                continue
            size = self._running(first + stage * increment, "--rampup-batch-size")
            phases.append((step, consumed, size))
            if stage == stages:
                break
            steps = _steps_until(consumed, size, (stage + 1) * share)
            step, consumed = step + steps, consumed + steps * size
        return BatchSchedule(tuple(phases))

    def _pointed(self, step: int, consumed: int) -> Iterator[Phase]:
        """The phases of a schedule of points. A step that passes several points at once begins the last of them."""
        following = [at for at, _ in self.points if at > consumed]
        while True:
            size = next(size for at, size in reversed(self.points) if at <= consumed)
            yield step, consumed, size
            following = [at for at in following if at > consumed]
            if not following:
                return
            steps = _steps_until(consumed, size, following[0])
            step, consumed = step + steps, consumed + steps * size

    def samples_of(self, steps: int) -> int:
        """Number of samples in the first ``steps`` steps of the job; below 0 for a negative number."""
        return self.schedule().consumed_before(steps + 1)

    @property
    def changes(self) -> bool:
        """Whether flags ask for batches of several sizes."""
        return self.ramp is not None or bool(self.points)

    def steps_for(self, samples: int) -> int:
        """Number of steps of a job of ``samples`` samples, counted as in Megatron: the ramp, then whole full batches;
        with a schedule, until as many samples are consumed."""
        if self.points:
            return self.schedule().steps_to(samples - 1) - 1
        if self.ramp is None:
            return samples // self.full
        schedule = self.schedule()
        ramped = schedule.steps_to(min(self.ramp[2], samples)) - 1
        consumed = schedule.consumed_before(ramped + 1)
        return ramped + max(0, samples - consumed) // self.full


def _steps_until(consumed: int, size: int, threshold: float) -> int:
    """Number of steps of ``size`` after which at least ``threshold`` samples are consumed."""
    steps = max(0, int((threshold - consumed) // size))
    while consumed + steps * size < threshold:
        steps += 1
    return steps


def schedule_points(text: str, seq_length: int) -> tuple[Point, ...]:
    """The points of a ``--step-batch-size-schedule`` such as '0:768 250B:1536', whose thresholds are tokens: a point
    has whole samples of ``seq_length`` tokens, rounded down. ConfigError where there is no such schedule."""
    points = []
    for entry in text.replace(",", " ").split():
        tokens, _, samples = entry.partition(":")
        points.append((_count(tokens, entry) // seq_length, _count(samples, entry)))
    points.sort(key=lambda point: point[0])
    reported = f"{SCHEDULE} '{text}'"
    if not points or points[0][0] != 0:
        raise ConfigError(
            f"{reported} has no batch size for the first step; begin it with 0:SIZE, as in '0:768 250B:1536'"
        )
    for (before, _), (at, _) in pairwise(points):
        if at == before:
            raise ConfigError(
                f"{reported} has two batch sizes from {at} samples of {seq_length} tokens on; leave one of them out"
            )
    for at, size in points:
        if size < 1:
            raise ConfigError(f"{reported} has the batch size {size} from {at} samples on, but it must be at least 1")
    return tuple(points)


def _count(word: str, entry: str) -> int:
    """The number that a word such as '250B' or '1.5K' means."""
    match = _NUMBER.fullmatch(word.strip().upper())
    if match is None:
        raise ConfigError(
            f"{SCHEDULE} has the entry '{entry}', but takes TOKENS:SIZE with numbers such as 768, 250B or 1.5M, as in "
            "'0:768 250B:1536'"
        )
    return int(float(match[1]) * _UNITS[match[2]])
