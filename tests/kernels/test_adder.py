"""An adder does what the kernel that adds one gradient does, into one accumulator again and again."""

from __future__ import annotations

import pytest
import torch

from spare_megatron import kernels

SIZE, FIRST = 3 * kernels.BLOCK + 5, kernels.BLOCK


def _gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(SIZE, generator=generator).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("dtype", kernels.FLOATS, ids=str)
@pytest.mark.parametrize("single", [True, False], ids=["int64", "int32"])
def test_repeated_calls_add_what_single_calls_add(dtype: torch.dtype, single: bool) -> None:
    kind, bits = (torch.int64, 40) if single else (torch.int32, 24)
    blocks = torch.tensor([18, 17, 16, 19], dtype=torch.int16)
    exponents: int | torch.Tensor = 30 if single else blocks
    sums = [torch.full((SIZE,), 9, dtype=kind), torch.zeros(SIZE, dtype=kind)]
    reports = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    adder = kernels.Adder(sums[0], FIRST, bits, reports[0])
    for n, gradient in enumerate(_gradients(dtype)):
        other, apart = torch.full((SIZE,), 0.25) if n % 2 else None, n == 3
        adder.add(gradient.view(1, SIZE), exponents, other, apart=apart, first=n == 0)
        kernels.accumulate(gradient, sums[1], exponents, FIRST, bits, reports[1], other=other, apart=apart)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(reports[0], reports[1])
    assert sums[0].count_nonzero() > SIZE // 2


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    total, report = torch.zeros(8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    adder = kernels.Adder(total, 0, 40, report)
    for wrong in (torch.ones(7), torch.ones(8, dtype=torch.float64), total.view(torch.float32)[:8]):
        with pytest.raises(ValueError, match=r"source|accumulator"):
            adder.add(wrong, 30)
    assert not total.any()
