"""What one rank can do inside its group: the seam between the fault-tolerant step loop and a model.

The loop (:mod:`spare_megatron.trainer.step`) knows pieces, epochs, votes and commits, and no model. An engine knows
a model and one group, and nothing of other groups. Megatron's engine is in :mod:`spare_megatron.megatron_adapter`;
the tests drive the same loop with a small torch model.

Collectives *inside* a group are called by an engine in an order that follows from the arguments of its methods alone:
every rank of a group gets the same calls with the same arguments, whatever the rank saw of views and failures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from spare_megatron.config.engine_hooks import Outlet, PieceHook


class StepEngine(Protocol):
    """One rank of one group. Pieces are numbers ``i * K + j``: microbatch ``j`` of shard ``i``."""

    on_piece: PieceHook | None
    """Called around each piece: progress and fault injection."""

    def begin_step(self, step: int) -> None:
        """Zero the accumulators: no piece is inside."""

    def run(self, step: int, pieces: Sequence[int], audits: Sequence[int] = (), compared: Collection[int] = ()) -> None:
        """Forward and backward of ``pieces`` (perhaps none) in order, as one pipeline; adds to the accumulators.

        Gradients are those of the *sum* over pieces of each piece's loss; the constant divisor N*K*D is applied in
        :meth:`apply`, never here. ``audits`` are computed in the same pipeline, as whoever owns them computes them,
        and add nothing to accumulators or scalars. Of them, and of ``compared`` among the pieces, the gradients'
        checksums are kept.
        """

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        """Piece -> parameter -> checksum (64 bits) of its rounded gradient on this rank: of every audited piece since
        :meth:`begin_step`, or of every compared one. Pieces without samples may be left out. No collective."""

    def leaving(self) -> Sequence[torch.Tensor] | None:
        """What :meth:`local_sum` will give after the next run, for a reduction that begins during that run: the same
        shapes, and the same memory where :meth:`watch` lets something leave. None where nothing can leave before the
        run is over. No collective."""

    def watch(self, outlet: Outlet) -> None:
        """Tell ``outlet`` during the next run, and in none after it, what of :meth:`leaving` is final. No collective:
        whether a run is watched may differ between the ranks of a group."""

    def bucket_fault(self, tensor: int, stop: int) -> str:
        """As :meth:`accumulators_fault`, of what leaves with a bucket that ends at ``stop`` of tensor ``tensor``;
        called for one bucket after the other."""

    def local_sum(self) -> Sequence[torch.Tensor]:
        """Sum of the accumulators over the group's inner data and context ranks, one flat tensor for each buffer.

        Collective in the group. The accumulators stay as they are; the tensors may be views of them and must not
        be written to.
        """

    def scalars(self) -> Mapping[str, float]:
        """Sums over the pieces inside the accumulators (loss, tokens, ...); the same keys on every rank, zero where
        a rank has no share. They are summed over groups like one more bucket.

        Collective in the group; called once after each :meth:`local_sum`.
        """

    def accumulators_fault(self) -> str:
        """Why this rank's accumulators, as of the last :meth:`local_sum`, are not the sum of the pieces that went in
        (silent corruption); empty when they are, or when this engine cannot tell. No collective."""

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        """Why ``reduced`` is not the sum of what all groups put in; as :meth:`accumulators_fault`."""

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        """A fingerprint of a reduced result that :meth:`result_fault` finds no fault in: equal on this position of all
        groups, empty where it need not be. No collective."""

    def weights_digest(self) -> str:
        """A fingerprint of this rank's weights as they are: equal for equal weights, empty for none. No collective."""

    def weights_checksums(self) -> Mapping[str, int]:
        """Name -> checksum (64 bits, signed) of each tensor that :meth:`weights_digest` is about. No collective."""

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """The committed update: ``reduced`` has the sum over *all* pieces of the step, shaped as :meth:`local_sum`.

        Collective in the group. Returns what is logged: ``loss``, ``grad_norm``, ``lr``, ``tokens``, ... on each rank
        that knows them.
        """
