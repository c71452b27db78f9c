"""A step engine that passes every call on to another one: a base for engines that add something to some of the
calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spare_megatron.collectives.converting import Conversion
from spare_megatron.config.engine_hooks import Outlet
from spare_megatron.protocol.tickets import Tickets
from spare_megatron.worker.engine import EngineRow, StepEngine, is_row, rows_of

BatchSource = Callable[[int, Sequence[int]], Iterator[Any]]
"""``source(step, pieces)``: an iterator over the microbatches of these pieces."""


class EvaluatesPieces(StepEngine, Protocol):
    """A step engine that can also run pieces forward only."""

    def evaluate(self, step: int, pieces: Sequence[int], source: BatchSource) -> Mapping[str, float]:
        """The loss function's values, summed over ``pieces`` of ``source``. Collective in the group."""


@dataclass
class PassThrough:
    """Passes every call on to :attr:`engine`, and keeps its promises."""

    engine: EvaluatesPieces

    @property
    def on_piece(self) -> Any:
        """The hook that the engine calls around each piece."""
        return self.engine.on_piece

    @on_piece.setter
    def on_piece(self, hook: Any) -> None:
        self.engine.on_piece = hook

    @property
    def sums(self) -> int:
        """How many tensors the engine sums, where it is a row itself."""
        return rows_of(self.engine)[0].sums

    def rows(self) -> Sequence[EngineRow]:
        """The engine's rows; a single one is this engine."""
        return (self,) if is_row(self.engine) else rows_of(self.engine)

    def begin_step(self, step: int) -> None:
        self.engine.begin_step(step)

    def run(self, step: int, tickets: Tickets) -> None:
        self.engine.run(step, tickets)

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        return self.engine.piece_checksums(audited)

    def leaving(self) -> Sequence[torch.Tensor] | None:
        return self.engine.leaving()

    def watch(self, outlet: Outlet) -> None:
        self.engine.watch(outlet)

    def local_sum(self) -> Sequence[torch.Tensor]:
        return self.engine.local_sum()

    def conversion(self) -> Conversion | None:
        return self.engine.conversion()

    def scalars(self) -> Mapping[str, float]:
        return self.engine.scalars()

    def accumulators_fault(self, *, suspected: bool) -> str:
        return self.engine.accumulators_fault(suspected=suspected)

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        return self.engine.result_fault(reduced)

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        return self.engine.result_digest(reduced, scalars)

    def weights_digest(self) -> str:
        return self.engine.weights_digest()

    def weights_checksums(self) -> Mapping[str, int]:
        return self.engine.weights_checksums()

    def evaluate(self, step: int, pieces: Sequence[int], source: BatchSource) -> Mapping[str, float]:
        return self.engine.evaluate(step, pieces, source)

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        return self.engine.apply(step, reduced, scalars)

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.engine.state_tensors()

    def state_values(self) -> Mapping[str, Any]:
        return self.engine.state_values()

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        self.engine.adopt_state(step, values)
