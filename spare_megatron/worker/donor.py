"""What a rank does as a donor: it copies its part of the state, and of each result since, for the learners it serves.

Everything follows from the offers that the newest view lists (docs/protocol.md, rule 17). The state after step s lies
unchanged in the engine from the end of that apply to the beginning of the next, so its copy is made beside the
computing of step s + 1, at whatever time of it an offer comes. A result is copied before it is applied. Nobody waits
for a learner: a donor that would have to keep too much (:class:`OfferBudget`) withdraws.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from spare_megatron.collectives.handshake import Member
from spare_megatron.config.byte_units import in_bytes
from spare_megatron.config.plural import counted
from spare_megatron.control_plane.session import Session
from spare_megatron.planning.return_memory import most_result_bytes
from spare_megatron.protocol.view import Offer, View
from spare_megatron.transfer.transport import SnapshotShard, StateTransport
from spare_megatron.worker.engine import EngineRow, results_by_row
from spare_megatron.worker.rank_parts import RankParts
from spare_megatron.worker.step import Committed


@dataclass(frozen=True)
class OfferBudget:
    """The limits of one offer on one rank of a donor. Pure: time and sizes are arguments.

    A learner that can keep up receives bytes at least as fast as results produce them. So the results that arise while
    it fetches the state have at most the size of the state. The budget is twice that, because the learner begins late
    and its first steps are slow.
    """

    step: int
    """Of the state."""
    parts: int
    """Donors of the offer, each of which gives as much."""
    state_bytes: int
    """Of this donor's part of the state."""
    began_s: float
    """When the offer was opened; the copies of results begin with the step in flight then."""

    def most_bytes(self, result_bytes: int) -> int:
        """The bytes of results that may be kept, of parts of ``result_bytes`` each."""
        return int(most_result_bytes(self.state_bytes, result_bytes))

    def too_much(
        self,
        kept: Mapping[int, int],
        given_bytes: int,
        result_bytes: int,
        step: int,
        now_s: float,
        most_snapshot_shards: int,
    ) -> str:
        """Why the result of ``step`` must not be kept as well; empty if it may be kept.

        Args:
            kept: the bytes of each snapshot shard that the learner has not taken, by step.
            given_bytes: what this rank has given of the offer so far.
            result_bytes: of this donor's part of the result.
            most_snapshot_shards: how many snapshot shards may be kept, however small they are.
        """
        results = [size for at, size in kept.items() if at > self.step]
        if len(kept) < most_snapshot_shards and sum(results) + result_bytes <= self.most_bytes(result_bytes):
            return ""
        passed_s = max(now_s - self.began_s, 1e-3)
        step_s = passed_s / max(1, step - self.step)
        whole = result_bytes * self.parts
        return (
            f"the learner has not taken {counted(len(results), 'result')}, {in_bytes(sum(results))} here; it cannot "
            f"keep up with the steps: a result of {in_bytes(whole)} each {step_s:.3g} s needs "
            f"{in_bytes(whole / step_s)}/s at each position, and about "
            f"{in_bytes(given_bytes * self.parts / passed_s)}/s were had"
        )


log = logging.getLogger(__name__)
SIGN_S = 1.0
"""Time between two signs of life while a copy is waited for."""


