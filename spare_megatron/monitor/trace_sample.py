"""Chooses what a timeline shows of a long job, or of many groups, so that it stays small. Pure.

Steps in which a group was lost or came back are shown, with the ones beside them; of the others every k-th, and the one
behind it, whose beginning shows the update. Where there are many groups, a step shows those that took longest, those
that had a part in a failure, and every n-th.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spare_megatron.config.plural import counted

SLICES_MAX = 80_000
"""About so many slices; one takes some 60 bytes."""
SLICES_OF_A_STEP = 5
"""Of one group, or of one rank."""
GROUPS_MAX = 64
"""Of more groups, a step shows some."""
EVERY_GROUPS = 40
"""About so many of them whatever they do."""
OTHER_GROUPS = 20
"""About so many more do something remarkable in a step."""
StepOfAttempt = tuple[int, int]
"""(job attempt, step)."""


@dataclass(frozen=True)
class StepSample:
    """The steps that a timeline shows."""

    steps: frozenset[StepOfAttempt] = frozenset()
    of: int = 0
    """The number of all steps."""
    disturbed: int = 0
    """The number of steps, of all, in which groups were lost or came back."""
    left_out: int = 0
    """How many of these are not shown."""
    every: int = 1
    """k."""
    num_groups: int = 0
    """The most that were live at once."""
    lines: dict[StepOfAttempt, Mapping[str, Any]] = field(default_factory=dict)
    """The lines of metrics.jsonl of steps that are shown."""
    saves_s: dict[StepOfAttempt, float] = field(default_factory=dict)
    """For how long a save kept its group from beginning the step."""

    @property
    def every_group(self) -> int:
        """n; 1: all groups are shown."""
        return 1 if self.num_groups <= GROUPS_MAX else -(-self.num_groups // EVERY_GROUPS)

    def note(self) -> str:
        """What is left out; empty: nothing."""
        found = []
        if len(self.steps) < self.of:
            found.append(f"{len(self.steps)} of {counted(self.of, 'step')}: one in {self.every} with the next")
            shown, words = self.disturbed - self.left_out, "in which groups were lost or came back, with those beside"
            found += [f"and {shown if self.left_out else 'all'} {words}"] if self.disturbed else []
        if self.every_group > 1:
            found.append(
                f"one group in {self.every_group}, the slowest of each step, and those that were lost or computed "
                "pieces of lost ones"
            )
        return f"sampled: {', '.join(found)}" if found else ""


def choose_steps(lines: Iterable[Mapping[str, Any]], slices_max: int = SLICES_MAX, ranks: int = 0) -> StepSample:
    """The steps to be shown of the job with these lines of metrics.jsonl, without the lines themselves. ``ranks``: how
    many ranks of each group have a track."""
    all_steps: list[StepOfAttempt] = []
    disturbed: list[int] = []
    epoch, num_groups = None, 0
    for place, line in enumerate(lines):
        all_steps.append((line["life"], line["step"]))
        if line["recovery"] is not None or (epoch not in (None, (line["life"], line["epoch"]))):
            disturbed.append(place)
        epoch, num_groups = (line["life"], line["epoch"]), max(num_groups, line["live_groups"])
    shown = num_groups if num_groups <= GROUPS_MAX else EVERY_GROUPS + OTHER_GROUPS
    steps_max = max(4, slices_max // (SLICES_OF_A_STEP * max(1, shown) * (1 + ranks)))
    few = disturbed[:: max(1, -(-6 * len(disturbed) // steps_max))]  # at most half of all, three for each
    places = {place + beside for place in few for beside in (-1, 0, 1)} & set(range(len(all_steps)))
    every = _every(len(all_steps), steps_max - len(places))
    if every > 1:
        places |= {place for first in range(0, len(all_steps), every) for place in (first, first + 1)}
    else:
        places = set(range(len(all_steps)))
    steps = frozenset(all_steps[place] for place in places if place < len(all_steps))
    left_out = sum(all_steps[place] not in steps for place in disturbed)
    return StepSample(steps, len(all_steps), len(disturbed), left_out, every, num_groups)


def _every(steps: int, room: int) -> int:
    """The least k with which one step in k, and the one behind it, fit."""
    return 1 if steps <= room else max(3, -(-2 * steps // max(1, room)))


def with_lines(sample: StepSample, lines: Iterable[Mapping[str, Any]]) -> StepSample:
    """The sample with the lines that it needs, from all lines."""
    kept, saves_s = dict[StepOfAttempt, Mapping[str, Any]](), dict[StepOfAttempt, float]()
    for line in lines:
        saves_s |= {(line["life"], step): seconds for step, seconds in line.get("saves_s", ())}
        if (line["life"], line["step"]) in sample.steps:
            kept[line["life"], line["step"]] = line
    return replace(sample, lines=kept, saves_s=saves_s)
