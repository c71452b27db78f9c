"""The integer formats of exact sums, behind one interface.

A format turns gradients into integers, says what these stand for, and keeps the scales, which depend on committed sums
alone. It has no accumulators of its own. What the sums become has been converted to fp32 before
(:mod:`spare_megatron.exact_sum.sum_conversion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from spare_megatron import kernels
from spare_megatron.exact_sum import block_scales
from spare_megatron.exact_sum.block_scales import BlockScales
from spare_megatron.exact_sum.scales import GROWTH_BITS, Scales

FLOAT_MAX = torch.finfo(torch.float32).max
INFINITY_BITS = 0x7F800000
"""Of infinity in fp32."""


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


class ScalesState(NamedTuple):
    """What the next step's scales depend on."""

    common: Any
    """The same on all ranks of the group."""
    slots: Sequence[Any]
    """Of each slot what only its own sums have determined."""


class Format(Protocol):
    """An integer format. In each step its methods are called in the order in which they stand here, and between
    ``begin_step`` and the first use of ``peaks`` what :meth:`adder` returned, which is for all steps."""

    dtype: torch.dtype
    """dtype of accumulators and sums."""
    growth_bits: int
    """A piece is flagged when its largest element exceeds 2^growth_bits times that of the last sum."""

    @property
    def measuring(self) -> bool:
        """Whether the step in flight only measures scales: its sums are too coarse to be applied."""

    @property
    def state(self) -> ScalesState:
        """All that the next step's scales depend on; it can be pickled."""

    def restore(self, state: ScalesState) -> None:
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

    @property
    def exponents(self) -> torch.Tensor:
        """The exponent of each block of the index space, int16: an integer x counts as x / 2^exponent. One tensor for
        all steps, in which each step writes its own."""

    @property
    def peaks(self) -> SumPeaks:
        """Takes note of the sums of the step."""

    def commit(self, overflows: bool) -> None:
        """Take the finalized sums of all slots into the scales; ``overflows``: a piece of the step exceeded its
        bound."""


class SumPeaks:
    """Divides sums into gradients and notes the largest element of each block of the index space."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self._bits = torch.zeros(blocks, dtype=torch.int32, device=device)
        """Of non-negative fp32 numbers, whose bits are ordered as they are."""

    def begin_step(self) -> None:
        """Forget the sums of the step before."""
        self._bits.zero_()

    def finalizer(self, segments: torch.Tensor) -> kernels.Finalizer:
        """What divides the sums of one tensor into gradients and notes their size; ``segments`` say where the parts of
        slots are (:class:`~spare_megatron.kernels.Finalizer`)."""
        return kernels.Finalizer(segments, self._bits)

    def agree(self, slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
        """All-reduce (maximum) what was noted of ``slots``, which are neighbours, over ``group``, whose ranks each
        finalized a part of them."""
        last = slots[-1]
        blocks = slice(slots[0].index // kernels.BLOCK, _blocks(last.index + last.size))
        dist.all_reduce(self._bits[blocks], op=dist.ReduceOp.MAX, group=group)

    def infinite(self, divisor: float) -> bool:
        """Whether a sum of the step, or it divided by ``divisor``, exceeds fp32. Waits for the device."""
        return bool((self._bits.view(torch.float32).double() > FLOAT_MAX * abs(divisor)).any())

    @property
    def sizes(self) -> torch.Tensor:
        """The largest magnitude of each block's sum, float32; what exceeds fp32 counts as its largest number."""
        return self._bits.clamp(max=INFINITY_BITS - 1).view(torch.float32)


