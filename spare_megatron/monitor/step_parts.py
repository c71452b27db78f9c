"""Says what the wall time of one committed step went into, from its line of metrics.jsonl. Pure.

A step goes from the commit before it to its own. In a failure-free step the slowest group computes, then all reduce;
what is left, the *rest*, is the update, the vote and the commit. The part that is wanted is what the same step takes
with all groups alive, evenly fast and undisturbed; the others are what happened beside it::

    | rest | save |        compute        |  gap: detect, agree, rebuild  | patch | reduce |
                  | even | fewer | slowest|

Of a disturbed step, the *gap* is the time in which the group that came last neither computed nor reduced in the end: it
first waited, from when it was done with its own pieces, for the decision (detect), then for the others to drop the old
communicators (agree), then for new ones (rebuild). A loss that is decided while all still compute costs none of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONG_REST = 3.0
"""A rest of more than so many usual ones, and more than LONG_REST_S above, is not explained by the step itself."""
LONG_REST_S = 0.02


@dataclass(frozen=True)
class UsualStep:
    """Medians of the last failure-free steps, in seconds; 0 where there was none."""

    rest_s: float = 0.0
    compute_s: float = 0.0
    """With the pieces that a group has while all live, at the median pace."""
    reduce_s: float = 0.0


@dataclass(frozen=True)
class StepCircumstances:
    """What is known of a step from elsewhere."""

    save_s: float = 0.0
    """For how long a save kept a group from beginning the step."""
    served: bool = False
    """Groups gave others their state or results."""
    repeated: bool = False
    """The same members tried it again."""
    without_coordinator: bool = False
    """A coordinator was started again."""
    first: bool = False
    """It is one of the first two of its job attempt: the ranks compute, and make their update, for the first time."""


@dataclass(frozen=True)
class StepParts:
    """The parts of one step, and what it would show of a usual one."""

    parts: Mapping[str, float]
    """Name of the part (watch.wall_time) -> seconds; together the length of the step."""
    rest_s: float
    failure_free: bool


def parts_of(line: Mapping[str, Any], usual: UsualStep, at: StepCircumstances) -> StepParts:
    """The parts of the step of this line of metrics.jsonl."""
    length_s, recovery = line["step_time_s"], line["recovery"]
    if length_s < 0:  # the clock was set back
        return StepParts({"unknown": length_s}, 0.0, failure_free=False)
    reported = line["compute_s"] > 0
    compute_s = min(length_s, line["compute_s"] if reported else usual.compute_s)
    reduce_s = min(length_s - compute_s, line["reduce_least_s"] if reported else usual.reduce_s)
    left_s = length_s - compute_s - reduce_s
    save_s = min(left_s, at.save_s)
    left_s -= save_s
    paced_s = min(compute_s, line["compute_paced_s"]) if reported else compute_s
    fewer_s = max(0.0, paced_s - line["compute_even_s"]) if reported else 0.0
    parts = {"save": save_s, "fewer": fewer_s, "slowest": compute_s - paced_s}
    relieved = bool(line.get("pieces_given"))
    failure_free = recovery is None and not (at.repeated or at.without_coordinator or relieved)
    if recovery is not None:
        parts |= _of_recovery(recovery, length_s, left_s, usual.rest_s, usual.rest_s + save_s + compute_s)
    elif not failure_free or at.served or _is_long(left_s, usual.rest_s):
        more_s = max(0.0, left_s - usual.rest_s)
        late_s = min(more_s, _late_s(line, parts["slowest"])) if failure_free else more_s if relieved else 0.0
        parts["slowest"] += late_s
        parts[_owner(at)] = more_s - late_s
    parts["train"] = length_s - sum(parts.values())
    return StepParts(parts, left_s, failure_free and reported and not at.served)


def _is_long(rest_s: float, usual_s: float) -> bool:
    """Whether a rest is longer than a step without circumstances explains; never where none is usual yet."""
    return usual_s > 0 and rest_s > max(LONG_REST * usual_s, usual_s + LONG_REST_S)


def _late_s(line: Mapping[str, Any], slowest_s: float) -> float:
    """For how long the median group waited for the last one to come to the sum, beyond what that one computed longer;
    and the first vote for the last one."""
    return max(0.0, float(line["reduce_median_s"] - line["reduce_least_s"]) - slowest_s) + float(line["votes_s"])


def _owner(at: StepCircumstances) -> str:
    """The part to which a rest belongs that is longer than usual."""
    if at.without_coordinator:
        return "coordinator"
    if at.repeated:
        return "again"
    if at.served:
        return "transfer"
    return "start" if at.first else "unknown"


def _of_recovery(
    recovery: Mapping[str, Any], length_s: float, left_s: float, rest_s: float, computed_s: float
) -> dict[str, float]:
    """The parts of what a disturbed step took beyond computing and one reduction, ``left_s``. ``computed_s`` is when
    the slowest group had computed its own pieces, from the beginning of the step."""
    patch_s = min(left_s, recovery["patch_wait_s"])
    gap_s = max(0.0, left_s - patch_s - rest_s)
    decided_s = length_s - recovery["total_s"] + recovery["detect_s"]
    parts = {"patch": patch_s}
    for name, took_s in (
        ("detect", decided_s - computed_s),
        ("agree", recovery["agree_s"]),
        ("rebuild", recovery.get("formed_s", recovery["agree_s"] + recovery["rebuild_s"]) - recovery["agree_s"]),
    ):
        parts[name] = min(max(0.0, took_s), gap_s)
        gap_s -= parts[name]
    return {**parts, "again": gap_s}
