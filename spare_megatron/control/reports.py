"""What a rank says to its leader, as plain values, and the progress counter that its heartbeats carry."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.controller.messages import ReductionResult

PHASES = (
    "start",
    "forward",
    "backward",
    "reduce",
    "vote",
    "apply",
    "evaluate",
    "checkpoint",
)
"""What a training thread can be at. Within a step it goes through them in this order, but for each further piece and
each patch, which bring it back to ``forward``."""
COMPLETE = frozenset({"reduce", "vote"})
"""Phases in which all pieces of a segment are done."""


def checksum_of(text: str) -> int:
    """64 bits, signed as the wire has them: equal for equal texts, and else different but by a chance of 2^-64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Reduced:
    """A reduction ended on this rank, well or badly."""

    result: ReductionResult
    figures: tuple[tuple[str, float], ...] = ()
    """Numbers for the step's line in metrics.jsonl, by name."""


@dataclass(frozen=True)
class StepReport:
    """The rank applied a committed step; what it knows of it."""

    step: int
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankApplied:
    """The rank holds verified state ``step`` (a joiner); at the end of the run, it has done what ``epoch`` asks."""

    step: int
    epoch: int


@dataclass(frozen=True)
class SaveRequest:
    """Does this checkpoint count?"""

    step: int
    directory: str


@dataclass(frozen=True)
class StopRequest:
    """Save and leave at the next step boundary."""

    reason: str


RankReport = Reduced | StepReport | RankApplied | SaveRequest | StopRequest


class Progress:
    """Written by the training thread, read by the control thread; each field alone is consistent, which is enough:
    a heartbeat that mixes two moments is corrected by the next one."""

    __slots__ = ("counter", "in_phase", "phase", "pieces_done", "step")

    def __init__(self) -> None:
        self.phase = "start"
        self.step = 0
        self.pieces_done = 0
        self.counter = 0
        self.in_phase = 0

    def tick(self, phase: str, step: int, pieces_done: int) -> bool:
        """One more sign of life of the training thread; true when a piece is done, or the last of a segment."""
        news = (step, pieces_done) != (self.step, self.pieces_done) and pieces_done > 0
        news = news or (phase in COMPLETE and self.phase not in COMPLETE)
        self.in_phase = self.in_phase + 1 if (phase, step) == (self.phase, self.step) else 0
        self.phase, self.step, self.pieces_done = phase, step, pieces_done
        self.counter += 1
        return news

    @property
    def complete(self) -> bool:
        """Whether all pieces of the segment are done."""
        return self.phase in COMPLETE
