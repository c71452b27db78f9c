"""A reduction over the groups: the request, the number format in which it travels, and the outcome.

A :class:`GradientReduction` says how an accumulator becomes something that an all-reduce can sum, and how the
sum becomes a gradient. The communicators know buckets, epochs and failures; they know nothing of number
formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from spare_megatron.collectives.converting import Conversion
from spare_megatron.protocol.messages import Link


class GradientReduction(Protocol):
    """The number format in which gradients travel. Element k of a wire buffer stands for element k of the
    accumulator.

    Buckets are cut from flat contiguous tensors; ``encode`` and ``decode`` see one bucket at a time, in any
    order, and accumulator and wire may be on different devices (use ``copy_``).
    """

    @property
    def name(self) -> str:
        """The name, as in ``--spare-reduce``; groups with different ones refuse to reduce."""

    def wire_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        """The dtype that is summed over the groups."""

    def result_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        """The dtype of the gradient that the step applies."""

    def is_wire(self, accumulator: torch.dtype) -> bool:
        """Whether an accumulator can be summed as it is, because ``encode`` would copy its bits."""

    def encode(self, accumulator: torch.Tensor, wire: torch.Tensor) -> None:
        """Fill ``wire`` from ``accumulator``, which is never written. Does not wait for a device: whoever sends it
        does (:meth:`~spare_megatron.collectives.buckets.Buffers.ready_fence`)."""

    def decode(self, wire: torch.Tensor, result: torch.Tensor) -> None:
        """Fill ``result`` from the sum. Both are the same memory when dtype and device are equal. Does not wait for a
        device: the device reads ``wire`` before it runs later work."""


class PlainReduction:
    """Adds in the accumulator's own dtype, fp32 for gradients. The order is the ring's, so the bits depend on which
    groups are live."""

    name = "fp32"

    def wire_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return accumulator

    def result_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return accumulator

    def is_wire(self, accumulator: torch.dtype) -> bool:
        return self.wire_dtype(accumulator) == accumulator

    def encode(self, accumulator: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(accumulator, non_blocking=True)

    def decode(self, wire: torch.Tensor, result: torch.Tensor) -> None:
        if result.data_ptr() != wire.data_ptr():
            result.copy_(wire, non_blocking=True)


class Bfloat16Reduction(PlainReduction):
    """fp32 gradients travel and are summed over the groups in bf16, in half the bytes; other dtypes are not changed.
    Each of N groups rounds when it encodes and each of N - 1 additions rounds: to first order an element errs by
    at most N * 2^-9 of the sum of the groups' magnitudes."""

    name = "bf16"

    def wire_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if accumulator == torch.float32 else accumulator

    def result_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return self.wire_dtype(accumulator)


@dataclass(frozen=True)
class Reduction:
    """One request: the sums over all groups of ``tensors`` and ``scalars``."""

    tensors: Sequence[torch.Tensor]
    """Flat and contiguous, of the same sizes on every group; they are never written."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The same keys on every group; summed in float64, so integers are exact up to 2^53."""
    method: GradientReduction = field(default_factory=PlainReduction)
    on_bucket: Callable[[int, int], None] | None = None
    """Called on the reducing thread with (buckets done, buckets in all) as buckets end; what it raises leaves
    ``reduce``."""
    overlapped: bool = False
    """Some member may begin before it has computed everything. So the scalars, which are known last, travel last, and a
    member's silence is no error. Must be the same on every member, also on those that have computed everything."""
    conversion: Conversion | None = None
    """What the sums of the first tensors become; the check vector follows the results."""


@dataclass(frozen=True)
class ReduceOutcome:
    """The outcome of a reduction: its sums, or why there are none. ``ok`` and ``stale`` are never both true."""

    ok: bool
    stale: bool
    """The epoch ended meanwhile, so there is no result, and no error to vote about."""
    tensors: tuple[torch.Tensor, ...] = ()
    """The results, and last the check vector where there is one; in buffers of the communicators, valid until the next
    reduction begins."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    corrupt: bool = False
    """This rank's own tensors are not what they should be, as ``error`` says."""
    links: tuple[Link, ...] = ()
    """The links between groups on which something did not arrive, as far as this rank knows."""
    formation_s: float = 0.0
    """Time that the communicator took to form after ``adopt``, whether or not anybody waited for it."""
    reduce_s: float = 0.0
    """Time from the moment that this rank had computed everything, with the waits for formation and for peers."""
    early: int = 0
    """Number of buckets that were summed before that moment."""
