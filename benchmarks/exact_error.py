"""Measures the error of a sum of made-up gradients against float64: exact modes, fp32 and bf16 accumulation.

    python benchmarks/exact_error.py [--pieces 32] [--elements N] [--json FILE]

Gradients are made up, with the dynamic range of real ones: each block of 1024 has a size of its own (over ``spread``
binary orders), elements are Student-t with three degrees of freedom around a signal that the pieces share. Exponents
follow the rule of the exact mode: the largest element of the sum is expected 8 bits below the bound (2 bits in the
32-bit form, which has one exponent for each block).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron import kernels

SEED = 20_263
GROWTH_BITS, GROWTH_BITS_32 = 8, 2


def gradients(pieces: int, elements: int, spread: int, seed: int) -> torch.Tensor:
    """fp32 [pieces, elements]."""
    random = np.random.default_rng(seed)
    size = np.exp2(random.uniform(-spread - 10, -10, size=elements // kernels.BLOCK)).repeat(kernels.BLOCK)
    noise = random.standard_t(3, size=(pieces, elements))
    return torch.from_numpy(((random.standard_normal(elements) + noise) * size).astype(np.float32))


def exact(pieces: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    bound = 62 - (len(pieces) - 1).bit_length()
    exponent = bound - GROWTH_BITS - math.frexp(float(reference.abs().max()))[1]
    total, report_ = torch.zeros(pieces.shape[1], dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for piece in pieces:
        kernels.accumulate(piece, total, exponent, 0, bound, report_)
    assert int(report_[1]) == 0, "a piece exceeded the bound"
    blocks = pieces.shape[1] // kernels.BLOCK
    return converted(total, torch.full((blocks,), exponent, dtype=torch.int16))


def exact32(pieces: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    bound = 31 - len(pieces).bit_length()
    largest = reference.abs().view(-1, kernels.BLOCK).amax(dim=1)
    exponents = (bound - GROWTH_BITS_32 - torch.frexp(largest)[1]).to(torch.int16)
    total, report_ = torch.zeros(pieces.shape[1], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for piece in pieces:
        kernels.accumulate(piece, total, exponents, 0, bound, report_)
    assert int(report_[1]) == 0, "a piece exceeded the bound"
    return converted(total, exponents)


def converted(total: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The sum in fp32."""
    out = torch.empty(total.numel())
    segments = torch.tensor([(0, total.numel(), 0)])
    kernels.Converter(segments, exponents).convert(0, total, None, out, None)
    return out


def added(pieces: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(pieces.shape[1], dtype=dtype)
    for piece in pieces:
        total += piece.to(dtype)
    return total.float()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pieces", type=int, nargs="+", default=[8, 32, 256])
    parser.add_argument("--elements", type=int, default=1 << 18)
    parser.add_argument("--spread", type=int, nargs="+", default=[0, 8, 16], help="binary orders between blocks")
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/exact_error.json)")
    arguments = parser.parse_args()
    rows = []
    for number in arguments.pieces:
        for spread in arguments.spread:
            pieces = gradients(number, arguments.elements, spread, SEED)
            reference = pieces.double().sum(dim=0)
            sums = {
                "int64": exact(pieces, reference),
                "exact32": exact32(pieces, reference),
                "fp32": added(pieces, torch.float32),
                "bf16": added(pieces, torch.bfloat16),
            }
            row: dict[str, object] = {"pieces": number, "spread_bits": spread}
            for name, total in sums.items():
                error = (total.double() - reference).view(-1, kernels.BLOCK).norm(dim=1)
                relative = error / reference.view(-1, kernels.BLOCK).norm(dim=1)
                row[f"{name}_relative_l2"] = float(error.norm() / reference.norm())
                row[f"{name}_worst_block"] = float(relative.max())
            rows.append(row)
    config = {
        "elements": arguments.elements,
        "growth_bits": GROWTH_BITS,
        "growth_bits_32": GROWTH_BITS_32,
        "seed": SEED,
    }
    print(f"written to {report('exact_error', config, rows, arguments.json)}")


if __name__ == "__main__":
    main()
