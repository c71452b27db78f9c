"""A conversion that needs no kernels: an integer sum becomes its 1024th part in fp32, and the check vector says what is
missing of the sum of all elements, and how many have been converted by their owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch

UNIT = 1024.0


def converted(sums: torch.Tensor) -> torch.Tensor:
    """What these sums become."""
    return (sums.double() / UNIT).float()


class SumOfElements:
    """The conversions of one attempt."""

    def __init__(self, put_in: int) -> None:
        self._missing, self._owned = put_in, 0

    def convert(
        self,
        tensor: int,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        result: torch.Tensor,
        owned: bool,
    ) -> None:
        assert len(result) == len(sums) > 0
        whole = sums if addend is None else sums + addend
        result.copy_(converted(whole))
        if owned:
            self._missing -= int(whole.sum())
            self._owned += len(whole)

    def compiled(self, tensor: int, dtype: torch.dtype) -> None:
        return None

    def check_vector(self) -> torch.Tensor:
        return torch.tensor([(self._missing + 2**63) % 2**64 - 2**63, self._owned])


class Conversion:
    """Of the first ``tensors`` of a request."""

    dtype = torch.float32
    check_vector_size = 2

    def __init__(self, given: Sequence[torch.Tensor], tensors: int) -> None:
        self.tensors = tensors
        self._put_in = sum(int(one.sum()) for one in given[:tensors])

    def begin(self) -> SumOfElements:
        return SumOfElements(self._put_in)
