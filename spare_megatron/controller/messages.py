"""The controller's input (events), its output (actions), and what it tells a group (views).

All are frozen dataclasses of plain values, so that a journal line can hold them and a replay can compare them.
Words and rules are those of the step protocol (docs/protocol.md). Conventions:

* a *piece* is the number ``i * K + j`` of part ``j`` of shard ``i``; lists of pieces are in execution order;
* ``step`` is t, ``epoch`` is e; ``(t*, e*)`` is the last commit; epochs start at 1, steps at ``first_step + 1``;
* a group's plan is a tuple of *segments*: one (perhaps empty) for the plan it started the step with, one more for
  each epoch that added pieces. Every rank of a group runs the same segments one after the other, each as one
  pipeline, so that ranks which saw different views still run the same work in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, overload

Segments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class JobSpec:
    """The constants of one life of a job, which the controller must know before its first decision."""

    num_groups: int
    pieces_per_shard: int
    offsets: tuple[int, ...]
    """Placement offsets: group g hosts shards (g + offset) mod N, first offset 0 (placement.Placement)."""
    granularity: str
    """'microbatch' or 'shard'."""
    first_step: int
    """Step of the checkpoint that this life started from; 0 for a fresh start."""
    last_step: int
    """Step whose commit ends the job."""
    min_groups: int
    """Groups that must be there to begin when the start-up time is over."""
    fingerprint: str
    """Digest of everything that must be equal on all groups (model, data, flags, versions)."""
    heartbeat_timeout_s: float = 0.0
    """How long a step must have failed before weak evidence fences a group (controller.blame); the job gives up after a
    multiple of it (controller.membership)."""
    retry_limit: int = 8
    """Failed attempts of one step, without a change of members, after which the job gives up if they went on for long
    enough (controller.membership)."""
    audit_rate: float = 0.0
    """Share of the pieces that a second host of their shard computes as well (controller.audits)."""
    audit_seed: int = 0
    save_every: int = 0
    """Steps that are multiples of this are saved; 0: the tuner decides, or only the last step is saved."""


# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Opened:
    """A coordinator starts on a run directory: a new life of the job, or the same life after its own restart."""

    spec: JobSpec
    life: int
    fencing: int


@dataclass(frozen=True)
class Hello:
    """A group is here, for the first time or again."""

    group: int
    incarnation: int
    fingerprint: str
    last_applied: int
    held: tuple[int, int] | None = None
    """(step, epoch) of the reduced result that the group holds, if any."""
    fencing: int = 0
    """Highest fencing number the group knows."""
    committed: tuple[int, int] | None = None
    """(step, epoch) of the newest commit that any rank of the group was told of; None before the first view."""


@dataclass(frozen=True)
class AllHere:
    """Stands for the first Hellos of these groups, in this order and with the job's fingerprint and first step, where
    nothing else happens between them (simulator)."""

    groups: tuple[tuple[int, int], ...]
    """(group, incarnation)."""


@dataclass(frozen=True)
class StartupOver:
    """The time for which a job waits for all its groups at the start is over."""

    waited_s: float


WEIGHTS = -1
"""Stands for the weights where a piece could: in ``View.disputed`` and ``ParameterChecksum.piece``."""


@dataclass(frozen=True)
class ParameterChecksum:
    """The checksum of one parameter's gradient of one piece on one rank, or of the parameter itself (piece
    ``WEIGHTS``): it shows where arithmetic is wrong or memory is damaged."""

    piece: int
    position: int
    name: str
    checksum: int


@dataclass(frozen=True)
class Link:
    """What a failed reduction shows of the connection from one group to another: data did not arrive."""

    sender: int
    receiver: int
    mute: bool = False
    """True: nothing, or not all that was sent, arrived within the data time-out, although the receiver listened. False:
    the connection ended or was refused without a word, which also happens after a death, a restart or the end of an
    epoch."""


@dataclass(frozen=True)
class ReductionResult:
    """How the reduction of (step, epoch) ended: on one rank, or, in a vote, on all ranks of a group."""

    step: int
    epoch: int
    ok: bool
    pieces: tuple[int, ...] = ()
    """The pieces that went into this reduction, in execution order: the same on all ranks of a group."""
    result_digest: str = ""
    weights_digest: str = ""
    links: tuple[Link, ...] = ()
    """The links that explain why the reduction failed, as far as is known here: own links, and those that neighbours
    reported."""
    detail: str = ""
    """What went wrong, in words; becomes part of the decision's reason."""
    corrupt: bool = False
    """The accumulators are not the sum of the group's own pieces: it cannot take part any more."""
    checksums: tuple[tuple[int, int], ...] = ()
    """(piece, checksum of its gradient) of those of ``pieces`` that are selected for an audit, in order."""
    audits: tuple[tuple[int, int], ...] = ()
    """(piece, checksum of its gradient) of every piece that the group audited, in order."""
    parts: tuple[ParameterChecksum, ...] = ()
    """The checksums of each parameter for the pieces (or ``WEIGHTS``) that the view called disputed."""

    @property
    def at(self) -> tuple[int, int]:
        """(step, epoch)."""
        return self.step, self.epoch


