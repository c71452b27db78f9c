"""The conversion of complete sums: where a result is smaller than the sum that it is made of, as an fp32 gradient is
smaller than a sum in int64, only the result is passed on and kept.

An all-reduce is a reduce-scatter, after which each member owns the sum of one chunk, and an all-gather, which gives
every chunk to all. The owner of a chunk converts it in between. If sums are staged in host memory, the sums themselves
are all-gathered, and each member converts all of them.

Either way each element has one owner, which adds it to its own *check vector*. The check vectors are summed over the
members as the last part of a reduction. They show whether the sums were those of the members' contributions, and what
the results must be.

The communicators know no number formats: :mod:`spare_megatron.exact_sum.sum_conversion` has the one that is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class CompiledConversion(Protocol):
    """A conversion that compiled code can call without the interpreter."""

    @property
    def function(self) -> int:
        """Address of ``spare_cpu_convert`` (kernels/spare_kernels.h)."""

    @property
    def job(self) -> ctypes.Structure:
        """Its ``SpareConvert``, of which the caller fills in which elements are converted."""


class ConversionTally(Protocol):
    """The conversions of one attempt to reduce. Used by one thread at a time."""

    def convert(
        self,
        tensor: int,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        result: torch.Tensor,
        owned: bool,
    ) -> None:
        """Fill ``result``, the elements from ``start`` of tensor number ``tensor``, from ``sums`` + ``addend``.
        ``owned``: they are counted."""

    def compiled(self, tensor: int, dtype: torch.dtype) -> CompiledConversion | None:
        """:meth:`convert` of a tensor of sums of ``dtype``, all of it owned; None where it is not compiled."""

    def check_vector(self) -> torch.Tensor:
        """What this member adds to the check vector: int64, of :attr:`Conversion.check_vector_size` elements."""


class Conversion(Protocol):
    """How the sums of the first tensors of a request become results."""

    @property
    def tensors(self) -> int:
        """The number of these tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the results."""

    @property
    def check_vector_size(self) -> int:
        """Elements of the check vector; the same on every member."""

    def begin(self) -> ConversionTally:
        """Begin an attempt, in which nothing is counted yet. An earlier one may still be in the hands of a thread."""


@dataclass(frozen=True)
class ConvertedBucket:
    """A bucket each of whose chunks is converted by its owner."""

    tally: ConversionTally
    tensor: int
    start: int
    """The position of its first element in the tensor."""
    result: torch.Tensor

    def convert(self, start: int, sums: torch.Tensor, addend: torch.Tensor | None = None, owned: bool = True) -> None:
        """Convert the elements of the bucket from ``start``: ``sums`` + ``addend``."""
        result = self.result[start : start + sums.numel()]
        self.tally.convert(self.tensor, self.start + start, sums, addend, result, owned)


def results_of(conversion: Conversion | None, sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What ``sums`` become in a reduction whose only member gives them, in memory of their own."""
    if conversion is None:
        return [one.clone() for one in sums]
    tally, number = conversion.begin(), conversion.tensors
    results = [torch.empty_like(one, dtype=conversion.dtype) for one in sums[:number]]
    for tensor, (total, result) in enumerate(zip(sums[:number], results, strict=True)):
        tally.convert(tensor, 0, total, None, result, True)
    return [*results, *(one.clone() for one in sums[number:]), tally.check_vector()]
