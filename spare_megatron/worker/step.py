"""Runs one step of one rank: computes its plan, reduces over the groups, votes and waits for the commit.

The runner follows the ticket stream of its group and the newest :class:`~spare_megatron.protocol.member.Orders` until
the step is committed:

1. tickets are run as one pipeline up to the next pause entry (the first are the step's own work, later ones are
   patches);
2. a close entry of an epoch means that the accumulators contain all pieces of its plan: they are summed inside the
   group, and reduced over the groups in that epoch, out of place, if it is still the newest; with overlap, that begins
   while the last backward passes run;
3. the outcome goes to the group's leader, which votes; then the rank waits for the commit or for a newer epoch.

A newer epoch neither interrupts computing nor discards anything: accumulators grow until the commit. What a rank does
*inside* its group follows from the ticket stream alone, so ranks of a group that learn of an epoch at different moments
still call the same collectives in the same order (protocol rule 4).

Everything that groups exchange or compare is by *row*, a part of the model that one rank keeps in each shape of the job
(:mod:`spare_megatron.config.rows`). A rank has one or, where shapes differ, several: it reduces them in ascending order
and reports the outcome of each.

An overlapped reduction copies the parts of the accumulators that are final. If its epoch ends first, it is dropped, and
the accumulators are unchanged. After the patch, if there is one, everything is reduced in the newer epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from spare_megatron.collectives.reduction import GradientReduction, PlainReduction, ReduceOutcome, Reduction
from spare_megatron.collectives.reduction_attempt import OpenReduction
from spare_megatron.control_plane.reports import checksum_of
from spare_megatron.control_plane.session import Session
from spare_megatron.metrics.rank_lines import BROKEN
from spare_megatron.protocol.audits import selected
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.messages import WEIGHTS, ParameterChecksum, ReductionResult
from spare_megatron.protocol.tickets import Begin, Close, Ticket
from spare_megatron.protocol.view import View
from spare_megatron.worker.engine import EngineRow, StepEngine, by_row, results_by_row, rows_of
from spare_megatron.worker.group_rounds import Gather, alone, same_orders
from spare_megatron.worker.rank_parts import RankParts
from spare_megatron.worker.shard_gather import ShardGather
from spare_megatron.worker.ticket_reader import LeaveError, TicketReader, TicketRun

Parts = Mapping[int, Mapping[str, int]]
"""Piece -> parameter -> checksum of its gradient."""


class SentBackError(Exception):
    """A joiner (a returning group that has just become a member) has left the epoch or has another offer: its state
    does not count any more."""


@dataclass(frozen=True)
class Joined:
    """The group of this rank is a member that holds t* by an offer, and has not voted yet."""

    step: int
    """t*."""
    number: int
    """The offer."""

    def counts_in(self, orders: Orders) -> bool:
        """Whether that is still so: the group has not been sent back, nor given another offer."""
        view = orders.view
        return view.is_member and (view.offer is None or view.offer.number == self.number)


class Replicas(Protocol):
    """The part of :class:`~spare_megatron.collectives.replica_communicators.ReplicaCommunicators` that a step needs."""

    def reduce(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> ReduceOutcome:
        """Sum over the groups of ``epoch``; returns at once when the epoch is stale."""

    def begin(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> OpenReduction:
        """Begin a reduction before its tensors are final. Never waits."""


@dataclass
class StepTimes:
    """Seconds that this rank spent in one step, by kind."""

    compute_s: float = 0.0
    patch_s: float = 0.0
    rebuild_s: float = 0.0
    reduce_s: float = 0.0
    """The time of the reduction that was committed."""
    attempts: int = 0
    joined: int = 0
    """Pieces of lost groups that were computed in a pipeline that ran when they came."""
    early: int = 0
    """Buckets of the committed reduction that were summed while the last run still computed."""


@dataclass(frozen=True)
class Committed:
    """A step that is committed and not yet applied by this rank."""

    step: int
    epoch: int
    tensors: Sequence[torch.Tensor]
    """Sums over all pieces of the batch, shaped as the engine's ``local_sum``, and the check vector where they are
    converted."""
    scalars: Mapping[str, float]
    times: StepTimes
    live: tuple[int, ...]
    """The groups that committed it, which are the members of ``epoch``."""
    leave: bool
    """Whether the run ends with this step."""
    save: int = 0
    """The last step at which a save was due, if the commit ordered one (:func:`spare_megatron.protocol.saves.order`);
    0 if not."""


@dataclass(frozen=True)
class _Share:
    """This rank's contribution to the reductions after a run."""

    tensors: Sequence[torch.Tensor]
    scalars: Mapping[str, float]
    opened: OpenReduction | None
    """The reduction that began during that run, if it is overlapped."""


