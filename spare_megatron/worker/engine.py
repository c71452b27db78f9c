"""The interface between the fault-tolerant step loop and a model: what one rank can do inside its group.

The loop (:mod:`spare_megatron.worker.step`) knows pieces, epochs, votes and commits, but no model. An engine knows
a model and one group, but no other group. Megatron's engine is in :mod:`spare_megatron.megatron_adapter`;
the tests drive the same loop with a small torch model.

An engine calls the collectives *inside* its group in an order that follows from the arguments of its methods alone, and
every rank of a group gets the same calls with the same arguments, whichever views and failures the rank has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from spare_megatron.collectives.converting import Conversion
from spare_megatron.config.engine_hooks import Outlet, PieceHook
from spare_megatron.protocol.tickets import Tickets


class RowParts(Protocol):
    """What groups compare and exchange of a rank, or of one of its *rows*: a rank has several only in a job whose
    groups may have fewer pipeline stages than the flags say (:mod:`spare_megatron.config.rows`). Other methods that are
    named below are :class:`StepEngine`'s."""

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        """Piece -> parameter -> checksum (64 bits) of its rounded gradient on this rank: of every audited piece since
        :meth:`begin_step`, or of every compared one. Pieces without samples may be left out. No collective."""

    def conversion(self) -> Conversion | None:
        """How the sums over groups of :meth:`local_sum` are converted to results; None if they are used as they are. No
        collective."""

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        """Why ``reduced``, the results and the check vector of a reduction, is not the sum of what all groups put in
        (silent corruption); empty when it is, or when this engine cannot tell. No collective."""

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        """A digest of a reduced result in which :meth:`result_fault` found no fault. It is equal on this position of
        all groups; empty where results need not be equal. No collective."""

    def weights_digest(self) -> str:
        """A digest of this rank's weights as they are now: equal for equal weights, empty for none. A second digest may
        follow, after a '+', of other state that must be equal in all groups. No collective."""

    def weights_checksums(self) -> Mapping[str, int]:
        """Name -> checksum (64 bits, signed) of each tensor that :meth:`weights_digest` covers. No collective."""

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> contiguous tensor: with :meth:`state_values` all that this rank needs to go on after the last applied
        step, in the engine's own memory.

        The same rank position of another group has the same names, dtypes and shapes, also when it has applied nothing.
        What is in them changes only in :meth:`apply`. Gradients are left out, and what follows from the step alone. No
        collective.
        """

    def state_values(self) -> Mapping[str, Any]:
        """The part of this rank's state that is not in tensors: JSON values, in which floats are exact. It follows from
        applied results and changes only in :meth:`apply`, so all groups that have applied the same steps have the same
        values. No collective."""

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        """Take over the state after ``step`` from the same rank position of another group, whose tensors have been
        written into those of :meth:`state_tensors`; ``values`` are its :meth:`state_values`.

        After this the engine is as the other one was: for each later step it can apply the committed result, after
        :meth:`begin_step` and without having run a piece, or compute the step with the others. No collective.
        """


class EngineRow(RowParts, Protocol):
    """One of several rows of a rank. ``reduced`` has the tensors of this row only."""

    @property
    def sums(self) -> int:
        """How many tensors of :meth:`StepEngine.local_sum` are of this row."""


def rows_of(engine: Any) -> Sequence[EngineRow]:
    """The rows of a rank's engine, ascending: those of its method ``rows``, where it has one, else itself. The tensors
    of :meth:`StepEngine.local_sum` and the ``reduced`` ones of :meth:`StepEngine.apply` are those of the rows in this
    order."""
    rows = getattr(engine, "rows", None)
    found: Sequence[EngineRow] = (engine,) if rows is None else rows()
    return found


def is_row(engine: Any) -> bool:
    """Whether an engine is the only row of its rank itself."""
    return rows_of(engine)[0] is engine


def by_row(rows: Sequence[EngineRow], tensors: Sequence[torch.Tensor], beside: int = 0) -> list[Sequence[torch.Tensor]]:
    """Split the tensors of all rows by row. Each row has its sums, and ``beside`` further tensors after them."""
    if len(rows) == 1 or not tensors:
        return [tensors] * len(rows)
    found, at = [], 0
    for row in rows:
        found.append(tensors[at : at + row.sums + beside])
        at += row.sums + beside
    assert at == len(tensors), f"{len(tensors)} tensors of {len(rows)} rows, of which {at} have one"
    return found


def results_by_row(rows: Sequence[EngineRow], results: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Split the results of a reduction by row. Each row has its results, and its check vector if sums are converted."""
    return by_row(rows, results, beside=rows[0].conversion() is not None)


class StepEngine(RowParts, Protocol):
    """One rank of one group. Pieces are numbers ``i * K + j``: piece ``j`` of shard ``i``."""

    on_piece: PieceHook | None
    """Called around each piece, for the progress counter and for fault injection."""

    def begin_step(self, step: int) -> None:
        """Zero the accumulators: they contain no piece."""

    def run(self, step: int, tickets: Tickets) -> None:
        """Forward and backward of all ``tickets`` (perhaps none) in order, as one pipeline; adds to the accumulators.

        Gradients are those of the *sum* over pieces of each piece's loss; the constant divisor, the number of
        microbatches, is applied in :meth:`apply`, never here. Audited pieces belong to other groups. They are computed
        in the same pipeline, exactly as their own groups compute them, and add nothing to accumulators or scalars. The
        checksums of their gradients are kept, as are those of this group's pieces that others audit.

        An engine should take each ticket only when it begins it: then tickets that are added late enter the running
        pipeline. An engine that takes all tickets first drains its pipeline before the late ones.
        """

    def leaving(self) -> Sequence[torch.Tensor] | None:
        """What :meth:`local_sum` will return after the next run, for a reduction that begins during that run.

        The tensors have the same shapes, and the parts that :meth:`watch` reports as final are the same memory. None
        where nothing is final before the run is over. No collective."""

    def watch(self, outlet: Outlet) -> None:
        """Report to ``outlet``, during the next run only, which parts of :meth:`leaving` are final. No collective:
        whether a run is watched may differ between the ranks of a group."""

    def local_sum(self) -> Sequence[torch.Tensor]:
        """The accumulators, summed over the group's inner data and context ranks: one flat tensor for each buffer.

        Collective in the group. The accumulators stay as they are; the tensors may be views of them and must not
        be written to.
        """

    def scalars(self) -> Mapping[str, float]:
        """Sums over the pieces inside the accumulators (loss, tokens, ...); the same keys on every rank, zero where
        a rank has no share. They are summed over groups like one more bucket.

        Collective in the group; called once after each :meth:`local_sum`.
        """

    def accumulators_fault(self, *, suspected: bool) -> str:
        """Why this rank's accumulators, as of the last :meth:`local_sum`, are not the sum of the pieces that went in
        (silent corruption); empty when they are, or when this engine cannot tell. Unless they are ``suspected``, an
        engine looks for nothing that :meth:`result_fault` would find. No collective."""

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """Apply the committed update; ``reduced`` has the sum over *all* pieces of the step, shaped as
        :meth:`local_sum`, and the check vector where sums are converted.

        Collective in the group. Returns what is logged: ``loss``, ``grad_norm``, ``lr``, ``tokens``, ... on each rank
        that knows them.
        """
