"""An engine of one's own: trains any torch module with any torch optimizer in the fault-tolerant step loop.

The loop decides which pieces of a step this group computes, sums gradients over the groups that are alive and says when
a step is committed. An engine is the part that knows the model; ``spare_megatron/worker/engine.py`` says what each
method promises. This one has a whole replica on each rank, so a group is one rank and no method calls a collective.
Gradients are summed in fp32: after a failure weights equal those of the failure-free run up to rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from spare_megatron.config.engine_hooks import Outlet, PieceHook
from spare_megatron.protocol.tickets import Tickets

LossOf = Callable[[int, int], torch.Tensor]
"""The loss of a piece of a step, summed over its samples: ``loss_of(step, piece)``. It must depend on its arguments
alone, because any group may compute any piece, also a second time after a failure."""


class TorchEngine:
    """Implements :class:`spare_megatron.worker.engine.StepEngine`."""

    on_piece: PieceHook | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, loss_of: LossOf, samples_per_step: int) -> None:
        """``samples_per_step``: samples of the whole batch, by which summed losses and gradients are divided."""
        self.optimizer, self.loss_of, self.samples_per_step = optimizer, loss_of, samples_per_step
        self.parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.sums = torch.zeros(sum(one.numel() for one in self.parameters))
        self.loss_sum, self.applied = 0.0, 0
        self._make_optimizer_state()

    def begin_step(self, step: int) -> None:
        self.sums.zero_()
        self.loss_sum = 0.0

    def run(self, step: int, tickets: Tickets) -> None:
        for number, ticket in enumerate(tickets):
            self._hook("forward", number)
            loss = self.loss_of(step, ticket.piece)
            self.sums += _flat(torch.autograd.grad(loss, self.parameters))
            self.loss_sum += loss.item()
            self._hook("backward", number)

    def local_sum(self) -> Sequence[torch.Tensor]:
        return [self.sums]

    def scalars(self) -> Mapping[str, float]:
        return {"loss": self.loss_sum}

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        mean, start = reduced[0] / self.samples_per_step, 0
        for parameter in self.parameters:
            parameter.grad = mean[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.applied = step
        return {
            "lm loss": scalars["loss"] / self.samples_per_step,
            "grad_norm": mean.norm().item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens": self.samples_per_step,
        }

    # A group that comes back gets these from groups that are alive.

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        tensors = {}
        for number, parameter in enumerate(self.parameters):
            tensors[f"parameter {number}"] = parameter.detach()
            for name, value in _tensors(self.optimizer.state[parameter]):
                tensors[f"{name} of parameter {number}"] = value
        return tensors

    def state_values(self) -> Mapping[str, Any]:
        return {"applied": self.applied}

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        self.applied = step

    # Digests: results and weights must be equal on all groups, or the group that differs is fenced.

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        return _sha256(reduced).hexdigest()

    def weights_digest(self) -> str:
        return _sha256(self.parameters).hexdigest()

    def weights_checksums(self) -> Mapping[str, int]:
        return {
            f"parameter {number}": int.from_bytes(_sha256([one]).digest()[:8], "little", signed=True)
            for number, one in enumerate(self.parameters)
        }

    # What this engine leaves out: overlapping, fixed-point sums, checksums of pieces (jobs without --spare-audit-rate).

    def leaving(self) -> None:
        return None

    def watch(self, outlet: Outlet) -> None:
        pass

    def conversion(self) -> None:
        return None

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        return {}

    def accumulators_fault(self, *, suspected: bool) -> str:
        return ""

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        return ""

    def _hook(self, phase: str, number: int) -> None:
        if self.on_piece is not None:
            self.on_piece(phase, number)

    def _make_optimizer_state(self) -> None:
        """torch makes it at the first update, but a group must have it before, to take over that of another."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            for _, value in _tensors(state):
                value.zero_()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _tensors(state: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.flatten() for one in tensors])


def _sha256(tensors: Iterable[torch.Tensor]) -> Any:
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().contiguous().numpy().tobytes())
    return found