@dataclass
class _Attempt:
    """The reduction that was reported last."""

    epoch: int = 0
    live: tuple[int, ...] = ()
    outcome: ReduceOutcome | None = None
    ended_s: float = 0.0


@dataclass
class StepRunner:
    """Follows the ticket stream on one rank. Not thread-safe: it belongs to the training thread."""

    engine: StepEngine
    session: Session
    replicas: Replicas
    inject: Callable[[str, int, int], None]
    """``inject(point, step, n)`` is called wherever a fault can be injected."""
    clock: Callable[[], float] = time.monotonic
    method: GradientReduction = field(default_factory=PlainReduction)
    """The number format in which gradients travel between groups."""
    overlap: bool = False
    """Whether to reduce while the last backward passes run; must be the same on every rank of the job."""
    gather: Gather = alone
    """Gathers over the ranks of this group."""
    look: Callable[[View, int], None] = lambda view, step: None
    """``look(view, step)`` is called with each newer view that finds the state after ``step`` in the engine: others may
    need it before the step in flight can be committed."""
    parts: RankParts = field(default_factory=RankParts)
    """Takes note of what this rank does when."""
    shards: ShardGather | None = None
    """Gathers what this rank does not keep; None where every group keeps all state."""
    more: Sequence[Replicas] = ()
    """Those of this rank's rows after the first one."""
    _shown: int = field(default=0, init=False)
    """The version of the orders that ``look`` has seen last."""
    _step: int = field(default=0, init=False)
    _pieces: list[int] = field(default_factory=list, init=False)
    _audited: list[int] = field(default_factory=list, init=False)
    _done: int = field(default=0, init=False)
    _reader: TicketReader = field(init=False)
    _run: TicketRun | None = field(default=None, init=False)
    """The newest run of the step in flight."""
    _opened: OpenReduction | None = field(default=None, init=False)
    """The reduction that began during that run, if it is overlapped."""
    _patch_began_s: float = field(default=0.0, init=False)
    """When that run came to pieces of lost groups; 0: it has none so far."""
    _computing: bool = field(default=False, init=False)
    _rows: Sequence[EngineRow] = field(init=False)
    _weights: Sequence[str] = field(default=(), init=False)
    """Of each row the digest of the weights, and of part of the optimizer's state, with which the step in flight
    began."""

    def __post_init__(self) -> None:
        self._reader = TicketReader(self.session)
        self._rows = rows_of(self.engine)

    def run(self, step: int, joined: Joined | None = None) -> Committed:
        """Compute ``step`` until it is committed.

        Args:
            joined: given for the first step of a group that comes back. Until it is committed the group may be sent
                back at any moment, so its ranks go on only when all of them look at the same orders.

        Raises:
            LeaveError: this group is fenced, or the job is over.
            SentBackError: a joiner is no member any more; on all ranks of its group alike.
        """
        self._step, self._pieces, self._audited, self._done = step, [], [], 0
        self._run = None
        self._reader.begin(step, -1 if joined is None else joined.number)
        times, attempt = StepTimes(), _Attempt()
        if self.shards is not None:
            self.shards.settle(step - 1)
        self._weights = [row.weights_digest() for row in self._rows]
        self.engine.begin_step(step)
        share: _Share | None = None
        while True:
            orders = self.session.orders if joined is None else same_orders(self.session, self.gather)
            view = orders.view
            if joined is not None and not orders.over and self._is_sent_back(joined, orders, attempt):
                raise SentBackError(f"group {view.group} is to be brought up to date again")
            if view.committed[0] >= step:
                return self._committed(step, view, attempt, times)
            if orders.over:
                raise LeaveError(orders)
            self._look(orders)
            word = self._reader.next(orders)
            if word is None or isinstance(word, Begin):  # of a later step, whose commit is still on its way
                if attempt.epoch == view.epoch:
                    self.session.progress("vote", step, self._done)
                self.session.wait(orders.version)
            elif isinstance(word, Ticket) or self._run is None:
                self._compute(times)
                share = None
            else:
                assert isinstance(word, Close), f"{word} between the runs of step {step}"
                self._reader.move()
                share = share or self._share(times)
                if word.epoch == view.epoch:
                    self._attempt(view, share, attempt, times)

    def _is_sent_back(self, joined: Joined, orders: Orders, attempt: _Attempt) -> bool:
        """Whether a joiner's state does not count any more. This rank may have missed the view with which the joiner
        was sent back, if it is a member again. Then the step was committed in an epoch in which it has not voted, or
        the step begins again in the ticket stream."""
        committed, entry = orders.view.committed, self._reader.next(orders)
        left = committed[0] >= self._step and committed != (self._step, attempt.epoch)
        again = isinstance(entry, Begin) and entry.step == self._step
        return left or again or not joined.counts_in(orders)

    def vote_on_the_end(self, step: int, view: View) -> None:
        """Vote on the weights after ``step``, the last one, in the epoch of ``view``. The vote is that of one more
        step, without pieces."""
        self._pieces, self._audited, self._done = [], [], 0
        self._weights = [row.weights_digest() for row in self._rows]
        self._step = step + 1
        self._report(view, ReduceOutcome(ok=True, stale=False), StepTimes())

    def on_piece(self, phase: str, n: int) -> None:
        """Called by the engine before the forward of the ``n``-th piece of a run and after its backward."""
        if phase == "backward":
            self._done += 1
        self._look(self.session.orders)
        self.session.progress("forward" if phase == "audit" else phase, self._step, self._done)
        if phase in ("evaluate", "audit") or self._run is None:
            return
        segment, n = self._run.place(n)
        patches = segment > 0 and phase == "forward"
        if patches and not self._patch_began_s:
            self._patch_began_s = self.clock()
        self.inject("patch" if patches else phase, self._step, n)

    def on_bucket(self, done: int, total: int) -> None:
        """Called when a bucket of a reduction is complete. Reports progress, but not while the rank computes: that
        reports its own."""
        if not self._computing:
            self.session.progress("reduce", self._step, self._done)
        if 0 < done < total:
            self.inject("reduce", self._step, done - 1)

    def _look(self, orders: Orders) -> None:
        """Pass a newer view of the step in flight to ``look``. Also between pieces, because a donor copies its state
        while they are computed."""
        if orders.version > self._shown and orders.view.step == self._step and not orders.over:
            self._shown = orders.version
            self.look(orders.view, self._step - 1)

    def _compute(self, times: StepTimes) -> None:
        """Run the pipeline once, up to the next pause. A step has at least one run, even without a ticket."""
        started_s, self._patch_began_s, self._opened = self.clock(), 0.0, None
        run = self._run = TicketRun(self._reader, self._open)
        self._computing = True
        self.engine.run(self._step, run)
        self._computing = False
        assert run.ended, f"the engine left tickets of step {self._step}"
        self._pieces.extend(run.pieces)
        self._audited.extend(run.audits)
        ended_s = self.clock()
        patch_s = ended_s - self._patch_began_s if self._patch_began_s else 0.0
        times.patch_s += patch_s
        times.joined += run.joined
        times.compute_s += ended_s - started_s - patch_s
        self.parts.note("compute", started_s, self._patch_began_s or ended_s)
        if patch_s:
            self.parts.note("patch", self._patch_began_s, ended_s)

    def _share(self, times: StepTimes) -> _Share:
        """The sums of the runs so far, over the group."""
        started_s = self.clock()
        share = _Share(self.engine.local_sum(), self.engine.scalars(), self._opened)
        ended_s = self.clock()
        spent_s = ended_s - started_s
        self.parts.note("patch" if self._patch_began_s else "compute", started_s, ended_s)
        if self._patch_began_s:
            times.patch_s += spent_s
        else:
            times.compute_s += spent_s
        return share

    def _open(self) -> None:
        """Begin an overlapped reduction, if a close entry for the newest epoch follows the run that is about to end."""
        orders = self.session.orders
        view, closed = orders.view, self._reader.closes(orders)
        tensors = self.engine.leaving() if self.overlap and view.epoch in closed else None
        if tensors is None:
            return
        request = self._request(tensors, {}, self._rows[0])
        sums = self.replicas if self.shards is None else self.shards
        self._opened = sums.begin(view.epoch, request, self._stale(view))
        if self._opened is not None:
            self.engine.watch(self._opened)

    def _attempt(self, view: View, share: _Share, attempt: _Attempt, times: StepTimes) -> None:
        """Reduce in the newest epoch and report the outcome to the leader, unless the epoch has ended meanwhile."""
        times.attempts += 1
        self.session.progress("reduce", self._step, self._done)
        if times.attempts > 1:
            self.inject("rebuild", self._step, times.attempts - 2)
        began_s = self.clock()
        outcome = self._reduce(view, share, again=times.attempts > 1)
        if outcome.stale:
            self.parts.note(BROKEN, began_s, self.clock())
            return
        if outcome.ok:
            self.inject("vote", self._step, 0)
            outcome = self._checked(outcome)
        attempt.epoch, attempt.live = view.epoch, view.live_groups
        attempt.outcome, attempt.ended_s = outcome, self.clock()
        self.parts.note("reduce" if outcome.ok else BROKEN, began_s, attempt.ended_s)
        times.rebuild_s, times.reduce_s, times.early = outcome.formation_s, outcome.reduce_s, outcome.early
        self._report(view, outcome, times)

    def _reduce(self, view: View, share: _Share, again: bool) -> ReduceOutcome:
        """Sum ``share`` over the groups of ``view``. ``again``: an earlier attempt failed, perhaps because some rank's
        accumulators are damaged; so this rank checks its own."""
        if share.opened is not None and share.opened.epoch == view.epoch:
            return share.opened.finish(share.tensors, share.scalars)
        fault = self.engine.accumulators_fault(suspected=again)
        if fault:
            return ReduceOutcome(ok=False, stale=False, error=fault, corrupt=True)
        sums = self.replicas if self.shards is None else self.shards
        outcomes: list[ReduceOutcome] = []
        for row, tensors, replicas in zip(
            self._rows, by_row(self._rows, share.tensors), (sums, *self.more), strict=True
        ):
            request = self._request(tensors, share.scalars, row)
            outcomes.append(replicas.reduce(view.epoch, request, self._stale(view)))
            if not outcomes[-1].ok:
                break
        return outcomes[-1] if len(outcomes) == 1 or not outcomes[-1].ok else _of_all_rows(outcomes)

    def _request(self, tensors: Sequence[torch.Tensor], scalars: Mapping[str, float], row: EngineRow) -> Reduction:
        return Reduction(tensors, scalars, self.method, self.on_bucket, self.overlap, row.conversion())

    def _stale(self, view: View) -> Callable[[], bool]:
        def stale() -> bool:
            newest = self.session.orders
            return newest.over or newest.view.epoch != view.epoch

        return stale

    def _checked(self, outcome: ReduceOutcome) -> ReduceOutcome:
        """The outcome; a failure if the result is not the sum of the groups' contributions. If this rank's accumulators
        are damaged, the failure says so; if those of all ranks are good, another attempt may succeed."""
        faults = (
            row.result_fault(tensors)
            for row, tensors in zip(self._rows, results_by_row(self._rows, outcome.tensors), strict=True)
        )
        fault = next(filter(None, faults), "")
        if not fault:
            return outcome
        own = self.engine.accumulators_fault(suspected=True)
        return replace(outcome, ok=False, error=own or fault, corrupt=bool(own))

    def _report(self, view: View, outcome: ReduceOutcome, times: StepTimes) -> None:
        """Report the outcome to the leader, which votes for the group: of each row, or, where one failed, once."""
        figures = {
            "compute_s": times.compute_s,
            "patch_s": times.patch_s,
            "rebuild_s": times.rebuild_s,
            "reduce_s": times.reduce_s,
            "buckets_early": times.early,
            "pieces_discarded": self._done - len(self._pieces),
            "pieces_joined": times.joined,
        }
        results = results_by_row(self._rows, outcome.tensors)
        for at, number in enumerate(self.session.rows if outcome.ok else self.session.rows[:1]):
            self.session.reduced(self._result(view, outcome, at, results[at]), figures, number)

    def _result(self, view: View, outcome: ReduceOutcome, at: int, tensors: Sequence[torch.Tensor]) -> ReductionResult:
        """The outcome of this rank's row number ``at``, which has these ``tensors``."""
        row, number = self._rows[at], self.session.rows[at]
        inside, audited = row.piece_checksums(audited=False), row.piece_checksums(audited=True)
        compared = selected(self.session.spec, self._step, self._pieces)
        return ReductionResult(
            step=self._step,
            epoch=view.epoch,
            ok=outcome.ok,
            pieces=tuple(self._pieces),
            result_digest=row.result_digest(tensors, outcome.scalars) if tensors else "",
            weights_digest=self._weights[at],
            links=outcome.links,
            corrupt=outcome.corrupt,
            detail=outcome.error,
            checksums=tuple((piece, _checksum(inside.get(piece, {}))) for piece in compared),
            audits=tuple((piece, _checksum(audited.get(piece, {}))) for piece in self._audited),
            parts=tuple(
                ParameterChecksum(piece, number, name, checksum)
                for piece in view.disputed
                for name, checksum in _parts(row, piece, inside, audited).items()
            ),
            state=() if self.shards is None or not outcome.ok else self.shards.digests(view.epoch, self._stale(view)),
        )

    def _committed(self, step: int, view: View, attempt: _Attempt, times: StepTimes) -> Committed:
        epoch = view.committed[1]
        outcome = attempt.outcome
        assert view.committed[0] == step, f"step {view.committed[0]} is committed, this rank is in step {step}"
        assert outcome is not None, f"step {step} was committed without a vote of this rank"
        assert outcome.ok, f"step {step} was committed although this rank's reduction failed: {outcome.error}"
        assert attempt.epoch == epoch, f"step {step} was committed in epoch {epoch}, reduced here in {attempt.epoch}"
        self.parts.note("vote", attempt.ended_s, self.clock())
        self.inject("apply", step, 0)
        return Committed(
            step, epoch, outcome.tensors, outcome.scalars, times, live=attempt.live, leave=view.leave, save=view.save
        )


def _of_all_rows(outcomes: Sequence[ReduceOutcome]) -> ReduceOutcome:
    """The outcome of the rows of a rank, each of which has succeeded. The scalars of all are the same."""
    return replace(
        outcomes[0],
        tensors=tuple(tensor for one in outcomes for tensor in one.tensors),
        formation_s=max(one.formation_s for one in outcomes),
        reduce_s=sum(one.reduce_s for one in outcomes),
    )


def _parts(row: EngineRow, piece: int, inside: Parts, audited: Parts) -> Mapping[str, int]:
    return row.weights_checksums() if piece == WEIGHTS else inside.get(piece) or audited.get(piece) or {}


def _checksum(parts: Mapping[str, int]) -> int:
    """Combine the checksums of a piece's parameters on this rank into one."""
    return checksum_of(",".join(f"{name}={checksum}" for name, checksum in parts.items()))