class Donor:
    """The donor's side of one row of a rank. Belongs to the training thread. What fails here ends offers, never the
    training."""

    def __init__(
        self, engine: EngineRow, session: Session, transport: StateTransport, parts: RankParts | None = None
    ) -> None:
        """``parts`` records for how long this rank has to wait before its update."""
        self._engine, self._session, self._transport = engine, session, transport
        self._parts = parts or RankParts()
        self._open: dict[int, Offer] = {}
        self._budgets: dict[int, OfferBudget] = {}
        """Of the offers whose state this rank serves."""
        self._copies: dict[int, Future[None]] = {}
        """Offer -> the copy of its state that is being made."""
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="spare-donor")

    def look(self, view: View, step: int) -> None:
        """Take in the offers of ``view``, and begin to copy the state after ``step`` where one is new. The engine holds
        that state until :meth:`before_apply` returns."""
        listed = {offer.number: offer for offer in view.serves}
        for number in self._open.keys() - listed.keys():
            del self._open[number]
            self._budgets.pop(number, None)
            self._transport.drop(number)
        for number in sorted(listed.keys() - self._open.keys()):
            offer = listed[number]
            if offer.step > step:
                continue  # made with the commit of the step that is to be applied
            self._open[number] = offer
            if offer.step < step:
                self._withdraw(number, f"it was notified of it after step {step} was applied")
                continue
            self._transport.open(number, Member(*offer.learner), offer.donors.index(view.receiver), len(offer.donors))
            try:
                state = SnapshotShard(self._engine.state_tensors(), self._engine.state_values())
            except Exception as error:
                self._fail(number, step, error)
            else:
                part = snapshot_shard_bytes(state) // len(offer.donors)
                self._budgets[number] = OfferBudget(step, len(offer.donors), part, time.monotonic())
                self._copies[number] = self._copier.submit(self._transport.put, number, step, state)

    def before_apply(self, view: View, committed: Committed) -> None:
        """Keep what the offers need of the result that is about to be applied; returns when the state before it may be
        changed."""
        self.look(view, committed.step - 1)
        began_s = time.monotonic()
        copies, self._copies = self._copies, {}
        for number, copy in copies.items():
            try:
                self._wait(copy, committed.step)
            except Exception as error:
                self._fail(number, committed.step - 1, error)
        if not self._open:
            return
        tensors = {f"sum {n}": one for n, one in enumerate(committed.tensors)}
        result = SnapshotShard(tensors, {"scalars": dict(committed.scalars)})
        for number in sorted(self._open):
            self._keep(number, committed.step, result)
        self._parts.note("transfer", began_s, time.monotonic())

    def close(self) -> None:
        """Give everything up."""
        self._copier.shutdown(cancel_futures=True)

    def _wait(self, copy: Future[None], step: int) -> None:
        """Wait for a copy, with signs of life: others may wait for this rank."""
        while not wait([copy], SIGN_S).done:
            self._session.progress("apply", step, 0)
        copy.result()

    def _keep(self, number: int, step: int, result: SnapshotShard) -> None:
        budget = self._budgets.get(number)
        if budget is None:
            return
        kept, most = self._transport.kept(number), self._session.spec.results_kept
        part = snapshot_shard_bytes(result) // budget.parts
        why = budget.too_much(kept.sizes, kept.given_bytes, part, step, time.monotonic(), most)
        if why:
            self._withdraw(number, why)
            return
        try:
            self._transport.put(number, step, result)
        except Exception as error:
            self._fail(number, step, error)

    def _fail(self, number: int, step: int, error: Exception) -> None:
        log.warning("offer %d is not served: step %d could not be copied", number, step, exc_info=error)
        self._withdraw(number, f"step {step} could not be copied: {error!r}")

    def _withdraw(self, number: int, why: str) -> None:
        self._budgets.pop(number, None)
        self._transport.drop(number)
        self._session.withdraw(number, why)


class RowDonors:
    """The donors of all rows of a rank."""

    def __init__(
        self, rows: Sequence[EngineRow], session: Session, transports: Sequence[StateTransport], parts: RankParts
    ) -> None:
        """``transports``: of each row, in the same order."""
        self._rows = rows
        self._donors = [Donor(row, session, one, parts) for row, one in zip(rows, transports, strict=True)]

    def look(self, view: View, step: int) -> None:
        """:meth:`Donor.look` of each row."""
        for donor in self._donors:
            donor.look(view, step)

    def before_apply(self, view: View, committed: Committed) -> None:
        """:meth:`Donor.before_apply` of each row, with its results."""
        results = results_by_row(self._rows, committed.tensors)
        for donor, tensors in zip(self._donors, results, strict=True):
            donor.before_apply(view, replace(committed, tensors=tensors))

    def close(self) -> None:
        """Give everything up."""
        for donor in self._donors:
            donor.close()


def snapshot_shard_bytes(snapshot_shard: SnapshotShard) -> int:
    """The size of all tensors of a snapshot shard."""
    return sum(tensor.nbytes for tensor in snapshot_shard.tensors.values())
