"""What is summed over the groups, how it travels, and what came of it.

A :class:`GradientReduction` says how an accumulator becomes something that an all-reduce can sum, and how the
sum becomes a gradient. The communicators know buckets, epochs and failures; they know nothing of number
formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from spare_megatron.controller.messages import Link


class GradientReduction(Protocol):
    """A number format for the way over the wire. Element k of a wire buffer stands for element k of the
    accumulator.

    Buckets are cut from flat contiguous tensors; ``encode`` and ``decode`` see one bucket at a time, in any
    order, and the two sides may be on different devices (use ``copy_``).
    """

    @property
    def name(self) -> str:
        """As in ``--spare-reduce``; groups that disagree on it refuse to reduce."""

    def wire_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        """What is summed."""

    def result_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        """What the step applies."""

    def encode(self, accumulator: torch.Tensor, wire: torch.Tensor) -> None:
        """Fill ``wire`` from ``accumulator``, which is never written."""

    def decode(self, wire: torch.Tensor, result: torch.Tensor) -> None:
        """Fill ``result`` from the sum. Both are the same memory when dtype and device are equal."""


class PlainReduction:
    """Adds in the accumulator's own dtype: fp32 gradients summed in fp32 (order of the ring, so not bit-exact
    over different memberships)."""

    name = "fp32"

    def wire_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return accumulator

    def result_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return accumulator

    def encode(self, accumulator: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(accumulator)

    def decode(self, wire: torch.Tensor, result: torch.Tensor) -> None:
        if result.data_ptr() != wire.data_ptr():
            result.copy_(wire)


class Bfloat16Reduction(PlainReduction):
    """fp32 gradients travel and are summed over the groups in bf16, half the bytes; whatever else rides along stays as
    it is. Each of N groups rounds when it encodes and each of N - 1 additions rounds: to first order an element errs by
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
    """Flat and contiguous, the same sizes on every group. Read, never written."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The same keys on every group; summed in float64, so integers are exact up to 2^53."""
    method: GradientReduction = field(default_factory=PlainReduction)
    on_bucket: Callable[[int, int], None] | None = None
    """Called on the reducing thread with (buckets done, buckets in all) as buckets end: bytes of bucket
    ``done`` have been sent, and the last one has not ended while done < all. What it raises leaves
    ``reduce``."""
    check: Callable[[int, int], str] | None = None
    """``check(tensor, stop)``, before a bucket that ends there leaves: why it must not, or nothing."""
    overlapped: bool = False
    """Some member may begin before it has computed everything: the scalars, which are known last, travel last, and no
    member's silence is an error. The same on every member, also on those that begin with everything at hand."""


@dataclass(frozen=True)
class ReduceOutcome:
    """What came of it: a value, whatever happened. ``ok`` and ``stale`` are never both true."""

    ok: bool
    stale: bool
    """The epoch ended meanwhile: no result, nobody to blame."""
    tensors: tuple[torch.Tensor, ...] = ()
    """The sums, in buffers of the communicators' own: valid until the next call of ``reduce``."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    fault: str = ""
    """What :attr:`Reduction.check` said."""
    links: tuple[Link, ...] = ()
    """What did not arrive, between which groups, as far as this rank knows."""
    formation_s: float = 0.0
    """Time from ``adopt`` until the communicator stood, whether or not anybody waited for it."""
    reduce_s: float = 0.0
    """Time from the moment that everything was at hand, waiting for formation and for peers included."""
    early: int = 0
    """Buckets that were summed before that moment."""
