"""A step engine that hands every call on to the one inside: what wraps an engine overrides what it adds to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spare_megatron.config.engine_hooks import Outlet
from spare_megatron.trainer.engine import StepEngine

BatchSource = Callable[[int, Sequence[int]], Iterator[Any]]


class EvaluatesPieces(StepEngine, Protocol):
    """A step engine that can also run pieces forward only."""

    def evaluate(self, step: int, pieces: Sequence[int], source: BatchSource) -> Mapping[str, float]:
        """Sums of the loss function's values over ``pieces`` of ``source``; collective in the group."""


@dataclass
class PassThrough:
    """Same calls, same promises as the engine inside."""

    engine: EvaluatesPieces

    @property
    def on_piece(self) -> Any:
        """The engine's hook."""
        return self.engine.on_piece

    @on_piece.setter
    def on_piece(self, hook: Any) -> None:
        self.engine.on_piece = hook

    def begin_step(self, step: int) -> None:
        """As the engine's."""
        self.engine.begin_step(step)

    def run(self, step: int, pieces: Sequence[int], audits: Sequence[int] = (), compared: Collection[int] = ()) -> None:
        """As the engine's."""
        self.engine.run(step, pieces, audits, compared)

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        """As the engine's."""
        return self.engine.piece_checksums(audited)

    def leaving(self) -> Sequence[torch.Tensor] | None:
        """As the engine's."""
        return self.engine.leaving()

    def watch(self, outlet: Outlet) -> None:
        """As the engine's."""
        self.engine.watch(outlet)

    def bucket_fault(self, tensor: int, stop: int) -> str:
        """As the engine's."""
        return self.engine.bucket_fault(tensor, stop)

    def local_sum(self) -> Sequence[torch.Tensor]:
        """As the engine's."""
        return self.engine.local_sum()

    def scalars(self) -> Mapping[str, float]:
        """As the engine's."""
        return self.engine.scalars()

    def accumulators_fault(self) -> str:
        """As the engine's."""
        return self.engine.accumulators_fault()

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        """As the engine's."""
        return self.engine.result_fault(reduced)

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        """As the engine's."""
        return self.engine.result_digest(reduced, scalars)

    def weights_digest(self) -> str:
        """As the engine's."""
        return self.engine.weights_digest()

    def weights_checksums(self) -> Mapping[str, int]:
        """As the engine's."""
        return self.engine.weights_checksums()

    def evaluate(self, step: int, pieces: Sequence[int], source: BatchSource) -> Mapping[str, float]:
        """As the engine's."""
        return self.engine.evaluate(step, pieces, source)

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """As the engine's."""
        return self.engine.apply(step, reduced, scalars)
