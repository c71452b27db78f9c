"""The integer formats of exact sums, behind one interface.

A format turns gradients into integers and sums of integers into gradients, and keeps the scales, which depend on
committed sums alone. It has no accumulators of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spare_megatron import kernels
from spare_megatron.exact_sum import block_scales
from spare_megatron.exact_sum.block_scales import BlockScales
from spare_megatron.exact_sum.scales import GROWTH_BITS, Scales

FLOAT_MAX = torch.finfo(torch.float32).max


class Add(Protocol):
    """Adds rounded gradients of one slot to its accumulator. They have the slot's size and any shape."""

    def __call__(self, gradient: torch.Tensor, other: torch.Tensor | None, *, apart: bool, first: bool) -> None:
        """Add ``gradient``; with an ``other`` one the fp32 sum of both, or, where they are ``apart``, each of them.
        ``first``: the accumulator counts as 0."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's gradient: elements ``start`` to ``stop`` of buffer number ``buffer``."""

    name: str
    buffer: int
    start: int
    stop: int
    index: int
    """Index of its first element in the index space of checksums and blocks: a multiple of 1024, so that no block is
    shared with another parameter."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Format(Protocol):
    """An integer format. In each step its methods are called in the order in which they stand here, and between
    ``begin_step`` and ``finalize`` what :meth:`adder` returned, which is for all steps."""

    dtype: torch.dtype
    """dtype of accumulators and sums."""
    growth_bits: int
    """A piece is flagged when its largest element exceeds 2^growth_bits times that of the last sum."""

    @property
    def measuring(self) -> bool:
        """Whether the step in flight only measures scales: its sums are too coarse to be applied."""

    @property
    def state(self) -> Any:
        """All that the next step's scales depend on; it can be pickled."""

    def restore(self, state: Any) -> None:
        """Go on from a :attr:`state`."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of :attr:`state`, in the format's own memory; the same until :meth:`commit`."""

    @property
    def values(self) -> Any:
        """The rest of :attr:`state`; JSON."""

    def adopt(self, values: Any) -> None:
        """Go on from other :attr:`values`, with what has been written into :attr:`tensors`."""

    def adder(self, number: int, accumulator: torch.Tensor, report: torch.Tensor) -> Add:
        """A function that adds gradients of slot ``number`` to ``accumulator``, their checksums and flags to
        ``report``, with the scales of the step in flight."""

    def begin_step(self, loss_scale_bits: int) -> None:
        """Choose the scales of a step whose loss is multiplied by 2^loss_scale_bits."""

    def finalize(self, number: int, total: torch.Tensor, gradient: torch.Tensor, divisor: float) -> None:
        """Set ``gradient`` to the sum ``total`` of slot ``number`` / ``divisor``; note the largest element of the
        sum."""

    def agree(self, slots: Sequence[int], group: dist.ProcessGroup) -> None:
        """All-reduce (maximum) what :meth:`finalize` noted of ``slots`` over ``group``, whose ranks each finalized a
        part of them."""

    def infinite(self, divisor: float) -> bool:
        """Whether a sum finalized in this step, divided by ``divisor``, exceeds fp32. Waits for the device."""

    def commit(self, overflows: bool) -> None:
        """Take the finalized sums of all slots into the scales; ``overflows``: a piece of the step exceeded its
        bound."""


