"""Measures the GB/s of each kernel of the exact reduction, and of a copy of as many bytes and the same work in torch.

    python benchmarks/reduce_kernels.py [--elements N] [--threads 1 2] [--level avx2] [--device cuda] [--json FILE]

The three are taken in turn, many times; ratios are medians of the paired ratios. A copy of as many bytes reads half of
them and writes half. The torch sequence is unfused, with its temporaries and weights made beforehand; 'fall-back' is
the plain form that runs without a native library. Goals on a CPU: 0.9 of the copy, twice the torch sequence.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import RESULTS, report
from spare_megatron import kernels
from spare_megatron.kernels import dispatch, native, reference
from spare_megatron.kernels.weights import checksum_weights

SEED = 20_262
EXPONENT, BOUND, DIVISOR = 40, 57, 96.0


@dataclass(frozen=True)
class Case:
    """One kernel, the same work in torch operations, and the reference that runs without a native library."""

    name: str
    bytes_per_element: float
    native: Callable[[], object]
    sequence: Callable[[], object]
    fallback: Callable[[], object]


def accumulate_cases(count: int, device: torch.device) -> Iterator[Case]:
    """fp32 and bf16: a gradient, the sum of two in fp32, each of two, and one that is written over the sums; and the
    32-bit form. Checksum and checks are part of the work."""
    total, report_ = (
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    weights = checksum_weights(0, count, device)
    double, whole = torch.empty(count, dtype=torch.float64, device=device), torch.empty_like(total)
    earlier, both = torch.randn(count, device=device), torch.empty(count, device=device)
    add = reference.adder(total, 0, BOUND, report_)
    for dtype, kind in itertools.product((torch.float32, torch.bfloat16), ("", " + partial", ", two", ", first")):
        gradient = torch.randn(count, device=device).to(dtype)
        other = {" + partial": earlier, ", two": earlier.to(dtype)}.get(kind)
        named = {"apart": kind == ", two", "first": kind == ", first"}

        def rounded(values: torch.Tensor, sums: Callable[[torch.Tensor], object]) -> None:
            double.copy_(values).mul_(2.0**EXPONENT)
            report_[1] |= (~(double.abs() <= 2.0**BOUND)).any().long()
            whole.copy_(double.round_())
            sums(whole)
            report_[0] += whole.mul_(weights).sum()

        def sequence(
            gradient: torch.Tensor = gradient, other: torch.Tensor | None = other, named: dict[str, bool] = named
        ) -> None:
            if other is None:
                rounded(gradient, total.copy_ if named["first"] else total.add_)
            elif named["apart"]:
                rounded(gradient, total.add_)
                rounded(other, total.add_)
            else:
                rounded(torch.add(other, gradient, out=both), total.add_)

        arguments = (gradient, total, EXPONENT, 0, BOUND, report_)
        yield Case(
            f"accumulate {str(dtype).removeprefix('torch.')}{kind}",
            (8 if named["first"] else 16) + gradient.element_size() + (0 if other is None else other.element_size()),
            lambda arguments=arguments, other=other, named=named: kernels.accumulate(*arguments, other=other, **named),
            sequence,
            lambda gradient=gradient, other=other, named=named: add(gradient, EXPONENT, other, **named),
        )

    gradient, narrow = torch.randn(count, device=device), torch.zeros(count, dtype=torch.int32, device=device)
    exponents = torch.full((-(-count // kernels.BLOCK),), 16, dtype=torch.int16, device=device)

    def sequence32() -> None:
        double.copy_(gradient).mul_(2.0**16)
        report_[1] |= (~(double.abs() <= 2.0**30)).any().long()
        whole.copy_(double.round_())
        narrow.add_(whole)
        report_[0] += whole.mul_(weights).sum()

    yield Case(
        "accumulate32 float32",
        12,
        lambda: kernels.accumulate(gradient, narrow, exponents, 0, 30, report_),
        sequence32,
        lambda: reference.adder(narrow, 0, 30, report_)(gradient, exponents),
    )
    segments = torch.tensor([(0, count, 0)])
    yield Case(
        "checksum",
        8,
        lambda: kernels.checksums(total, segments, report_[:1]),
        lambda: report_[0].add_(torch.mul(total, weights, out=whole).sum()),
        lambda: reference.checksums(total, segments, report_[:1]),
    )
    yield Case(
        "digest",
        8,
        lambda: kernels.digest(total),
        lambda: torch.mul(total, weights, out=whole).sum().item(),
        lambda: reference.digest_sums([total.view(torch.uint8)]).tolist(),
    )


def convert_cases(count: int, device: torch.device) -> Iterator[Case]:
    """The sum of two tensors of integers to fp32, with the checksums of both."""
    segments, blocks = torch.tensor([(0, count, 0)]), -(-count // kernels.BLOCK)
    weights = checksum_weights(0, count, device)
    double, whole = torch.empty(count, dtype=torch.float64, device=device), torch.empty_like(weights)
    out, found = torch.empty(count, device=device), torch.zeros(1, 2, dtype=torch.int64, device=device)
    for dtype, exponent in ((torch.int64, EXPONENT), (torch.int32, 16)):
        limit = 2 ** (50 if dtype == torch.int64 else 25)
        sums, addend = (torch.randint(-limit, limit, (count,), dtype=dtype, device=device) for _ in range(2))
        exponents = torch.full((blocks,), exponent, dtype=torch.int16, device=device)
        converter = kernels.Converter(segments, exponents)

        def sequence(sums: torch.Tensor = sums, addend: torch.Tensor = addend, factor: float = 2.0**-exponent) -> None:
            whole.copy_(sums).add_(addend)
            out.copy_(double.copy_(whole).mul_(factor))
            found[0, 0] += whole.mul_(weights).sum()
            found[0, 1] += whole.copy_(out.view(torch.int32)).mul_(weights).sum()

        yield Case(
            f"convert {str(dtype).removeprefix('torch.')}",
            2 * sums.element_size() + 4,
            lambda converter=converter, sums=sums, addend=addend: converter.convert(0, sums, addend, out, found),
            sequence,
            lambda exponents=exponents, sums=sums, addend=addend: reference.convert(
                segments, exponents, 0, sums, addend, out, found
            ),
        )


def finalize_cases(count: int, device: torch.device) -> Iterator[Case]:
    """fp32 and bf16 gradients from fp32 sums, with the peaks of blocks."""
    total = torch.randn(count, device=device)
    double = torch.empty(count, dtype=torch.float64, device=device)
    sizes = torch.empty(count, device=device)
    peaks = torch.zeros(-(-count // kernels.BLOCK), dtype=torch.int32, device=device)
    whole = count // kernels.BLOCK * kernels.BLOCK
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(count, dtype=dtype, device=device)

        def sequence(out: torch.Tensor = out) -> None:
            out.copy_(double.copy_(total).div_(DIVISOR))
            torch.abs(total, out=sizes)
            largest = sizes[:whole].view(-1, kernels.BLOCK).amax(dim=1).view(torch.int32)
            torch.maximum(peaks[: len(largest)], largest, out=peaks[: len(largest)])

        yield Case(
            f"finalize {str(dtype).removeprefix('torch.')}",
            4 + out.element_size(),
            lambda out=out: kernels.finalize(total, out, DIVISOR, peaks),
            sequence,
            lambda out=out: reference.finalize(torch.tensor([(0, count, 0, 0)]), total, out, DIVISOR, peaks),
        )


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(case: Case, count: int, threads: int, repeats: int, device: torch.device) -> dict[str, object]:
    """Medians of the paired ratios; the slow forms are run less often."""
    half = int(count * case.bytes_per_element / 2)
    source = torch.zeros(half, dtype=torch.uint8, device=device)
    target = torch.zeros(half, dtype=torch.uint8, device=device)
    calls = (case.native, lambda: target.copy_(source))
    slow = (case.sequence, case.fallback)
    for call in (*calls, *slow):
        call()
    fast = np.array([[seconds(call, device) for call in calls] for _ in range(repeats)])
    slower = [[seconds(call, device) for call in (case.native, *slow)] for _ in range(max(3, repeats // 5))]
    spent = np.array(slower)
    return {
        "kernel": case.name,
        "threads": threads,
        "ns_per_element": float(np.median(fast[:, 0]) / count * 1e9),
        "gb_per_s": float(case.bytes_per_element * count / np.median(fast[:, 0]) / 1e9),
        "copy_gb_per_s": float(case.bytes_per_element * count / np.median(fast[:, 1]) / 1e9),
        "of_copy": float(np.median(fast[:, 1] / fast[:, 0])),
        "times_torch_sequence": float(np.median(spent[:, 1] / spent[:, 0])),
        "times_fallback": float(np.median(spent[:, 2] / spent[:, 0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--level", choices=native.LEVELS, help="use no newer instruction set (CPU)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--json", type=Path, help="result file (default: benchmarks/results/reduce_kernels_INSTRUCTIONS.json)"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    library = dispatch.kernels(device)
    if arguments.level and isinstance(library, native.CpuLibrary):
        library.limit(arguments.level)
    torch.manual_seed(SEED)
    rows = []
    for threads in arguments.threads if device.type == "cpu" else [1]:
        torch.set_num_threads(threads)
        for cases in (accumulate_cases, convert_cases, finalize_cases):
            for case in cases(arguments.elements, device):
                rows.append(measure(case, arguments.elements, threads, arguments.repeats, device))
    name = kernels.implementation(device.type).split(":")[0]
    config = {
        "elements": arguments.elements,
        "instructions": name,
        "repeats": arguments.repeats,
        "seed": SEED,
    }
    path = arguments.json or RESULTS / f"reduce_kernels_{name}.json"
    print(f"written to {report('reduce_kernels', config, rows, path)}")


if __name__ == "__main__":
    main()
