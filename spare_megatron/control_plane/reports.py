"""What a rank reports to its leader, and a leader of all its ranks to the coordinator, as dataclasses; and the progress
counter that the beats of a rank carry."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.protocol.messages import ReductionResult

PHASES = ("start", "forward", "backward", "reduce", "vote", "apply", "evaluate", "checkpoint")
"""The phases of a training thread. Within a step it goes through them in this order, except that each further piece and
each patch bring it back to ``forward``."""
PHASE_ORDER = {phase: index for index, phase in enumerate(PHASES)}
COMPLETE = frozenset({"reduce", "vote"})
"""Phases in which all pieces of a run are done."""
WAITING = frozenset({"reduce", "vote"})
"""Phases in which a rank waits for other groups."""


def checksum_of(text: str) -> int:
    """A checksum of 64 bits, signed as in the messages; different texts have the same one with probability 2^-64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Reduced:
    """A reduction has ended on this rank, with a result or with a failure."""

    result: ReductionResult
    figures: tuple[tuple[str, float], ...] = ()
    """Numbers for the step's line in metrics.jsonl, by name."""
    row: int = 0
    """The row that was reduced (:mod:`spare_megatron.config.rows`)."""


@dataclass(frozen=True)
class StepReport:
    """The rank has applied a committed step; ``report`` has its figures of that step."""

    step: int
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankApplied:
    """At the end of the run, in the last ``epoch``: the rank holds the state after ``step`` and has saved what it
    must."""

    step: int
    epoch: int


@dataclass(frozen=True)
class SaveRequest:
    """The rank asks whether the checkpoint in ``directory`` counts."""

    step: int
    directory: str


@dataclass(frozen=True)
class StopRequest:
    """The rank asks that the job saves and leaves at the next step boundary."""

    reason: str


@dataclass(frozen=True)
class RankReady:
    """A rank of a learner could take an offer, now and after each that ends."""


@dataclass(frozen=True)
class RankCaughtUp:
    """A rank of a learner or joiner holds the state of a row after ``step``, by offer ``number``."""

    number: int
    step: int
    weights_digest: str = ""
    row: int = 0


@dataclass(frozen=True)
class RankVoid:
    """A rank of a learner or joiner cannot have its part of offer ``number``."""

    number: int
    detail: str = ""


@dataclass(frozen=True)
class RankWithdrawn:
    """A rank of a donor serves offer ``number`` no longer."""

    number: int
    detail: str = ""


@dataclass(frozen=True)
class RankBegun:
    """The first stage has begun the ticket of this number, and knows of none behind it."""

    number: int


@dataclass(frozen=True)
class RankOpened:
    """A rank has opened the data of a shard that its group has adopted, or reads none; or it cannot."""

    shard: int
    opened: bool
    detail: str = ""
    """Why not."""


@dataclass(frozen=True)
class RankHave:
    """In ``epoch`` a rank of a new host of a state shard has its part of the state after t*; or it has not, and its
    view names no donor, or it cannot keep the shard."""

    epoch: int
    shard: int
    whole: bool
    detail: str = ""
    """Why it cannot; empty where it can."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of one rank: how far its training thread is."""

    position: int
    step: int
    phase: str
    counter: int
    in_phase: int
    pieces_done: int


@dataclass(frozen=True)
class LastRank:
    """The rank of a group that is furthest behind, and for how long its counter has stood still."""

    position: int
    step: int
    phase: str
    counter: int
    pieces_done: int
    still_s: float


@dataclass(frozen=True)
class LateRank:
    """The rank of a group that has been silent for longest, and for how long."""

    position: int
    silent_s: float


@dataclass(frozen=True)
class Pace:
    """How fast a group begins the tickets of a step. Durations are by the leader's clock."""

    step: int
    begun: int
    """Tickets that the first stage has begun, without those that fill the pipeline, as far as is known."""
    since_s: float
    """How long ago it began the last of them."""
    piece_s: float
    """Seconds from one to the next with a full pipeline, or an estimate where there are too few; 0: not known."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a whole group, of one size for any number of ranks. Durations are by the leader's clock."""

    step: int
    """The newest step that a rank is in."""
    pieces_done: int
    """Pieces of that step that all ranks have done."""
    waiting: int
    """Number of ranks that wait for other groups."""
    last: LastRank | None = None
    """None while no rank has reported anything."""
    late: LateRank | None = None
    """None while no rank is late."""
    pace: Pace | None = None
    """None where nobody would be relieved."""


RankReport = (
    Reduced
    | StepReport
    | RankApplied
    | SaveRequest
    | StopRequest
    | RankReady
    | RankCaughtUp
    | RankVoid
    | RankWithdrawn
    | RankBegun
    | RankOpened
    | RankHave
)


class Progress:
    """How far the training thread is. That thread writes it, and the control thread reads it without a lock.

    Each field alone is consistent, which is enough: a heartbeat that mixes two moments is corrected by the next one.
    """

    __slots__ = ("counter", "in_phase", "phase", "pieces_done", "step")

    def __init__(self) -> None:
        self.phase = "start"
        self.step = 0
        self.pieces_done = 0
        self.counter = 0
        self.in_phase = 0

    def tick(self, phase: str, step: int, pieces_done: int) -> bool:
        """Count one more sign of life of the training thread; true when it has done a piece, or all pieces of a
        run."""
        news = (step, pieces_done) != (self.step, self.pieces_done) and pieces_done > 0
        news = news or (phase in COMPLETE and self.phase not in COMPLETE)
        self.in_phase = self.in_phase + 1 if (phase, step) == (self.phase, self.step) else 0
        self.phase, self.step, self.pieces_done = phase, step, pieces_done
        self.counter += 1
        return news

    @property
    def complete(self) -> bool:
        """Whether all pieces of the run are done."""
        return self.phase in COMPLETE
