"""Draws the tracks of ranks in a timeline, from what they reported of the steps that are shown. Pure.

Times are those of the ranks' hosts. Of a group of many ranks a few are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from spare_megatron.metrics.rank_lines import RankLine
from spare_megatron.monitor.trace_model import TraceSlice, group_track
from spare_megatron.monitor.trace_sample import StepSample

RANKS_MAX = 8
"""Of a group of more ranks some are shown: the first, the last, and the SLOWEST that computed for longest."""
SLOWEST = 2
LOOKED_AT = 8
"""In so many of its steps that are shown."""
COMPUTING = ("compute", "patch")


class ReportedRanks(Protocol):
    """What ranks reported."""

    positions: Mapping[int, Sequence[int]]
    """Group -> the positions whose ranks have reported anything."""
    left_out: bool
    """Whether something could not be read."""

    def lines(self, group: int, incarnation: int, step: int, positions: Sequence[int]) -> list[tuple[int, RankLine]]:
        """(position, line) of what ranks of this start of a group reported of ``step``."""


class RankTracks:
    """Makes the slices."""

    def __init__(self, reported: ReportedRanks) -> None:
        self._reported = reported
        self._shown: dict[int, Sequence[int]] = {}
        """Group -> positions."""
        self._most = max(map(len, reported.positions.values()), default=0)

    @property
    def of_a_group(self) -> int:
        """How many ranks of a group are shown, at most."""
        return self._most if self._most <= RANKS_MAX else 2 + SLOWEST

    def note(self) -> str:
        """What is left out; empty: nothing."""
        found = []
        if self._most > RANKS_MAX:
            found.append(f"of each group ranks are sampled: the first, the last, and {SLOWEST} that computed longest")
        if self._reported.left_out:
            found.append("rank_times is not read as a whole: lines are torn, or of another version of spare_megatron")
        return "; ".join(found)

    def slices(
        self, group: int, incarnation: int, step: int, job_attempt: int, sample: StepSample
    ) -> Iterator[TraceSlice]:
        """What ranks of a group did in a step that is shown, in this start of the group."""
        known = self._reported.positions.get(group, ())
        if not known:
            return
        if group not in self._shown:
            self._shown[group] = self._chosen(group, incarnation, known, _looked_at(job_attempt, step, sample))
        for position, line in self._reported.lines(group, incarnation, step, self._shown[group]):
            track, ended_s = group_track(group, f"rank {position}"), line.began_s
            for name, since_s, until_s in line.parts:
                begin_s = max(ended_s, line.began_s + since_s)
                ended_s = max(begin_s, line.began_s + until_s)
                yield TraceSlice(track, name, begin_s, ended_s, {"step": line.step})

    def _chosen(self, group: int, incarnation: int, known: Sequence[int], steps: Sequence[int]) -> Sequence[int]:
        if len(known) <= RANKS_MAX:
            return known
        first, *others, last = known
        computed_s = defaultdict[int, float](float)
        for step in steps:
            for position, line in self._reported.lines(group, incarnation, step, others):
                computed_s[position] += sum(ended - began for name, began, ended in line.parts if name in COMPUTING)
        slowest = sorted(others, key=lambda position: (-computed_s[position], position))[:SLOWEST]
        return [first, *sorted(slowest), last]


def _looked_at(job_attempt: int, step: int, sample: StepSample) -> Sequence[int]:
    """Some of the steps of this job attempt that are shown, from ``step`` on."""
    steps = sorted(shown for of, shown in sample.steps if of == job_attempt and shown >= step)
    return steps[:: max(1, len(steps) // LOOKED_AT)][:LOOKED_AT]