@dataclass(frozen=True)
class Vote:
    """A group finished (or failed) a reduction."""

    group: int
    incarnation: int
    result: ReductionResult
    failing_s: float = 0.0
    """In a failed vote: time since this coordinator process heard of the first failed attempt of this step by these
    members. It is a duration because clocks of different hosts cannot be compared."""


@dataclass(frozen=True)
class AllVoted:
    """Stands for the ok votes of all live groups for their plans of (step, epoch), where nothing else happens between
    them (simulator)."""

    step: int
    epoch: int


@dataclass(frozen=True)
class Applied:
    """Every rank of a group holds the verified state of ``step``; at the end of the run, the group has done all that
    ``epoch`` asks of it."""

    group: int
    incarnation: int
    step: int
    epoch: int


@dataclass(frozen=True)
class Loss:
    """One group is dead, or is to be treated as dead."""

    group: int
    incarnation: int
    cause: str
    """'exited', 'closed', 'silent', 'stalled'; 'late' (a joiner); 'replaced' by a newer incarnation; 'blamed' for
    failed reductions; 'diverged', 'corrupt' where a vote or Hello shows it."""
    position: int = -1
    """Position of the rank by which the loss was noticed; -1 where it was not a single rank."""
    detail: str = ""
    """Details for the decision's reason: exit status, seconds of silence, ..."""


@dataclass(frozen=True)
class Lost:
    """Groups that are known together to be gone: one new epoch for all of them."""

    losses: tuple[Loss, ...]
    progress: tuple[tuple[int, int], ...] = ()
    """(group, number of pieces of the step in flight that it has done, as last reported) of every live group, the lost
    ones too."""
    failing_s: float = 0.0
    """How long the step has failed (``Vote.failing_s``), where a group is lost for standing still; else 0."""


@dataclass(frozen=True)
class Standstill:
    """All ranks wait for each other and none is behind: something between them failed and nobody noticed."""

    epoch: int
    detail: str
    failing_s: float = 0.0
    """How long the step has failed (``Vote.failing_s``)."""


@dataclass(frozen=True)
class JoinersLate:
    """The holders of t* have waited for the joiners of ``epoch`` as long as they may."""

    epoch: int
    waited_s: float


@dataclass(frozen=True)
class Saved:
    """A group wrote a checkpoint of ``step`` and asks whether it counts."""

    group: int
    incarnation: int
    step: int
    directory: str


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to save and leave at the next step boundary (SIGTERM, exit interval, duration)."""

    reason: str


@dataclass(frozen=True)
class Tuned:
    """The tuner chose settings that the job uses from here on, or orders a save to measure its cost. The machine cannot
    import the tuner (tuner.at_start), so the event carries the choice, with its figures so that it can be
    recomputed."""

    reason: str
    save_interval: int = 0
    """Steps between the saves that the machine orders; 0: unchanged."""
    save_now: bool = False
    """The next step that is committed is saved."""
    figures: Mapping[str, object] = field(default_factory=dict)
    """The figures that the choice was computed from, by the names of the tuner's arguments."""
    choice: Mapping[str, object] = field(default_factory=dict)


