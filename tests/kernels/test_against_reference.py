"""Each native kernel gives the bits of the plain torch form: for every instruction set, with odd lengths, buffers that
are aligned to their elements only, denormal, huge and non-finite numbers, and one thread or two.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from spare_megatron import kernels
from spare_megatron.kernels import native, reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 5, 1023, 1024, 5000)
LARGE = 300_001
"""Enough for two threads; shorter ones are the same with one."""
SEED = 20_261


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def gradients(count: int, dtype: torch.dtype, exponent: int, wild: bool, random: torch.Generator) -> torch.Tensor:
    """Magnitudes over 45 binary orders around what the exponent suits, zeros of both signs; all there is when wild."""
    orders = torch.randint(-30, 15, (count + 1,), generator=random).double() - max(0, exponent - 60)
    values = (torch.randn(count + 1, generator=random, dtype=torch.float64) * torch.exp2(orders)).to(dtype)
    values[::7], values[1::50] = 0.0, -0.0
    if wild:
        tiny = torch.finfo(dtype).smallest_normal
        special = [torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, -torch.finfo(dtype).max, tiny, tiny / 4]
        for number, value in enumerate(special):
            values[1 + number :: 97] = value
    return values[1:]


def block_exponents(first: int, count: int, exponent: int, bound: int | None, random: torch.Generator) -> torch.Tensor:
    """Around ``exponent``; with a ``bound`` such that most blocks of its :func:`gradients` just keep it."""
    middle = exponent if bound is None else bound - 20 + max(0, exponent - 60)
    return torch.randint(-3, 4, (kernels._num_blocks(first, count),), dtype=torch.int16, generator=random) + middle


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accumulate(cpu: native.CpuLibrary, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(SEED)
    small = list(itertools.product(LENGTHS, (0, 777), (-20, 40, 700), (1, 20, 51, 62), (False, True)))
    # int32: around the largest scale that fp32 has
    small += itertools.product((5000,), (777,), (185,), (20, 30), (False,))
    small = small if torch.get_num_threads() == 1 else []
    for count, first, exponent, bound, wild in [*small, (LARGE, 777, 40, 55, True), (LARGE, 0, 40, 55, False)]:
        for narrow in (False, True)[: 2 if bound <= 30 else 1]:
            source = gradients(count, dtype, exponent, wild, random)
            kind = torch.int32 if narrow else torch.int64
            start = torch.randint(-(2**20), 2**20, (count + 1,), dtype=kind, generator=random)[1:]
            exponents: int | torch.Tensor = exponent
            if narrow:
                exponents = block_exponents(first, count, exponent, None if wild else bound, random)
            results = []
            for implementation in (cpu, reference):
                accumulator, report = start.clone(), torch.tensor([5, 0])
                implementation.accumulate(source, accumulator, exponents, first, bound, report, None)
                results.append((accumulator, report))
            case = f"seed {SEED}: count {count}, first {first}, exponent {exponent}, bound {bound}, wild {wild}, {kind}"
            assert all(same(one, other) for one, other in zip(*results, strict=True)), case


def only_in_the_sum(source: torch.Tensor, partial: torch.Tensor) -> None:
    """Make some sums infinite, NaN, 0, denormal, a tie of fp32 or just beyond one, though their addends are not, and
    some infinite or NaN because of one addend."""
    largest, tiny = torch.finfo(source.dtype).max, torch.finfo(torch.float32).smallest_normal
    for number, (own, earlier) in enumerate(
        [
            (largest, torch.finfo(torch.float32).max),
            (torch.inf, -torch.inf),
            (1.5, -1.5),
            (1.0, 2.0**-24),
            (1.0, 2.0**-24 + 2.0**-47),
            (-(1.0 + 2.0**-7), 2.0**-24),
        ]
    ):
        source[number::53], partial[number::53] = own, earlier
    for number, own in enumerate((torch.inf, -torch.inf, torch.nan)):
        source[10 + number :: 53], partial[10 + number :: 53] = own, 1.0
        source[13 + number :: 53], partial[13 + number :: 53] = 1.0, own
    if source.dtype != torch.float16:
        source[7::53], partial[7::53] = -tiny, 1.5 * tiny
        source[8::53], partial[8::53] = tiny / 8, tiny / 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accumulate_with_partial(cpu: native.CpuLibrary, dtype: torch.dtype) -> None:
    """What is rounded has the bits of torch's own sum; neither addend is written."""
    random = torch.Generator().manual_seed(SEED)
    small = itertools.product(LENGTHS, (0, 777), (-20, 40, 140), (1, 20, 51, 62), (False, True))
    small = small if torch.get_num_threads() == 1 else ()
    for count, first, exponent, bound, wild in [*small, (LARGE, 777, 40, 55, True), (LARGE, 0, 40, 55, False)]:
        source = gradients(count, dtype, exponent, wild, random)
        partial = gradients(count, torch.float32, exponent, wild, random)
        if wild:
            only_in_the_sum(source, partial)
        both, before = partial.clone().add_(source), (source.clone(), partial.clone())
        narrower = partial.to(dtype)
        both_narrower = torch.add(narrower.float(), source)
        for kind in (torch.int64, torch.int32)[: 2 if bound <= 30 else 1]:
            start = torch.randint(-(2**20), 2**20, (count + 1,), dtype=kind, generator=random)[1:]
            exponents: int | torch.Tensor = exponent
            if kind == torch.int32:
                exponents = block_exponents(first, count, exponent, None if wild else bound, random)
            results = []
            for implementation, rounded, earlier in (
                (cpu, source, partial),
                (reference, source, partial),
                (cpu, both, None),
                (cpu, source, narrower),
                (reference, source, narrower),
                (cpu, both_narrower, None),
            ):
                accumulator, report = start.clone(), torch.tensor([5, 0])
                implementation.accumulate(rounded, accumulator, exponents, first, bound, report, earlier)
                results.append((accumulator, report))
            case = f"seed {SEED}: count {count}, first {first}, exponent {exponent}, bound {bound}, wild {wild}, {kind}"
            for number, other in enumerate(results):
                assert all(same(one, two) for one, two in zip(results[number // 3 * 3], other, strict=True)), case
        assert all(same(one, other) for one, other in zip((source, partial), before, strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accumulate_two_gradients_and_over_what_was_there(cpu: native.CpuLibrary, dtype: torch.dtype) -> None:
    """Two gradients apart give what one after the other gives; the first ones do not see the accumulator's contents."""
    random = torch.Generator().manual_seed(SEED)
    small = itertools.product(LENGTHS, (0, 777), (-20, 40, 140), (1, 20, 51, 62), (False, True))
    small = small if torch.get_num_threads() == 1 else ()
    for count, first, exponent, bound, wild in [*small, (LARGE, 777, 40, 55, True), (LARGE, 0, 40, 55, False)]:
        source = gradients(count, dtype, exponent, wild, random)
        others = [None, gradients(count, dtype, exponent, False, random)]
        if dtype != torch.float32:
            others.append(gradients(count, torch.float32, exponent, wild, random))
        for kind in (torch.int64, torch.int32)[: 2 if bound <= 30 else 1]:
            start = torch.randint(-(2**20), 2**20, (count + 1,), dtype=kind, generator=random)[1:]
            exponents: int | torch.Tensor = exponent
            if kind == torch.int32:
                exponents = block_exponents(first, count, exponent, None if wild else bound, random)
            for other, over in itertools.product(others, (False, True)):
                one_by_one, report = torch.zeros_like(start) if over else start.clone(), torch.tensor([5, 0])
                for gradient in (source,) if other is None else (other, source):
                    reference.accumulate(gradient, one_by_one, exponents, first, bound, report)
                case = f"seed {SEED}: {count}, {first}, {exponent}, {bound}, {wild}, {kind}, {over}"
                for implementation in (cpu, reference):
                    accumulator, found = start.clone(), torch.tensor([5, 0])
                    implementation.accumulate(source, accumulator, exponents, first, bound, found, other, True, over)
                    assert same(accumulator, one_by_one), case
                    assert same(found, report), case


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finalize(cpu: native.CpuLibrary, dtype: torch.dtype, kind: torch.dtype) -> None:
    random = torch.Generator().manual_seed(SEED)
    cases = list(itertools.product(LENGTHS[1:], (3.0, -4.0, 1e-3), (0, 777), (-100, 30, 150)))
    # the smallest and the largest quotients that are normal numbers of the destination, and what lies beyond
    cases += itertools.product((5000,), (1.0, -1.2, 1.999), (0,), (-65, -64, -63, 124, 125, 126, 127))
    cases = cases if torch.get_num_threads() == 1 else []
    for count, divisor, first, exponent in [*cases, (LARGE, 3.0, 777, 30), (2_200_001, 3.0, 0, 30)]:
        total = torch.randint(-(2**62), 2**62, (count + 1,), generator=random)[1:]
        total >>= torch.randint(0, 62, (count,), generator=random)
        peaks, exponents = torch.zeros(1, dtype=torch.int64), exponent
        if kind == torch.int32:
            total = (total >> 31).int()
            blocks = kernels._num_blocks(first, count)
            exponents = torch.randint(-5, 5, (blocks,), dtype=torch.int16, generator=random) + exponent
            peaks = torch.zeros(blocks, dtype=torch.int32)
        if divisor != 3.0:
            total[count // 2] = torch.iinfo(kind).min
        results = []
        for implementation in (cpu, reference):
            destination, largest = torch.full((count + 1,), 7.0, dtype=dtype)[1:], peaks.clone()
            implementation.finalize(total, destination, exponents, first, divisor, largest)
            results.append((destination, largest))
        case = f"seed {SEED}: count {count}, divisor {divisor}, first {first}, exponent {exponent}"
        assert all(same(one, other) for one, other in zip(*results, strict=True)), case


def nearly_midway(bits: int, random: torch.Generator) -> tuple[int, int]:
    """Total and divisor whose quotient is 1 / (divisor * 2^54) below the middle of two doubles, one of them a tie of
    the format of ``bits``: an error of the smallest part of a unit of the last place changes the number of the format.
    """
    tie = 2 * int(torch.randint(2 ** (bits - 1), 2**bits, (1,), generator=random)) + 1
    middle = (tie << 53 - bits) + (1 if tie % 4 == 1 else -1)
    divisor = pow(middle, -1, 1 << 54)
    return divisor * middle >> 54, divisor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finalize_rounds_quotients_correctly(cpu: native.CpuLibrary, dtype: torch.dtype) -> None:
    """Exact ties of the destination, and quotients that come as close to the middle of two doubles as there are."""
    random, bits = torch.Generator().manual_seed(SEED), 24 if dtype == torch.float32 else 8
    cases = [nearly_midway(bits, random) for _ in range(100)]
    for divisor in (1, 3, 5, 96, 127, 12345, -3, -64):
        cases += [((2 * number + 1 + 2**bits) * divisor, divisor) for number in range(8)]
    for total, divisor in cases if torch.get_num_threads() == 1 else []:
        totals = torch.full((67,), total)
        totals[1::2] *= -1
        results = []
        for implementation in (cpu, reference):
            out, peak = torch.zeros(67, dtype=dtype), torch.zeros(1, dtype=torch.int64)
            implementation.finalize(totals, out, 0, 0, float(divisor), peak)
            results.append((out, peak))
        assert all(same(one, other) for one, other in zip(*results, strict=True)), f"{total} / {divisor}"


@pytest.mark.parametrize("divisor", [3.0, -3.0, 4.0, -4.0])
def test_finalize_keeps_the_sign_of_zero(cpu: native.CpuLibrary, divisor: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.ones(100, dtype=dtype)
        kernels.finalize(torch.zeros(100, dtype=torch.int64), out, 5, divisor, torch.zeros(1, dtype=torch.int64))
        assert out.tolist() == [0.0] * 100
        assert out.signbit().tolist() == [divisor < 0] * 100


def test_checksum_and_digest(cpu: native.CpuLibrary) -> None:
    random = torch.Generator().manual_seed(SEED)
    for count in (*LENGTHS, 3_000_001):
        raw = torch.randint(0, 256, (count + 3,), dtype=torch.uint8, generator=random)[3:]
        parts = [raw, raw[: count // 3]]
        assert same(cpu.digest_sums(parts), reference.digest_sums(parts)), f"seed {SEED}: {count} bytes"
        values = torch.randint(-(2**62), 2**62, (count,), generator=random)
        for integers, first in itertools.product((values, (values >> 31).int()), (0, 99, 1 << 40)):
            # with an empty one, and so that two threads meet inside one
            ends = [0, count // 7, count // 7, count // 7 + 5, count] if count > 10 else [0, count]
            segments = torch.tensor([(*ends[i : i + 2], first + 1024 * i) for i in range(len(ends) - 1)])
            found = torch.arange(len(segments))
            expected = found.clone()
            cpu.checksums(integers, segments, found)
            reference.checksums(integers, segments, expected)
            assert same(found, expected), f"seed {SEED}: {count} of {integers.dtype} from {first}"


@pytest.mark.parametrize(
    ("own", "earlier"), [(2.0**-140, None), (2.0**-141, 2.0**-141), (-(2.0**-126), 2.0**-126 + 2.0**-140)]
)
def test_flush_denormal_is_not_obeyed(cpu: native.CpuLibrary, own: float, earlier: float | None) -> None:
    """Of the source, of the partial, or of the sum of two normal numbers."""
    source = torch.full((3000,), own)
    partial = None if earlier is None else torch.full((3000,), earlier)
    accumulator, report = torch.zeros(3000, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    supported = torch.set_flush_denormal(True)
    try:
        kernels.accumulate(source, accumulator, 150, 0, 50, report, other=partial)
    finally:
        torch.set_flush_denormal(False)
    assert supported
    assert accumulator.tolist() == [1024] * 3000


def test_neither_addend_of_a_sum_is_at_fault(cpu: native.CpuLibrary) -> None:
    """Infinite and NaN sums of finite and infinite numbers, a sum beyond the bound, one that comes back within it."""
    largest = torch.finfo(torch.float32).max
    source = torch.tensor([largest, torch.inf, 3.0, 2.0**40, 1.0])
    partial = torch.tensor([largest, -torch.inf, 3.0, -(2.0**40), 2.0**-24])
    for position, (value, flags) in enumerate(
        [(0, kernels.NOT_FINITE), (0, kernels.NOT_FINITE), (4, kernels.OVERFLOW), (0, 0), (1, 0)]
    ):
        accumulator, report = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        own, earlier = source[position : position + 1], partial[position : position + 1]
        kernels.accumulate(own, accumulator, 0, 0, 2, report, other=earlier)
        assert (int(accumulator), int(report[1])) == (value, flags)
