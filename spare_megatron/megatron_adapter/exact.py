"""Exact gradient sums of one rank: fixed-point accumulators, their checksums, and the way back to floating point.

Each piece's gradient of each parameter is rounded once to int64 (:mod:`spare_megatron.megatron_adapter.scales` says
at which scale) and added; integers add exactly in any order, so it does not matter which group computed a piece, nor
when. Beside each parameter's accumulator runs the sum of its pieces' checksums, taken as they are added. The checksum
is linear, so that sum must be the checksum of the accumulator, and its sum over groups that of the reduced result.

Memory: the accumulator's storage (8 bytes an element) is that of megatron-core's fp32 gradient buffer, grown. While a
step adds, it is integers; once the step is committed, the accumulators are no longer needed and the fp32 gradient is
written into the same memory.

May assume: gradients come through :attr:`GroupDDP.accumulate`, once for each parameter and backward pass. Promises:
what :meth:`ExactGradients.tensors` gives depends on the *set* of pieces alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron import kernels
from spare_megatron.megatron_adapter.model import Replica
from spare_megatron.megatron_adapter.scales import Scales
from spare_megatron.megatron_adapter.world import GroupWorld

Flips = Callable[[str], bool]
"""``flips(point)``: whether an injected fault flips a bit here, now."""


@dataclass(frozen=True)
class _Slot:
    """Where one parameter's gradient lies."""

    name: str
    buffer: int
    start: int
    stop: int