class Int64:
    """int64 with a scale for each tensor: 8 bytes per element, never less accurate than fp32 addition."""

    dtype = torch.int64
    growth_bits = GROWTH_BITS
    measuring = False

    def __init__(self, slots: Sequence[Slot], terms: int, unit_bits: int, device: torch.device) -> None:
        """See :class:`Scales`."""
        self._slots = slots
        self.scales = Scales(len(slots), terms, unit_bits)
        blocks = torch.tensor([_blocks(slot.size) for slot in slots], dtype=torch.int64)
        self._slot_of = torch.repeat_interleave(torch.arange(len(slots)), blocks).to(device)
        """The number of the slot of each block."""
        self._of_slots: list[int] = []
        self._loss_scale_bits = 0
        self.exponents = torch.zeros(len(self._slot_of), dtype=torch.int16, device=device)
        self.peaks = SumPeaks(len(self._slot_of), device)

    @property
    def state(self) -> ScalesState:
        return ScalesState(None, self.values)

    def restore(self, state: ScalesState) -> None:
        self.adopt(state.slots)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    @property
    def values(self) -> list[int | None]:
        return list(self.scales.magnitudes)

    def adopt(self, values: Any) -> None:
        self.scales.magnitudes = list(values)

    def adder(self, number: int, accumulator: torch.Tensor, report: torch.Tensor) -> Add:
        one = kernels.Adder(accumulator, self._slots[number].index, self.scales.bound_bits, report)

        def add(gradient: torch.Tensor, other: torch.Tensor | None, *, apart: bool, first: bool) -> None:
            one.add(gradient, self._of_slots[number], other, apart=apart, first=first)

        return add

    def begin_step(self, loss_scale_bits: int) -> None:
        self._loss_scale_bits = loss_scale_bits
        self._of_slots = self.scales.exponents(loss_scale_bits)
        of_slots = torch.tensor(self._of_slots, dtype=torch.int16).to(self._slot_of.device)
        torch.index_select(of_slots, 0, self._slot_of, out=self.exponents)
        self.peaks.begin_step()

    def commit(self, overflows: bool) -> None:
        largest = torch.zeros(len(self._slots), device=self._slot_of.device)
        largest.scatter_reduce_(0, self._slot_of, self.peaks.sizes, "amax")
        self.scales.update(largest.tolist(), self._loss_scale_bits)


class Int32:
    """int32 with a scale for each block of 1024 elements: as much memory and traffic as fp32."""

    dtype = torch.int32
    growth_bits = block_scales.GROWTH_BITS

    def __init__(self, slots: Sequence[Slot], terms: int, unit_bits: int, device: torch.device) -> None:
        """See :class:`BlockScales`."""
        blocks = [_blocks(slot.size) for slot in slots]
        self.scales = BlockScales(blocks, terms, unit_bits, device)
        firsts = [slot.index // kernels.BLOCK for slot in slots]
        self._slots = slots
        self._blocks = [slice(first, first + number) for first, number in zip(firsts, blocks, strict=True)]
        self._loss_scale_bits = 0
        self.exponents = self.scales.exponents(0)
        self.peaks = SumPeaks(sum(blocks), device)

    @property
    def measuring(self) -> bool:
        return self.scales.measuring

    @property
    def state(self) -> ScalesState:
        blocks = self.scales.magnitudes.cpu()
        return ScalesState(self.values, [blocks[of].clone() for of in self._blocks])

    def restore(self, state: ScalesState) -> None:
        self.adopt(state.common)
        none = self.scales.magnitudes[:0].cpu()  # all of a stage may be frozen
        self.scales.magnitudes = torch.cat([none, *state.slots]).to(self.exponents.device)

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
            one.add(gradient, self.exponents[blocks], other, apart=apart, first=first)

        return add

    def begin_step(self, loss_scale_bits: int) -> None:
        self._loss_scale_bits = loss_scale_bits
        self.exponents.copy_(self.scales.exponents(loss_scale_bits))
        self.peaks.begin_step()

    def commit(self, overflows: bool) -> None:
        self.scales.update(self.peaks.sizes, self.exponents, self._loss_scale_bits, overflows)


def _blocks(stop: int) -> int:
    """The number of blocks up to index ``stop``."""
    return -(-stop // kernels.BLOCK)