Event: TypeAlias = (
    Opened
    | Hello
    | AllHere
    | StartupOver
    | Vote
    | AllVoted
    | Applied
    | Lost
    | Standstill
    | JoinersLate
    | Saved
    | StopRequested
    | Tuned
)


# --------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class View:
    """All that one group must know of the step in flight in an epoch."""

    group: int
    incarnation: int
    epoch: int
    fencing: int
    live: tuple[tuple[int, int], ...]
    """(group, incarnation) of all members, sorted."""
    committed: tuple[int, int]
    """(t*, e*); e* is 0 before the first commit of a life. A member that has not applied t* yet applies the reduced
    result of (t*, e*)."""
    step: int
    """t* + 1."""
    segments: Segments
    """This group's plan of ``step`` in ``epoch``; inside a step it only grows, one segment at a time."""
    standing: tuple[int, ...]
    """This group's plan of the steps after ``step`` while the epoch lasts."""
    donors: tuple[int, ...] = ()
    """For a joiner: groups that hold state t*; empty for a member that holds it itself."""
    leave: bool = False
    """The run ends with t*: apply it, vote on its weights, save where it is this group's turn, then send
    Applied(t*)."""
    audits: Segments = ()
    """Pieces that this group audits in ``step``: those of entry k are computed in the pipeline of segment k, after its
    pieces, and are not added to the accumulators. Segments beyond the last entry have none."""
    disputed: tuple[int, ...] = ()
    """Pieces over whose gradients groups disagree, or ``WEIGHTS``: the next vote must have their checksums, parameter
    by parameter."""
    save: int = 0
    """The save that the commit of t* ordered, as returned by :func:`spare_megatron.controller.saves.order`."""

    @property
    def live_groups(self) -> tuple[int, ...]:
        """Ids of the members, sorted: a group's index in it is its rank in a replica communicator."""
        return tuple(group for group, _ in self.live)

    @property
    def neighbour(self) -> tuple[int, int] | None:
        """(group, incarnation) of the next member after this group, the first after the last: to that one its ranks
        send in the replica rings. None where there is no other."""
        if len(self.live) < 2:
            return None
        return self.live[bisect_right(self.live, (self.group, self.incarnation)) % len(self.live)]

    def audits_of(self, segment: int) -> tuple[int, ...]:
        """The pieces that are audited in the pipeline of a segment."""
        return self.audits[segment] if segment < len(self.audits) else ()


@dataclass(frozen=True)
class SendView:
    view: View
    delay_s: float = 0.0
    """Back-off before a step is tried again without a change of members."""


@dataclass(frozen=True)
class SendCommit:
    """Tell every live group to apply R(step, epoch). The plan of step + 1 is the standing assignment of ``epoch``."""

    groups: tuple[int, ...]
    step: int
    epoch: int
    leave: bool = False
    """The run ends with this step (``View.leave``)."""
    audits: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(group, the pieces that it audits in step + 1) of every group that audits any; each is told only its own."""
    save: int = 0
    """The save that is ordered, as returned by :func:`spare_megatron.controller.saves.order`."""


@dataclass(frozen=True)
class SendFenced:
    group: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class SendStop:
    """Tell every live group that the job is over."""

    groups: tuple[int, ...]
    outcome: str
    """'finished', 'left' (saved on request), 'wipe-out', 'failed'."""
    reason: str


@dataclass(frozen=True)
class AcceptSave:
    """The checkpoint counts: it may take its final name."""

    group: int
    incarnation: int
    step: int
    directory: str


Action: TypeAlias = SendView | SendCommit | SendFenced | SendStop | AcceptSave


class Deferred(Sequence[Action]):
    """Actions that are computed when they are first read: making a view for each of ten thousand groups takes time, and
    the simulator, which only follows the state, never reads them."""

    def __init__(self, make: Callable[[], Iterable[Action]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[Action, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Action]: ...
    def __getitem__(self, index: int | slice) -> Action | Sequence[Action]:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Action]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        return self._made == (other._made if isinstance(other, Deferred) else other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)


@dataclass(frozen=True)
class Decision:
    """The result of one event: the actions in order, and the reason in one sentence with the figures."""

    actions: Sequence[Action] = ()
    """A tuple, or :class:`Deferred`, which equals the tuple that it makes."""
    reason: str = ""
    epoch: int = 0
