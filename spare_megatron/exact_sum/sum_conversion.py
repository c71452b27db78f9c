"""The conversion of complete integer sums into fp32, for :mod:`spare_megatron.collectives.converting`.

An integer sum over all groups becomes fp32(sum / 2^exponent) as soon as it is complete, on the one member that owns it;
fp32 is what travels on, what is kept, and what each rank later divides by the number of microbatches or tokens.

The check vector has two numbers for each parameter of which the rank keeps a part. A member adds to the first the
checksum of its own pieces, less that of the integers that it converted; to the second the checksum of the bits that it
made of them. Summed over the members, the first is 0, as the checksum is linear: the sums had what all pieces put in.
The second is what the checksum of the results must be on every member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spare_megatron import kernels


class SumConversion:
    """How sums become fp32."""

    dtype = torch.float32

    def __init__(
        self, segments: Sequence[torch.Tensor], exponents: torch.Tensor, expected: Callable[[], torch.Tensor]
    ) -> None:
        """
        Args:
            segments: for each tensor its parameters, int64 [parameters, 3] on the CPU: start and stop in the tensor,
                and the index of the first element in the index space of checksums.
            exponents: int16 [blocks], of each block of the index space; read when sums are converted. What is left of
                an attempt of an earlier step may still read them, for results that nobody takes.
            expected: returns the checksums of what this member puts in, int64 [parameters of all tensors].
        """
        self._converters = [kernels.Converter(one, exponents) for one in segments]
        self._sizes = [len(one) for one in segments]
        self._device = exponents.device
        self._expected = expected

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return len(self._sizes)

    @property
    def check_vector_size(self) -> int:
        """Elements of the check vector."""
        return 2 * sum(self._sizes)

    def begin(self) -> SumTally:
        """Begin to convert: nothing is counted yet."""
        found = torch.zeros(sum(self._sizes), 2, dtype=torch.int64, device=self._device)
        return SumTally(self._converters, found, found.split(self._sizes), self._expected)


class SumTally:
    """The conversions of one attempt, and the checksums of what this member owns."""

    def __init__(
        self,
        converters: Sequence[kernels.Converter],
        found: torch.Tensor,
        found_of: Sequence[torch.Tensor],
        expected: Callable[[], torch.Tensor],
    ) -> None:
        """``found_of``: the part of ``found``, int64 [parameters, 2], of each tensor."""
        self._converters, self._found, self._found_of, self._expected = converters, found, found_of, expected

    def convert(
        self,
        tensor: int,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        result: torch.Tensor,
        owned: bool,
    ) -> None:
        """Fill ``result``, the elements from ``start`` of tensor number ``tensor``; ``owned``: they are counted."""
        self._converters[tensor].convert(start, sums, addend, result, self._found_of[tensor] if owned else None)

    def compiled(self, tensor: int, dtype: torch.dtype) -> kernels.Compiled | None:
        """What compiled code calls for sums of ``dtype``; None where there is no such code."""
        return self._converters[tensor].compiled(dtype, self._found_of[tensor])

    def check_vector(self) -> torch.Tensor:
        """What this member adds to the check vector: first of all parameters what is missing, then what the results
        have."""
        integers, results = self._found.unbind(1)
        return torch.cat([self._expected().to(integers.device) - integers, results])