class _Buffer:
    """One of megatron-core's gradient buffers, seen as integers."""

    def __init__(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        storage = gradient.untyped_storage()
        assert gradient.storage_offset() == 0, "the gradient buffer does not begin its storage"
        storage.resize_(8 * gradient.numel())
        self.gradient, self.group = gradient, group
        self.accumulator = torch.empty(0, dtype=torch.int64, device=gradient.device)
        self.accumulator.set_(storage, 0, (gradient.numel(),), (1,))
        self.summed = torch.empty_like(self.accumulator) if group.size() > 1 else None


class ExactGradients:
    """The accumulators of one rank. The methods are called in the order of a step; ``tensors`` is collective."""

    def __init__(self, replica: Replica, world: GroupWorld, flips: Flips) -> None:
        shape = world.shape
        self._buffers: list[_Buffer] = []
        self._slots: list[_Slot] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        for chunk in replica.chunks:
            names = {parameter: name for name, parameter in chunk.module.named_parameters()}
            for buffer in chunk.buffers:
                self._add(buffer, chunk.dp_cp_group, names)
            for buffer in chunk.expert_parallel_buffers:
                self._add(buffer, chunk.expt_dp_group, names)
            chunk.accumulate = self._accumulate
        per_token = replica.config.calculate_per_token_loss
        tokens = shape.micro_batch_size * replica.settings.seq_length // shape.context
        terms = shape.pieces * shape.inner_data * shape.context
        self.scales = Scales(len(self._slots), terms, (tokens - 1).bit_length() if per_token else 0)
        self._optimizer = replica.optimizer
        device = self._buffers[0].gradient.device if self._buffers else torch.device("cpu")
        self._reports = torch.zeros(len(self._slots), 2, dtype=torch.int64, device=device)
        self._exponents: list[int] = []
        self._loss_scale_bits = 0
        self._flips = flips
        self.begin_step()

    def _add(self, buffer: Any, group: dist.ProcessGroup, names: dict[torch.nn.Parameter, str]) -> None:
        for parameter, (start, stop, _) in sorted(buffer.param_index_map.items(), key=lambda item: item[1][0]):
            self._numbers[parameter] = len(self._slots)
            self._slots.append(_Slot(names[parameter], len(self._buffers), start, stop))
        self._buffers.append(_Buffer(buffer.grad_data, group))

    @property
    def state(self) -> dict[str, Any]:
        """What the next step's scales depend on: a run that resumes without it is exact too, with other roundings."""
        return {"names": [slot.name for slot in self._slots], "magnitudes": list(self.scales.magnitudes)}

    def restore(self, state: Any) -> None:
        """Take :attr:`state` of a checkpoint, unless it is of other tensors."""
        if state is not None and state["names"] == self.state["names"]:
            self.scales.magnitudes = list(state["magnitudes"])

    def begin_step(self) -> None:
        """No piece is inside; the scale is that of the committed state."""
        for buffer in self._buffers:
            buffer.accumulator.zero_()
        self._reports.zero_()
        loss_scale = float(self._optimizer.get_loss_scale().item())
        self._loss_scale_bits = math.ceil(math.log2(loss_scale))
        self._exponents = self.scales.exponents(self._loss_scale_bits)

    def _accumulate(self, parameter: torch.nn.Parameter) -> None:
        """Add the gradient that a backward pass left in ``parameter.grad``."""
        number = self._numbers[parameter]
        gradient = parameter.grad
        assert gradient is not None, f"{self._slots[number].name} has no gradient to add"
        flat = gradient.detach().contiguous().view(-1)
        if self._flips("gradient"):
            flip_bit(flat)
        slot = self._slots[number]
        kernels.accumulate(
            flat,
            self._buffers[slot.buffer].accumulator[slot.start : slot.stop],
            self._exponents[number],
            slot.start,
            self.scales.bound_bits,
            self._reports[number],
        )

    def tensors(self) -> list[torch.Tensor]:
        """The accumulators summed over context and inner data ranks, one for each buffer, and last the checksums that
        all of this must have (int64, one for each parameter). Collective in the group."""
        if self._slots and self._flips("accumulate"):
            flip_bit(self._buffers[0].accumulator[: self._slots[0].stop])
        checksums = self._reports[:, 0].clone()
        result = []
        for number, buffer in enumerate(self._buffers):
            if buffer.summed is None:
                result.append(buffer.accumulator)
                continue
            mine = [index for index, slot in enumerate(self._slots) if slot.buffer == number]
            part = checksums[mine[0] : mine[-1] + 1]
            dist.all_reduce(part, group=buffer.group)
            buffer.summed.copy_(buffer.accumulator)
            dist.all_reduce(buffer.summed, group=buffer.group)
            result.append(buffer.summed)
        return [*result, checksums]

    def flags(self) -> tuple[bool, bool]:
        """Whether a piece of this rank exceeded the bound, and whether one was not finite."""
        flags = self._reports[:, 1].tolist()
        return any(flag & kernels.OVERFLOW for flag in flags), any(flag & kernels.NOT_FINITE for flag in flags)

    def flagged(self) -> list[str]:
        """Names of the parameters that :meth:`flags` is about."""
        return [slot.name for slot, flag in zip(self._slots, self._reports[:, 1].tolist(), strict=True) if flag]

    def accumulators_fault(self) -> str:
        """Where the accumulators are not the sum of the pieces that went in; empty when they are."""
        return self._fault([buffer.accumulator for buffer in self._buffers], self._reports[:, 0], "accumulator")

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        """Where a reduced result (as :meth:`tensors`) is not the sum of all pieces; empty when it is."""
        if self._slots and self._flips("reduce"):
            flip_bit(reduced[0][: self._slots[0].stop])
        return self._fault(reduced[:-1], reduced[-1], "reduced result")

    def _fault(self, sums: Sequence[torch.Tensor], expected: torch.Tensor, what: str) -> str:
        found = torch.zeros(len(self._slots), 2, dtype=torch.int64, device=self._reports.device)
        for number, slot in enumerate(self._slots):
            kernels.checksum(sums[slot.buffer][slot.start : slot.stop], slot.start, found[number])
        wrong = (found[:, 0] != expected.to(found.device)).nonzero().flatten().tolist()
        if not wrong:
            return ""
        slot, more = self._slots[wrong[0]], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"the {what} of {slot.name}{more} does not have the checksum of its pieces"

    def finalize(self, reduced: Sequence[torch.Tensor], divisor: float) -> None:
        """Committed: sums / divisor into the fp32 gradients (over the accumulators), and the next step's scales."""
        device = self._reports.device
        norm = torch.zeros(1, dtype=torch.float64, device=device)
        peaks = torch.zeros(len(self._slots), dtype=torch.int64, device=device)
        for buffer in self._buffers:
            buffer.gradient.zero_()
        for number, slot in enumerate(self._slots):
            kernels.finalize(
                reduced[slot.buffer][slot.start : slot.stop],
                self._buffers[slot.buffer].gradient[slot.start : slot.stop],
                self._exponents[number],
                divisor,
                norm,
                peaks[number : number + 1],
            )
        self.scales.update(peaks.tolist(), self._exponents, self._loss_scale_bits)

    def spoil(self) -> None:
        """Make the gradients infinite, so that the optimizer's loss scaler skips this step and lowers its scale."""
        for buffer in self._buffers:
            buffer.gradient.fill_(math.inf)


def flip_bit(values: torch.Tensor) -> None:
    """Flip one bit of the middle element, as a cosmic ray would: injected faults only."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.view(integer)
    bits[bits.numel() // 2] ^= 1 << (8 * values.element_size() - 10)
