"""The CUDA sources compile for every target without spilled registers where there is an nvcc; on a machine with a GPU
the kernels give the bits of the plain torch form.
"""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.cuda_registers import build, kernels_of
from spare_megatron import kernels
from spare_megatron.kernels import dispatch, native, reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(build.nvcc() is None, reason="no nvcc on the path")
@pytest.mark.parametrize(
    "target",
    [pytest.param(one, marks=() if one == "90" else pytest.mark.full) for one in build.CUDA_TARGETS],
)
def test_compiles_without_spills(target: str, tmp_path: Path) -> None:
    try:
        found = kernels_of(target, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    assert len(found) >= 21
    assert [row for row in found if row["spill_stores_bytes"] or row["spill_loads_bytes"]] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("count", [1, 5000, 3_000_001])
@pytest.mark.parametrize("offset", [0, 1])
def test_bits_of_the_reference(count: int, offset: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    native_kernels = dispatch.kernels(device)
    assert isinstance(native_kernels, native.CudaLibrary), kernels.implementation("cuda")
    generator = torch.Generator().manual_seed(count)
    for dtype in kernels.FLOATS:
        values = torch.randn(count + offset, generator=generator).to(dtype)[offset:]
        values[count // 2] = torch.nan
        partial = torch.randn(count + offset, generator=generator)[offset:]
        both = []
        for run, where in ((reference, torch.device("cpu")), (native_kernels, device)):
            accumulator = torch.zeros(count + offset, dtype=torch.int64, device=where)[offset:]
            report = torch.zeros(2, dtype=torch.int64, device=where)
            accumulator.fill_(7)
            for other, apart, first in ((None, False, True), (partial, False, False), (partial, True, False)):
                for kind in (torch.float32, dtype):
                    gradient = None if other is None else other.to(where, kind)
                    run.adder(accumulator, 777, 55, report)(values.to(where), 40, gradient, apart, first)
            sums = torch.zeros(2, dtype=torch.int64, device=where)
            run.checksums(accumulator, torch.tensor([(0, count // 3, 777), (count // 3, count, 5)]), sums)
            digest = run.digest_sums([accumulator.view(torch.uint8)])
            finite = [partial.to(where), partial[: count // 2].to(where)]
            low, high = run.squares(finite, 20).tolist()
            top = run.largest([values.float().to(where), *finite])
            squares = torch.tensor([(high + (low >> 32)), low & 0xFFFFFFFF])
            both.append([one.cpu() for one in (accumulator, report, digest, sums, top, squares)])
        assert all(torch.equal(one, other) for one, other in zip(*both, strict=True)), str(dtype)
    blocks = kernels._num_blocks(777, count)
    exponents = torch.randint(10, 20, (blocks,), dtype=torch.int16, generator=generator)
    both = []
    for run, where in ((reference, torch.device("cpu")), (native_kernels, device)):
        narrow = torch.zeros(count + offset, dtype=torch.int32, device=where)[offset:]
        report = torch.zeros(2, dtype=torch.int64, device=where)
        for other, apart in ((None, False), (partial.to(where), False), (partial.to(where), True)):
            run.adder(narrow, 777, 25, report)(values.to(where), exponents.to(where), other, apart, other is None)
        both.append([narrow.cpu(), report.cpu()])
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("count", [1, 5000, 3_000_001])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_fp32_of_sums_has_the_bits_of_the_reference(count: int, offset: int, kind: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    native_kernels = dispatch.kernels(device)
    generator = torch.Generator().manual_seed(count)
    third, gap = count // 3, min(7, count // 2)
    segments = torch.tensor([(2, 2 + third, 777), (2 + third + gap, count + 2, 3072 + third)])
    blocks = kernels._num_blocks(0, 4096 + count)
    exponents = torch.randint(20, 190, (blocks,), dtype=torch.int16, generator=generator)
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    sums, addend = (
        torch.randint(low, high, (count + offset,), dtype=kind, generator=generator)[offset:] for _ in range(2)
    )
    both = []
    for run, where in ((reference, torch.device("cpu")), (native_kernels, device)):
        made = []
        for other in (addend.to(where), None):
            total, found = torch.empty(count, device=where), torch.zeros(2, 2, dtype=torch.int64, device=where)
            run.convert(segments, exponents.to(where), 1, sums.to(where), other, total, found)
            made += [total, found]
        total[count // 2] = torch.inf
        for dtype, divisor in itertools.product((torch.float32, torch.bfloat16), (3.0, 2.0**40, 0.1)):
            out = torch.empty(count, dtype=dtype, device=where)
            peaks = torch.zeros(kernels._num_blocks(777, count), dtype=torch.int32, device=where)
            run.finalize(torch.tensor([(0, 5, 0, 777), (5, count, 5, 782)]), total, out, divisor, peaks)
            made += [out, peaks]
        both.append([one.cpu() for one in made])
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
