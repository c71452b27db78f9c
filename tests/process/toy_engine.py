"""A small model behind the step interface: real gradients, a real two-stage pipeline over gloo, no megatron.

Protocol tests spend their time on failures instead of on imports: a rank starts in about a second. Gradients are
rounded to multiples of 2^-12 and stay far below 2^12 in sum, so fp32 adds them exactly in any order and the final
weights of a run with failures must *equal* those of the run without.

The model: every rank of a group holds one weight matrix; activations go through the ranks one after the other, the
gradient comes back. Ranks exchange them with send and recv inside the group's own world, so ranks of a group that
disagree about what to run hang, as they would in a pipeline.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WIDTH, SAMPLES, GRID, LEARNING_RATE = 32, 4, 2.0**12, 0.05


class ToyEngine:
    """One rank of a group of ``size`` ranks."""

    def __init__(
        self,
        position: int,
        size: int,
        num_groups: int,
        pieces_per_shard: int,
        piece_s: float,
        width: int = WIDTH,
        seed: int = 1,
    ) -> None:
        self.position, self.size = position, size
        self.num_groups, self.pieces_per_shard = num_groups, pieces_per_shard
        self.piece_s, self.width = piece_s, width
        generator = torch.Generator().manual_seed(seed * 1000 + position)
        self.weights = torch.randn(width, width, generator=generator) / width**0.5
        self.momentum = torch.zeros(width, width)
        self.accumulator = torch.zeros(width * width)
        self.loss_sum, self.inside, self.zeroed = 0.0, 0, 0
        self.on_piece: Callable[[str, int], None] = lambda phase, n: None

    def begin_step(self, step: int) -> None:
        self.accumulator.zero_()
        self.loss_sum, self.inside = 0.0, 0

    def run(self, step: int, pieces: Sequence[int]) -> None:
        for n, piece in enumerate(pieces):
            self._piece(step, piece, n)

    def _piece(self, step: int, piece: int, n: int) -> None:
        self.on_piece("forward", n)
        x = self._input(step, piece)
        x.requires_grad_()
        y = torch.tanh(x @ self.weights.requires_grad_())
        if self.piece_s:
            time.sleep(self.piece_s)
        if self.position == self.size - 1:
            loss = (y - 0.5).square().mean()
            self.loss_sum += round(loss.item() * GRID) / GRID
            loss.backward()
        else:
            dist.send(y.detach(), self.position + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.position + 1)
            y.backward(gradient)
        if self.position:
            assert x.grad is not None
            dist.send(x.grad, self.position - 1)
        assert self.weights.grad is not None
        self.accumulator += (self.weights.grad * GRID).round().flatten() / GRID
        self.weights.grad = None
        self.inside += 1
        self.on_piece("backward", n)

    def _input(self, step: int, piece: int) -> torch.Tensor:
        if self.position:
            x = torch.empty(SAMPLES, self.width)
            dist.recv(x, self.position - 1)
            return x
        generator = torch.Generator().manual_seed(step * 1_000_003 + piece)
        return torch.randn(SAMPLES, self.width, generator=generator)

    def local_sum(self) -> Sequence[torch.Tensor]:
        return [self.accumulator]

    def scalars(self) -> Mapping[str, float]:
        return {"loss": self.loss_sum, "pieces": float(self.inside)}

    def accumulators_fault(self) -> str:
        return ""

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        return ""

    def weights_digest(self) -> str:
        return self.digest()

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        total = self.num_groups * self.pieces_per_shard
        assert scalars["pieces"] == total, f"{scalars['pieces']} pieces were summed, {total} are a batch"
        with torch.no_grad():
            self.momentum.mul_(0.9).add_(reduced[0].view_as(self.weights) / total)
            self.weights.sub_(self.momentum, alpha=LEARNING_RATE)
        if self.position != self.size - 1:
            return {}
        norm = reduced[0].norm().item() / total
        return {"lm loss": scalars["loss"] / total, "grad_norm": norm, "lr": LEARNING_RATE, "tokens": total}

    def digest(self) -> str:
        """Of weights and momentum, bit for bit."""
        with torch.no_grad():
            data = torch.cat([self.weights.flatten(), self.momentum.flatten()]).numpy().tobytes()
        return hashlib.sha256(data).hexdigest()[:16]

    def save(self, directory: Path) -> None:
        """This rank's state; every rank of the group calls it."""
        torch.save({"weights": self.weights.detach(), "momentum": self.momentum}, directory / f"rank{self.position}.pt")

    def load(self, directory: Path) -> None:
        """The state that :meth:`save` wrote."""
        state = torch.load(directory / f"rank{self.position}.pt")
        self.weights, self.momentum = state["weights"], state["momentum"]
