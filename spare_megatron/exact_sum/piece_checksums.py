"""Checksums of single pieces' gradients on one rank, for audits: which backward pass belongs to which piece.

The backward passes of a rank come one after the other. Where a piece is summed, its checksum is what the running
checksums of all pieces gain in its passes (several, where the rank has virtual stages). An audited piece goes into
nothing: its passes report to a place of their own.
"""

from __future__ import annotations

from collections.abc import Collection

import torch


class PieceChecksums:
    """Of one step. ``totals`` (int64 [parameters, 2]) are the running checksums and flags of all summed pieces."""

    def __init__(self, totals: torch.Tensor) -> None:
        self._totals = totals
        self._wanted: frozenset[int] = frozenset()
        self._piece = -1
        self._before: torch.Tensor | None = None
        self.report: torch.Tensor | None = None
        """In a pass of an audited piece: where its checksums and flags go, shaped as ``totals``; else None."""
        self.inside: dict[int, torch.Tensor] = {}
        """Summed piece -> [parameters] checksums."""
        self.audited: dict[int, torch.Tensor] = {}
        """Audited piece -> as ``totals``."""

    def begin_step(self) -> None:
        """Nothing was computed yet."""
        self.inside.clear()
        self.audited.clear()

    def begin_run(self, wanted: Collection[int]) -> None:
        """``wanted``: the summed pieces of the run whose checksums are asked for."""
        self._wanted = frozenset(wanted)

    def pass_begins(self, piece: int, audited: bool) -> None:
        """A backward pass of a piece."""
        if audited:
            self.report = self.audited.setdefault(piece, torch.zeros_like(self._totals))
        elif piece in self._wanted:
            self._piece, self._before = piece, self._totals[:, 0].clone()

    def pass_ends(self) -> None:
        """The pass is over; a pass that nobody asked about may end as well."""
        if self._before is not None:
            gain = self._totals[:, 0] - self._before
            self.inside[self._piece] = self.inside[self._piece] + gain if self._piece in self.inside else gain
        self._before = self.report = None