class Int64:
    """int64 with a scale for each tensor: 8 bytes per element, never less accurate than fp32 addition."""

    dtype = torch.int64
    growth_bits = GROWTH_BITS
    measuring = False

    def __init__(self, slots: Sequence[Slot], terms: int, unit_bits: int, device: torch.device) -> None:
        """See :class:`Scales`."""
        self._slots = slots
        self.scales = Scales(len(slots), terms, unit_bits)
        self._exponents: list[int] = []
        self._loss_scale_bits = 0
        self._peaks = torch.zeros(len(slots), dtype=torch.int64, device=device)

    @property
    def state(self) -> list[int | None]:
        return list(self.scales.magnitudes)

    def restore(self, state: Any) -> None:
        self.scales.magnitudes = list(state)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    @property
    def values(self) -> list[int | None]:
        return self.state

    def adopt(self, values: Any) -> None:
        self.restore(values)

    def adder(self, number: int, accumulator: torch.Tensor, report: torch.Tensor) -> Add:
        one = kernels.Adder(accumulator, self._slots[number].index, self.scales.bound_bits, report)

        def add(gradient: torch.Tensor, other: torch.Tensor | None, *, apart: bool, first: bool) -> None:
            one.add(gradient, self._exponents[number], other, apart=apart, first=first)

        return add

    def begin_step(self, loss_scale_bits: int) -> None:
        self._loss_scale_bits = loss_scale_bits
        self._exponents = self.scales.exponents(loss_scale_bits)
        self._peaks.zero_()

    def finalize(self, number: int, total: torch.Tensor, gradient: torch.Tensor, divisor: float) -> None:
        peak = self._peaks[number : number + 1]
        kernels.finalize(total, gradient, self._exponents[number], divisor, peak)

    def agree(self, slots: Sequence[int], group: dist.ProcessGroup) -> None:
        dist.all_reduce(self._peaks[slots[0] : slots[-1] + 1], op=dist.ReduceOp.MAX, group=group)

    def infinite(self, divisor: float) -> bool:
        sizes = (math.ldexp(peak, -e) for peak, e in zip(self._peaks.tolist(), self._exponents, strict=True))
        return any(size > FLOAT_MAX * abs(divisor) for size in sizes)

    def commit(self, overflows: bool) -> None:
        self.scales.update(self._peaks.tolist(), self._exponents, self._loss_scale_bits)


class Int32:
    """int32 with a scale for each block of 1024 elements: as much memory and traffic as fp32."""

    dtype = torch.int32
    growth_bits = block_scales.GROWTH_BITS

    def __init__(self, slots: Sequence[Slot], terms: int, unit_bits: int, device: torch.device) -> None:
        """See :class:`BlockScales`."""
        blocks = [-(-slot.size // kernels.BLOCK) for slot in slots]
        self.scales = BlockScales(blocks, terms, unit_bits, device)
        firsts = [slot.index // kernels.BLOCK for slot in slots]
        self._slots = slots
        self._blocks = [slice(first, first + number) for first, number in zip(firsts, blocks, strict=True)]
        self._loss_scale_bits = 0
        self._exponents = self.scales.exponents(0)
        self._peaks = torch.zeros(sum(blocks), dtype=torch.int32, device=device)

    @property
    def measuring(self) -> bool:
        return self.scales.measuring

    @property
    def state(self) -> dict[str, Any]:
        return {"steps": self.scales.steps, "blocks": self.scales.magnitudes.cpu()}

    def restore(self, state: Any) -> None:
        self.scales.steps = state["steps"]
        self.scales.magnitudes = state["blocks"].to(self._peaks.device)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"blocks": self.scales.magnitudes}

    @property
    def values(self) -> dict[str, int]:
        return {"steps": self.scales.steps}

    def adopt(self, values: Any) -> None:
        self.scales.steps = values["steps"]

    def adder(self, number: int, accumulator: torch.Tensor, report: torch.Tensor) -> Add:
        one = kernels.Adder(accumulator, self._slots[number].index, self.scales.bound_bits, report)
        blocks = self._blocks[number]

        def add(gradient: torch.Tensor, other: torch.Tensor | None, *, apart: bool, first: bool) -> None:
            one.add(gradient, self._exponents[blocks], other, apart=apart, first=first)

        return add

    def begin_step(self, loss_scale_bits: int) -> None:
        self._loss_scale_bits = loss_scale_bits
        self._exponents = self.scales.exponents(loss_scale_bits)
        self._peaks.zero_()

    def finalize(self, number: int, total: torch.Tensor, gradient: torch.Tensor, divisor: float) -> None:
        blocks, index = self._blocks[number], self._slots[number].index
        kernels.finalize32(total, gradient, self._exponents[blocks], divisor, self._peaks[blocks], index)

    def agree(self, slots: Sequence[int], group: dist.ProcessGroup) -> None:
        raise AssertionError("exact32 has no distributed optimizer: settings refuse it, as no block may be split")

    def infinite(self, divisor: float) -> bool:
        sizes = torch.ldexp(self._peaks.double(), -self._exponents)
        return bool((sizes > FLOAT_MAX * abs(divisor)).any())

    def commit(self, overflows: bool) -> None:
        self.scales.update(self._peaks, self._exponents, self._loss_scale_bits, overflows)
