"""Says when a group did what in a step, from its vote and the step's line of metrics.jsonl. Pure.

The journal has the moments: the commit before, the group's vote, the commit. The line has the lengths for the groups
that took longest (``slowest``), of all groups in a job of a few. They end with the vote: what is left at the beginning
is the update of the step before. For another group the lengths are computed, at the median group's pace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

WORK = "compute, reduce"
"""Where it is not known how long each took."""


RECEIVED_S = 1e-6
"""A patch begins at least so long after it was decided: an arrow leads forwards."""


class StepPart(NamedTuple):
    """One part of a group's step. Times are in seconds since 1970."""

    name: str
    """'commit', 'save', 'compute', 'patch', 'reduce', 'vote', or WORK where no line tells."""
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class GroupVote:
    """The newest vote of a group for the step in flight."""

    time_s: float
    own: int
    """Number of pieces of its plan."""
    patched: int
    """Number of pieces of lost groups that it computed as well."""
    patched_from_s: float = 0.0
    """When these were given to it."""


def reported_groups(line: Mapping[str, Any]) -> dict[int, tuple[float, float, float]]:
    """Group -> seconds in its own pieces, in patches, in the sums, of those that the line has."""
    return {int(group): tuple(parts) for group, *parts in line.get("slowest", ())}


@dataclass(frozen=True)
class CommittedStep:
    """A step that was committed; ``line`` is its line of metrics.jsonl, None where there is none."""

    began_s: float
    """When the step before was committed, or the job attempt's first plan was sent."""
    committed_s: float
    votes: Mapping[int, GroupVote]
    line: Mapping[str, Any] | None
    num_groups: int
    usual_lead_s: float
    """From a commit to the first computing of the next step, as lately seen."""
    is_first: bool = False
    """Of its job attempt: no commit was applied before it."""

    @cached_property
    def reported(self) -> Mapping[int, tuple[float, float, float]]:
        """Group -> seconds in its own pieces, in patches, in the sums."""
        return {} if self.line is None else reported_groups(self.line)

    @cached_property
    def lead_s(self) -> float:
        """From the commit before to the first computing: in a failure-free step that is what the lengths leave."""
        if self.line is None or self.line["recovery"] is not None:
            return self.usual_lead_s
        reported = [(vote, self.reported[group]) for group, vote in self.votes.items() if group in self.reported]
        return max(0.0, median(vote.time_s - self.began_s - sum(own) for vote, own in reported)) if reported else 0.0

    def parts_of(self, group: int, save_s: float) -> tuple[list[StepPart], bool]:
        """The parts of this group's step in order, and whether their lengths were measured, not computed. ``save_s``:
        for how long its save kept it from beginning the step."""
        vote, began_s = self.votes[group], self.began_s
        voted_s = max(began_s, min(vote.time_s, self.committed_s))
        after = StepPart("vote", voted_s, self.committed_s)
        if self.line is None:
            return [StepPart(WORK, began_s, voted_s), after], False
        reported = self.reported.get(group)
        compute_s, patch_s, reduce_s = reported or self._computed(vote, voted_s - began_s - self.lead_s, self.line)
        reduces_s = max(began_s, voted_s - reduce_s)
        patches_s = min(max(began_s, reduces_s - patch_s, vote.patched_from_s + RECEIVED_S), reduces_s)
        computes_s = max(began_s, patches_s - compute_s)
        if reported is None or self.line["recovery"] is not None:  # before a patch it waited for sums that broke
            computes_s = min(began_s + self.lead_s, computes_s)
        saves_s = max(began_s, computes_s - save_s)
        found = [
            StepPart("commit", began_s, saves_s),
            StepPart("save", saves_s, computes_s),
            StepPart("compute", computes_s, min(patches_s, computes_s + compute_s)),
            StepPart("patch", patches_s, reduces_s),
            StepPart("reduce", reduces_s, voted_s),
            after,
        ]
        needed = {"commit", "vote", *(["patch"] if vote.patched else [])}
        parts = [one for one in found if one.end_s > one.begin_s or one.name in needed]
        return parts[1:] if self.is_first else parts, reported is not None

    def _computed(self, vote: GroupVote, room_s: float, line: Mapping[str, Any]) -> tuple[float, float, float]:
        """(compute, patch, reduce) of a group of which the line tells nothing, in ``room_s`` seconds."""
        pace_s = line["compute_even_s"] * self.num_groups / max(1, line["pieces"])
        compute_s, least_s = pace_s * vote.own, line["reduce_least_s"]
        return compute_s, pace_s * vote.patched, least_s if vote.patched else max(least_s, room_s - compute_s)
