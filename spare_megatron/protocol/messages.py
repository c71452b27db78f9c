"""The protocol machine's input (events) and its output (actions).

All are frozen dataclasses of plain values, so that a journal line can hold them and a replay can compare them.
Words and rules are those of the step protocol (docs/protocol.md). Conventions:

* a *piece* is the number ``i * K + j`` of part ``j`` of shard ``i``; lists of pieces are in execution order;
* ``step`` is t, ``epoch`` is e; ``(t*, e*)`` is the last commit; epochs start at 1, steps at ``first_step + 1``;
* a group's plan is a tuple of *segments*: one (perhaps empty) for the plan it started the step with, one more for
  each epoch that added pieces. The group's leader makes one ticket stream of it (protocol.tickets), so that ranks
  which saw different views still run the same work in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, overload

from spare_megatron.protocol.view import Offer, ReliefAsk, View


@dataclass(frozen=True)
class JobSpec:
    """The constants of one job attempt, which the protocol machine must know before its first decision."""

    num_groups: int
    pieces_per_shard: int
    offsets: tuple[int, ...]
    """Placement offsets: group g hosts shards (g + offset) mod N, first offset 0 (placement.Placement)."""
    granularity: str
    """'microbatch' or 'shard'."""
    first_step: int
    """Step of the checkpoint that this job attempt started from; 0 for a fresh start."""
    last_step: int
    """Step whose commit ends the job."""
    min_groups: int
    """Groups that must be there to begin when the start-up time is over."""
    fingerprint: str
    """Digest of everything that must be equal on all groups (model, data, flags, versions)."""
    heartbeat_timeout_s: float = 0.0
    """How long a step must have failed before weak evidence fences a group (protocol.blame); the job gives up after a
    multiple of it (protocol.membership)."""
    donors_max: int = 2
    """Groups that serve one learner, each its part."""
    results_kept: int = 16
    """L: snapshot shards (the state, reduced results) that a donor keeps at most for a learner that has not taken them;
    it withdraws where it would have to keep more, or too many bytes (worker.donor)."""
    retry_limit: int = 8
    """Failed attempts of one step, without a change of members, after which the job gives up if they went on for long
    enough (protocol.membership)."""
    audit_rate: float = 0.0
    """Share of the pieces that a second host of their shard computes as well (protocol.audits)."""
    audit_seed: int = 0
    save_every: int = 0
    """Steps that are multiples of this are saved; 0: the tuner decides, or only the last step is saved."""
    emergency_saves: bool = False
    """Save at once where the loss of one more group would end the job (protocol.saves)."""
    adoption: bool = False
    """Groups take over shards that have lost their last host (protocol.adoption)."""
    state_shards: int = 0
    """S: parts into which the optimizer's state is divided (protocol.state_shards); 0: every group hosts
    everything."""
    state_copies: int = 0
    """r_s: hosts of each state shard; without meaning where there are none."""


# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Opened:
    """A coordinator starts on a run directory: a new job attempt, or the same job attempt after its own restart."""

    spec: JobSpec
    job_attempt: int
    fencing: int


@dataclass(frozen=True)
class Hello:
    """A group is here, for the first time or again."""

    group: int
    incarnation: int
    """-1: its process was started while the job runs and has not been given its incarnation yet; the machine draws
    one."""
    fingerprint: str
    last_applied: int
    held: tuple[int, int] | None = None
    """(step, epoch) of the reduced result that the group holds, if any."""
    fencing: int = 0
    """Highest fencing number the group knows."""
    committed: tuple[int, int] | None = None
    """(step, epoch) of the newest commit that any rank of the group was notified of; None before the first view."""
    process_nonce: str = ""
    """A random value that the process drew when it began: an incarnation belongs to one nonce."""
    replaces: int = -1
    """The incarnation whose place a new process takes, which is lost if it is still there; -1: it has seen none."""

    @property
    def known(self) -> int:
        """The newest step that the group has applied or knows the commit of."""
        return max(self.last_applied, self.committed[0] if self.committed else 0)


@dataclass(frozen=True)
class AllHere:
    """Stands for the first Hellos of these groups, in this order and with the job's fingerprint and first step, where
    nothing else happens between them (simulator)."""

    groups: tuple[tuple[int, int], ...]
    """(group, incarnation)."""
    process_nonces: tuple[str, ...] = ()
    """Of these groups, in their order; empty: they have none."""


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
    silent: bool = False
    """True: nothing, or not all that was sent, arrived within the data time-out, although the receiver listened. False:
    the connection ended or was refused without a message, which also happens after a death, a restart or the end of an
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
    state: tuple[tuple[int, int], ...] = ()
    """(state shard, checksum of its state after step - 1) of those that the group keeps, in order."""

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
    """In a failed vote: time since this coordinator process learned of the first failed attempt of this step by these
    members. It is a duration because clocks of different hosts cannot be compared."""


@dataclass(frozen=True)
class AllVoted:
    """Stands for the ok votes of all live groups for their plans of (step, epoch), where nothing else happens between
    them (simulator)."""

    step: int
    epoch: int
    weights_digest: str = ""
    """Of the weights that the step began with, as all votes have it."""


@dataclass(frozen=True)
class Applied:
    """At the end of the run: a group has done all that ``epoch`` asks of it."""

    group: int
    incarnation: int
    step: int
    epoch: int


