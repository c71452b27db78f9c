"""The arithmetic of goodput.py: when processes are killed, and which steps count.

Everything here is pure: times are seconds on one clock and are given.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kill:
    """One kill of the schedule."""

    at_s: float
    """Since the beginning of the window."""
    group: int


def kill_schedule(seed: int, window_s: float, mean_gap_s: float, groups: int) -> list[Kill]:
    """Kills at the times of a Poisson process, each of a group drawn at random."""
    draw = random.Random(seed)
    found: list[Kill] = []
    at_s = draw.expovariate(1 / mean_gap_s)
    while at_s < window_s:
        found.append(Kill(round(at_s, 3), draw.randrange(groups)))
        at_s += draw.expovariate(1 / mean_gap_s)
    return found


@dataclass(frozen=True)
class State:
    """What the training had reached at a time."""

    time_s: float
    step: int
    """The last step that the training's state contains."""
    groups: int
    """How many groups, ranks or replicas had part in that step."""
    samples: float
    """How many samples the step had."""


@dataclass
class Course:
    """The states of one training in the order of their times. A step number falls where steps are lost."""

    states: list[State] = field(default_factory=list)

    def step_at(self, time_s: float) -> int:
        """The last step that the training's state contained at a time; 0 before the first."""
        index = bisect_right(self.states, time_s, key=_time)
        return self.states[index - 1].step if index else 0

    def samples_between(self, began_s: float, ended_s: float) -> float:
        """Samples of the steps that the state at ``ended_s`` has beyond that at ``began_s``, each step once."""
        of_step = {state.step: state.samples for state in self.states if state.time_s <= ended_s and state.samples}
        first, last = self.step_at(began_s), self.step_at(ended_s)
        return sum(of_step.get(step, 0.0) for step in range(first + 1, last + 1))

    def seconds_until_beyond(self, time_s: float) -> float | None:
        """The time from ``time_s`` until a step is reached that is new; None if none was."""
        step = self.step_at(time_s)
        later = (state for state in self.states if state.time_s > time_s and state.step > step)
        return next((state.time_s - time_s for state in later), None)

    def whole_steps_since(self, time_s: float, groups: int) -> int:
        """How many of the newest states since ``time_s`` had all groups, without one between that had not."""
        since = self.states[bisect_left(self.states, time_s, key=_time) :]
        return next((n for n, state in enumerate(reversed(since)) if state.groups < groups), len(since))

    def failure_free_rate(self, spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """(steps, samples) per second inside time spans without failures, counted from a step to a step."""
        steps = samples = seconds = 0.0
        for began_s, ended_s in spans:
            inside = [state for state in self.states if began_s <= state.time_s <= ended_s]
            if len(inside) > 1:
                steps += inside[-1].step - inside[0].step
                samples += self.samples_between(inside[0].time_s, inside[-1].time_s)
                seconds += inside[-1].time_s - inside[0].time_s
        if not steps:
            raise ValueError("no steps were trained in the failure-free time")
        return steps / seconds, samples / seconds


def median(values: Sequence[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _time(state: State) -> float:
    return state.time_s
