"""Computes the checksums of single pieces' gradients on one rank, for audits.

The backward passes of a rank run one after the other. The checksum of a summed piece is the increase of the running
checksums over its passes (it has several where the rank has virtual stages, or the piece several microbatches). The
gradient of an audited piece is added to no sum: its passes report to a tensor of their own.
"""

from __future__ import annotations

import torch


class PieceChecksums:
    """The checksums of a step's pieces.

    ``totals`` (int64 [parameters, 2]) has the running checksums and flags of all summed pieces, which the backward
    passes update.
    """

    def __init__(self, totals: torch.Tensor) -> None:
        self._totals = totals
        self._piece = -1
        self._before: torch.Tensor | None = None
        self.report: torch.Tensor | None = None
        """Where a pass of an audited piece adds its checksums and flags, shaped like ``totals``; else None."""
        self.inside: dict[int, torch.Tensor] = {}
        """Summed piece -> its checksums, int64 [parameters]."""
        self.audited: dict[int, torch.Tensor] = {}
        """Audited piece -> its checksums and flags, int64 [parameters, 2]."""

    @property
    def unwatched(self) -> bool:
        """Whether nobody wants the checksums of the piece of the present backward pass."""
        return self.report is None and self._before is None

    def begin_step(self) -> None:
        """Forget the pieces of the step before."""
        self.inside.clear()
        self.audited.clear()

    def pass_begins(self, piece: int, *, audited: bool, compared: bool) -> None:
        """Note that a backward pass of ``piece`` begins, which is added to no sum (``audited``), or whose checksum is
        kept (``compared``), or neither."""
        if audited:
            self.report = self.audited.setdefault(piece, torch.zeros_like(self._totals))
        elif compared:
            self._piece, self._before = piece, self._totals[:, 0].clone()

    def pass_ends(self) -> None:
        """Note that the backward pass is over; also allowed after a pass of a piece that is not wanted."""
        if self._before is not None:
            gain = self._totals[:, 0] - self._before
            self.inside[self._piece] = self.inside[self._piece] + gain if self._piece in self.inside else gain
        self._before = self.report = None
