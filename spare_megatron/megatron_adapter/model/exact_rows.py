"""The exact sums of a rank with several rows: :class:`~spare_megatron.megatron_adapter.model.exact.ExactGradients` of
each, called as one.

The tensors of all rows stand one after the other, in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spare_megatron.megatron_adapter.model.exact import ExactGradients, restore_scales
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.protocol.tickets import Ticket


class ExactRows:
    """The accumulators of all rows of one rank."""

    def __init__(self, replicas: Sequence[Replica], rows: Sequence[ExactGradients]) -> None:
        """``replicas``: of each row, with the chunks of the rank."""
        self.rows = tuple(rows)
        of = {
            parameter: one
            for replica, one in zip(replicas, rows, strict=True)
            if replica.row is not None
            for parameter in replica.row.parameters
        }

        self._tied = [
            (updated.main_grad, parameter.main_grad)
            for replica in replicas
            if replica.row is not None
            for parameter, updated in replica.row.parameters.items()
            if updated is not parameter
        ]
        """The gradient of an embedding, and that of its use by an output layer, which is in another row."""

        def accumulate(parameter: torch.nn.Parameter) -> None:
            of[parameter].accumulate(parameter)

        for chunk in replicas[0].chunks:
            chunk.accumulate = accumulate

    @property
    def num_buffers(self) -> int:
        """Number of sums that :meth:`tensors` returns."""
        return sum(row.num_buffers for row in self.rows)

    @property
    def needs_all(self) -> bool:
        """Whether each backward pass must be reported."""
        return self.rows[0].needs_all

    @property
    def measuring(self) -> bool:
        """Whether the step in flight only measures scales."""
        return self.rows[0].measuring

    @property
    def growth_bits(self) -> int:
        """See :class:`~spare_megatron.exact_sum.formats.Format`."""
        return self.rows[0].growth_bits

    @property
    def state(self) -> dict[str, Any]:
        """All that the next step's scales depend on, of all rows."""
        states = [row.state for row in self.rows]
        return {**states[0], "scales": {key: one for state in states for key, one in state["scales"].items()}}

    def restore(self, state: Any, read_all: Callable[[], list[Any]]) -> None:
        """Go on from a checkpoint. Collective in the group."""
        restore_scales(self.rows, state, read_all)

    def begin_step(self) -> None:
        """Forget all pieces, and choose the step's scales."""
        for row in self.rows:
            row.begin_step()

    def pass_begins(self, chunk: int, ticket: Ticket | None, n: int, *, ends_piece: bool, ends_run: bool) -> None:
        """Note that a backward pass begins."""
        for row in self.rows:
            row.pass_begins(chunk, ticket, n, ends_piece=ends_piece, ends_run=ends_run)

    def pass_ends(self) -> None:
        """Note that it is over."""
        for row in self.rows:
            row.pass_ends()

    def tensors(self) -> list[torch.Tensor]:
        """The accumulators, summed over context and inner data ranks. Collective in the group."""
        return [tensor for row in self.rows for tensor in row.tensors()]

    def flags(self) -> tuple[bool, bool]:
        """Whether a piece exceeded the bound, and whether one was not finite."""
        flags = [row.flags() for row in self.rows]
        return any(one[0] for one in flags), any(one[1] for one in flags)

    def flagged(self) -> list[str]:
        """Names of the parameters that have such a flag."""
        return [name for row in self.rows for name in row.flagged()]

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        """Piece -> parameter -> checksum of its gradient."""
        found: dict[int, dict[str, int]] = {}
        for row in self.rows:
            for piece, checksums in row.piece_checksums(audited).items():
                found.setdefault(piece, {}).update(checksums)
        return found

    def accumulators_fault(self, suspected: bool) -> str:
        """Which accumulator is damaged; empty for none."""
        return next(filter(None, (row.accumulators_fault(suspected) for row in self.rows)), "")

    def finalize(self, sums: Sequence[torch.Tensor], divisor: float, overflows: bool) -> None:
        """Write the sums / divisor into the gradients, and choose the next step's scales."""
        at = 0
        for row in self.rows:
            row.finalize(sums[at : at + row.num_buffers], divisor, overflows)
            at += row.num_buffers
        for gradient, tied in self._tied:  # as megatron-core does between two stages
            gradient.add_(tied)

    def infinite(self, divisor: float) -> bool:
        """Whether a sum of the step, or it divided by ``divisor``, exceeds fp32."""
        return any(row.infinite(divisor) for row in self.rows)

    def spoil(self) -> None:
        """Make the gradients infinite."""
        for row in self.rows:
            row.spoil()