@dataclass(frozen=True)
class Ready:
    """A learner without an offer could take one: its world is formed, its model built, its shards are open."""

    group: int
    incarnation: int


@dataclass(frozen=True)
class CaughtUp:
    """Every rank of a learner or joiner holds the state after ``step``, by offer ``number``."""

    group: int
    incarnation: int
    number: int
    step: int
    weights_digest: str = ""
    """As in the votes of step + 1."""


@dataclass(frozen=True)
class Void:
    """A learner or joiner could not have a part of its offer ``number``, or its transfer stands still."""

    group: int
    incarnation: int
    number: int
    detail: str = ""


@dataclass(frozen=True)
class Withdrawn:
    """A donor does not serve offer ``number`` any more: it could not copy its part in time, or keeps too much for
    it."""

    group: int
    incarnation: int
    number: int
    detail: str = ""


@dataclass(frozen=True)
class Loss:
    """One group is dead, or is to be treated as dead."""

    group: int
    incarnation: int
    cause: str
    """'exited', 'closed', 'silent', 'stalled'; 'hung' where nobody moves; 'replaced' by a newer incarnation; 'blamed'
    for failed reductions; 'diverged', 'corrupt' where a vote or Hello shows it."""
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
class RunningOut:
    """A group will soon have begun all pieces that it has in ``epoch``."""

    step: int
    epoch: int
    paces: tuple[tuple[int, int, float], ...]
    """(group, pieces of its plan that it has not done, seconds for a piece) of every member, by estimates."""


@dataclass(frozen=True)
class SpeedsMeasured:
    """Groups have been slow for long, or are not any more: later steps are to be shared out accordingly."""

    step: int
    """The last of the committed steps in which they were measured, t*."""
    steps: int
    """How many these steps are."""
    paces: tuple[tuple[int, int, float, float], ...]
    """(group, incarnation, how many times as long as the median group it takes for a piece: median of the first half of
    the steps, of the second half), of the members that are or may be slow."""


@dataclass(frozen=True)
class GaveBack:
    """A group's answer to an ask: it will not begin these ``pieces`` of its plan, unless they are given to it again."""

    group: int
    incarnation: int
    step: int
    ask: ReliefAsk
    pieces: tuple[int, ...]
    """In the order of its plan; empty where none was left to give."""


@dataclass(frozen=True)
class Hosts:
    """A group that has adopted a shard has opened its data on all ranks that read any, or cannot."""

    group: int
    incarnation: int
    shard: int
    opened: bool
    detail: str = ""
    """Why not."""


@dataclass(frozen=True)
class Have:
    """A new host of a state shard reports, in each epoch that it has a view of, that it has the shard's state and every
    result since; or that it has not, and that its view names no donor, or that it cannot keep the shard."""

    group: int
    incarnation: int
    epoch: int
    shard: int
    whole: bool
    detail: str = ""
    """Why it cannot keep the shard; empty where it can."""


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
class DrainRequested:
    """An operator, or the launcher, wants groups to leave at the end of a step, or takes that wish back."""

    groups: tuple[int, ...]
    reason: str
    """Who wants it, and what for."""
    undo: bool = False
    """They may stay, or be started again where they have left."""
    for_now: bool = False
    """The launcher wants it, which takes its own wish back once they have left, and nobody else's."""


@dataclass(frozen=True)
class Tuned:
    """The tuner chose settings that the job uses from here on, or orders a save to measure its cost. The machine cannot
    import the tuner (planning.at_start), so the event carries the choice, with its figures so that it can be
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
    | Ready
    | CaughtUp
    | Void
    | Withdrawn
    | Lost
    | Standstill
    | JoinersLate
    | RunningOut
    | SpeedsMeasured
    | GaveBack
    | Hosts
    | Have
    | Saved
    | StopRequested
    | DrainRequested
    | Tuned
)


# --------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class SendView:
    view: View
    delay_s: float = 0.0
    """Back-off before a step is tried again without a change of members."""


@dataclass(frozen=True)
class SendCommit:
    """Tell every live group to apply R(step, epoch). The plan of step + 1 is the steady-state assignment of
    ``epoch``."""

    groups: tuple[int, ...]
    step: int
    epoch: int
    leave: bool = False
    """The run ends with this step (``View.leave``)."""
    audits: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(group, the pieces that it audits in step + 1) of every group that audits any; each receives only its own."""
    save: int = 0
    """The save that is ordered, as returned by :func:`spare_megatron.protocol.saves.order`."""
    serves: tuple[tuple[int, tuple[Offer, ...]], ...] = ()
    """(group, the offers in which it is a donor) of every donor; each receives only its own (``View.serves``)."""


@dataclass(frozen=True)
class SendAsk:
    """Ask a group for pieces of the step in flight; views have the ask as well, until its answer has changed plans."""

    group: int
    incarnation: int
    step: int
    ask: ReliefAsk


@dataclass(frozen=True)
class SendFenced:
    group: int
    incarnation: int
    """-1: of a process that has none."""
    reason: str
    process_nonce: str = ""
    """The process nonce of a process that has no incarnation."""
    lasting: bool = False
    """What it has computed is wrong, so another process on the same devices is no better."""


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


Action: TypeAlias = SendView | SendCommit | SendAsk | SendFenced | SendStop | AcceptSave


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
