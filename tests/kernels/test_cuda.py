"""The CUDA sources compile for every target without spilled registers where there is an nvcc; on a machine with a GPU
the kernels give the bits of the plain torch form.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.cuda_registers import build, kernels_of
from spare_megatron import kernels
from spare_megatron.kernels import dispatch, native, reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(build.nvcc() is None, reason="no nvcc on the path")
@pytest.mark.parametrize("target", build.CUDA_TARGETS)
def test_compiles_without_spills(target: str, tmp_path: Path) -> None:
    try:
        found = kernels_of(target, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    assert len(found) >= 19
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
                    run.accumulate(values.to(where), accumulator, 40, 777, 55, report, gradient, apart, first)
            out, peak = torch.empty(count, device=where), torch.zeros_like(report[:1])
            run.finalize(accumulator, out, 40, 0, 3.0, peak)
            digest = run.digest_sums([out.view(torch.uint8)])
            sums = torch.zeros(2, dtype=torch.int64, device=where)
            run.checksums(accumulator, torch.tensor([(0, count // 3, 777), (count // 3, count, 5)]), sums)
            both.append([one.cpu() for one in (accumulator, report, out, peak, digest, sums)])
        assert all(torch.equal(one, other) for one, other in zip(*both, strict=True)), str(dtype)
    blocks = kernels._num_blocks(777, count)
    exponents = torch.randint(10, 20, (blocks,), dtype=torch.int16, generator=generator)
    both = []
    for run, where in ((reference, torch.device("cpu")), (native_kernels, device)):
        narrow = torch.zeros(count + offset, dtype=torch.int32, device=where)[offset:]
        report = torch.zeros(2, dtype=torch.int64, device=where)
        for other, apart in ((None, False), (partial.to(where), False), (partial.to(where), True)):
            run.accumulate(values.to(where), narrow, exponents.to(where), 777, 25, report, other, apart, other is None)
        peaks = torch.zeros(blocks, dtype=torch.int32, device=where)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(count, dtype=dtype, device=where)
            run.finalize(narrow, out, exponents.to(where), 777, 3.0, peaks)
            both.append([one.cpu() for one in (narrow, report, out, peaks)])
    assert all(
        torch.equal(one, other) for half in (0, 1) for one, other in zip(both[half], both[half + 2], strict=True)
    )
