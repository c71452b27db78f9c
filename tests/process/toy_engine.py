"""A small model behind the step interface: real gradients, a real two-stage pipeline over gloo, no megatron.

Protocol tests spend their time on failures instead of on imports: a rank starts in about a second. Gradients are
rounded to multiples of 2^-12 and stay far below 2^12 in sum, so fp32 adds them exactly in any order and the final
weights of a run with failures must *equal* those of the run without.

The model: every rank of a group holds some weight matrices; activations go through the ranks one after the other, the
gradient comes back. Pieces that 3 divides leave out the second matrix, as experts without tokens are left out. Ranks
exchange activations with send and recv inside the group's own world, so ranks of a group that disagree about what to
run hang, as they would in a pipeline.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.checkpoint.files import Create
from spare_megatron.checkpoint.folder import step_of
from spare_megatron.config.engine_hooks import Outlet
from spare_megatron.control_plane.reports import checksum_of
from spare_megatron.megatron_adapter.model.gradient_readiness import Arrivals, Span
from spare_megatron.protocol.tickets import KnownTickets, Tickets
from spare_megatron.worker.engine import EngineRow

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
        layers: int = 1,
        layer_s: float = 0.0,
        joins: bool = False,
        seed: int = 1,
        flips: Callable[[str, int, int], bool] = lambda point, step, n: False,
        slowness: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        """``layer_s``: what the backward of one matrix takes longer; ``joins``: pieces that come late are computed in
        the run that is under way; ``flips``, ``slowness``: as of ``worker.fault_injection.Injector``."""
        self.position, self.size = position, size
        self.num_groups, self.pieces_per_shard = num_groups, pieces_per_shard
        self.piece_s, self.width, self.layer_s, self.joins = piece_s, width, layer_s, joins
        generator = torch.Generator().manual_seed(seed * 1000 + position)
        self.weights = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(layers)]
        self.momenta = [torch.zeros(width, width) for _ in range(layers)]
        self.accumulators = [torch.zeros(width * width) for _ in range(layers)]
        """In the order of the backward pass: that of the last matrix first."""
        self.arrivals = Arrivals([Span(n, width * width, 0) for n in range(layers)])
        for layer, weights in enumerate(self.weights):
            weights.requires_grad_().register_post_accumulate_grad_hook(partial(self._add, layers - 1 - layer))
        self.step, self.applied, self.last = 0, 0, False
        self.flips, self.n, self.audited = flips, 0, False
        self.slowness = slowness
        self.found: dict[str, int] = {}
        """Of the piece that is computed: matrix -> checksum of its gradient."""
        self.kept: dict[bool, dict[int, dict[str, int]]] = {False: {}, True: {}}
        self.loss_sum, self.inside = 0.0, 0
        self.on_piece: Callable[[str, int], None] = lambda phase, n: None

    bad_step = 0

    def begin_step(self, step: int) -> None:
        if step == self.bad_step:
            raise ValueError(f"record 17 of step {step} is no text")
        for accumulator in self.accumulators:
            accumulator.zero_()
        self.step, self.loss_sum, self.inside = step, 0.0, 0
        self.kept = {False: {}, True: {}}

    def run(self, step: int, tickets: Tickets) -> None:
        counts, taken = {True: 0, False: 0}, tickets if self.joins else KnownTickets(tickets)
        for ticket in taken:
            self.last = not self.joins and not taken.ahead()
            self._one(step, ticket.piece, counts[ticket.audited], ticket.audited)
            counts[ticket.audited] += 1
            if ticket.audited or ticket.compared:
                self.kept[ticket.audited][ticket.piece] = self.found

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        return self.kept[audited]

    def _one(self, step: int, piece: int, n: int, audited: bool) -> None:
        self.found, self.n, self.audited = {}, n, audited
        self.on_piece("audit" if audited else "forward", n)
        loss = self._piece(step, piece)
        if not audited:
            self.loss_sum += loss
            self.inside += 1
        self.on_piece("audit" if audited else "backward", n)

    def _piece(self, step: int, piece: int) -> float:
        """Forward and backward; the loss, 0 but for the last rank."""
        x = self._input(step, piece)
        x.requires_grad_()
        y = x
        for layer, weights in enumerate(self.weights):
            if layer != 1 or piece % 3:
                y = torch.tanh(y @ weights)
        if self.piece_s:
            time.sleep(self.piece_s * self.slowness(step))
        value = 0.0
        if self.position == self.size - 1:
            loss = (y - 0.5).square().mean()
            value = round(loss.item() * GRID) / GRID
            self._backward(loss)
        else:
            self._send(y.detach(), self.position + 1)
            gradient = torch.empty_like(y)
            self._receive(gradient, self.position + 1)
            self._backward((y * gradient).sum())  # torch imports sympy (0.5 s) for y.backward(gradient)
        if self.position:
            assert x.grad is not None
            self._send(x.grad, self.position - 1)
        return value

    def _send(self, tensor: torch.Tensor, position: int) -> None:
        dist.send(tensor, position)

    def _receive(self, tensor: torch.Tensor, position: int) -> None:
        dist.recv(tensor, position)

    def _backward(self, loss: torch.Tensor) -> None:
        self.arrivals.pass_begins(0, last=self.last)
        loss.backward()
        self.arrivals.pass_ends(0)

    def _add(self, number: int, weights: torch.Tensor) -> None:
        """Called by autograd when the gradient of a matrix is there."""
        assert weights.grad is not None
        rounded = (weights.grad * GRID).round().flatten() / GRID
        weights.grad = None
        if not self.audited and self.flips("gradient", self.step, self.n):
            rounded[0] += 1.0
        self.found[f"matrix {number}"] = checksum_of(rounded.numpy().tobytes().hex())
        if not self.audited:
            self.accumulators[number] += rounded
        if self.layer_s:
            if self.last:
                print(f"step {self.step}: matrix {number} of the last pass", file=sys.stderr, flush=True)
            time.sleep(self.layer_s * (self.slowness(self.step) if self.last else 1.0))
        self.arrivals.arrived(number)

    def _input(self, step: int, piece: int) -> torch.Tensor:
        if self.position:
            x = torch.empty(SAMPLES, self.width)
            self._receive(x, self.position - 1)
            return x
        generator = torch.Generator().manual_seed(step * 1_000_003 + piece)
        return torch.randn(SAMPLES, self.width, generator=generator)

    def leaving(self) -> Sequence[torch.Tensor]:
        return self.accumulators

    def watch(self, outlet: Outlet) -> None:
        def late(number: int) -> None:
            outlet.spoil(f"matrix {number} came late")

        self.arrivals.watch(outlet.ready, late)

    def local_sum(self) -> Sequence[torch.Tensor]:
        self.arrivals.unwatch()
        if self.layer_s:
            print(f"step {self.step}: all is computed", file=sys.stderr, flush=True)
        return self.accumulators

    @property
    def sums(self) -> int:
        return len(self.accumulators)

    def rows(self) -> Sequence[EngineRow]:
        return (self,)

    def conversion(self) -> None:
        return None

    def scalars(self) -> Mapping[str, float]:
        return {"loss": self.loss_sum, "pieces": float(self.inside)}

    def accumulators_fault(self, *, suspected: bool) -> str:
        return ""

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        """Has no checksums: a flipped bit is found by comparing groups."""
        if self.flips("reduce", self.step, 0):
            reduced[0][0] += 1.0
        return ""

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        return hashlib.sha256(b"".join(one.numpy().tobytes() for one in reduced)).hexdigest()

    def weights_digest(self) -> str:
        return self.digest()

    def weights_checksums(self) -> Mapping[str, int]:
        with torch.no_grad():
            return {str(n): checksum_of(str(one.numpy().tobytes())) for n, one in enumerate(self.weights)}

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        total = self.num_groups * self.pieces_per_shard
        assert step == self.applied + 1, f"step {step} is applied to the state after step {self.applied}"
        self.applied = step
        assert scalars["pieces"] == total, f"{scalars['pieces']} pieces were summed, {total} are a batch"
        with torch.no_grad():
            for weights, momentum, gradient in zip(self.weights, self.momenta, reversed(reduced), strict=True):
                momentum.mul_(0.9).add_(gradient.view_as(weights) / total)
                weights.sub_(momentum, alpha=LEARNING_RATE)
        if self.position != self.size - 1:
            return {}
        norm = reduced[0].norm().item() / total
        return {"lm loss": scalars["loss"] / total, "grad_norm": norm, "lr": LEARNING_RATE, "tokens": total}

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        weights = {f"weights {n}": one.detach() for n, one in enumerate(self.weights)}
        return {**weights, **{f"momentum {n}": one for n, one in enumerate(self.momenta)}}

    def state_values(self) -> Mapping[str, Any]:
        return {"applied": self.applied}

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        assert values["applied"] == step, f"the state after step {values['applied']} is given as that after {step}"
        self.applied = step

    def digest(self) -> str:
        """Of weights and momentum, bit for bit."""
        with torch.no_grad():
            data = torch.cat([one.flatten() for one in (*self.weights, *self.momenta)]).numpy().tobytes()
        return hashlib.sha256(data).hexdigest()[:16]

    def share(self) -> ToyShare:
        """This rank's state for a checkpoint, copied."""
        state = {
            "weights": [one.detach().clone() for one in self.weights],
            "momenta": [one.clone() for one in self.momenta],
        }
        return ToyShare(f"rank{self.position}.pt", state)

    def load(self, directory: Path) -> None:
        """The state that :class:`ToyShare` wrote."""
        state = torch.load(directory / f"rank{self.position}.pt")
        with torch.no_grad():
            for mine, loaded in zip(self.weights, state["weights"], strict=True):
                mine.copy_(loaded)
        self.momenta = state["momenta"]
        self.applied = step_of(directory)


@dataclass
class ToyShare:
    """One rank's part of a checkpoint: a file for each rank, and one that says how many."""

    name: str
    state: dict[str, list[torch.Tensor]]
    write_s: float = 0.0
    """How much longer its file takes."""

    def write(self, create: Create) -> bytes:
        with create(self.name) as file:
            time.sleep(self.write_s / 2)
            torch.save(self.state, file)
            time.sleep(self.write_s / 2)
        return self.name.encode()

    def finish(self, create: Create, reports: Sequence[bytes]) -> None:
        with create("names.txt") as file:
            file.write(b"\n".join(reports))
