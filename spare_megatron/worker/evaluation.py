"""Evaluation that survives a death: it is computed with the pieces of the next step and summed in its reduction.

Evaluation of state t is due when t is a multiple of ``--eval-interval``. The host of piece p evaluates p's share of
every evaluation batch on state t before it trains p in step t + 1; the sums travel in that step's scalar bucket. So
each share counts exactly once, a dead group's shares are patched like its gradients, and the value does not depend on
which group computed what. After the last step one more round, ``train_iters + 1``, has evaluation and no training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spare_megatron.protocol.tickets import KnownTickets, Tickets
from spare_megatron.worker.engine_decorator import BatchSource, PassThrough


@dataclass(frozen=True)
class Evaluation:
    """One pass over ``iterations`` batches of one data set."""

    name: str
    """'validation' or 'test'."""
    iterations: int
    source: Callable[[int, int], BatchSource]
    """``source(state, iteration)``: the source of the microbatches of batch ``iteration`` in the evaluation of
    ``state``."""


@dataclass
class EvaluatingEngine(PassThrough):
    """A step engine that evaluates pieces before it trains them, at the steps where an evaluation is due."""

    train_iters: int
    interval: int | None
    during: Sequence[Evaluation]
    """The passes at multiples of ``interval``; as in Megatron, validation."""
    at_end: Sequence[Evaluation]
    """The passes after the last step; as in Megatron, validation and test."""
    average: Callable[[Mapping[str, float]], Mapping[str, float]]
    """Turns the committed sums of a pass into the values that are logged."""
    _sums: dict[str, float] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """The number of the last step that is committed. Where something is evaluated after the last training step, it
        is one more, for a round without training."""
        return self.train_iters + (1 if self.at_end else 0)

    def passes_before(self, step: int) -> Sequence[Evaluation]:
        """The passes that are evaluated with the pieces of ``step``, on the state before it."""
        if step > self.train_iters:
            return self.at_end
        state = step - 1
        return self.during if self.interval and state and state % self.interval == 0 else ()

    def begin_step(self, step: int) -> None:
        """Forget the evaluation's sums and zero the engine's accumulators."""
        self._sums.clear()
        self.engine.begin_step(step)

    def run(self, step: int, tickets: Tickets) -> None:
        """Evaluate these pieces where that is due, then train them. Evaluations are not audited. Where one is due, all
        tickets are taken before it."""
        if not self.passes_before(step) and step <= self.train_iters:
            self.engine.run(step, tickets)
            return
        taken = list(tickets)
        pieces = [ticket.piece for ticket in taken if not ticket.audited]
        for which in self.passes_before(step):
            for iteration in range(which.iterations):
                sums = self.engine.evaluate(step, pieces, which.source(step - 1, iteration))
                for key, value in sums.items():
                    name = f"{which.name}:{key}"
                    self._sums[name] = self._sums.get(name, 0.0) + value
                self._tell("evaluate", iteration)
        if step <= self.train_iters:
            self.engine.run(step, KnownTickets(taken))
            return
        for n in range(len(pieces)):
            self._tell("backward", n)

    def _tell(self, phase: str, n: int) -> None:
        if self.engine.on_piece is not None:
            self.engine.on_piece(phase, n)

    def scalars(self) -> Mapping[str, float]:
        """The engine's sums and those of the evaluation."""
        return {**self.engine.scalars(), **self._sums}

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """Apply the engine's update; returns its report and the committed values of the evaluation."""
        trained = {key: value for key, value in scalars.items() if ":" not in key}
        report = dict(self.engine.apply(step, reduced, trained)) if step <= self.train_iters else {}
        for which in self.passes_before(step):
            head = f"{which.name}:"
            values = {key.removeprefix(head): value for key, value in scalars.items() if key.startswith(head)}
            report[which.name] = dict(self.average(values))
        return report
