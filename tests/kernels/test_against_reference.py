"""Each native kernel gives the bits of the plain torch form: for every instruction set, with odd lengths, buffers that
are aligned to their elements only, denormal, huge and non-finite numbers, and one thread or two.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, POINTER, byref, c_int
from typing import Any

import pytest
import torch

from spare_megatron import kernels
from spare_megatron.kernels import dispatch, native, reference
from tests.kernels.conftest import Cpus

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
def test_accumulate(cpus: Cpus, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(SEED)
    small = list(itertools.product(LENGTHS, (0, 777), (-20, 40, 700), (1, 20, 51, 62), (False, True)))
    # int32: around the largest scale that fp32 has
    small += itertools.product((5000,), (777,), (185,), (20, 30), (False,))
    small = small if cpus.threads == 1 else []
    for count, first, exponent, bound, wild in [*small, (LARGE, 777, 40, 55, True), (LARGE, 0, 40, 55, False)]:
        for narrow in (False, True)[: 2 if bound <= 30 else 1]:
            source = gradients(count, dtype, exponent, wild, random)
            kind = torch.int32 if narrow else torch.int64
            start = torch.randint(-(2**20), 2**20, (count + 1,), dtype=kind, generator=random)[1:]
            exponents: int | torch.Tensor = exponent
            if narrow:
                exponents = block_exponents(first, count, exponent, None if wild else bound, random)
            case = f"seed {SEED}: count {count}, first {first}, exponent {exponent}, bound {bound}, wild {wild}, {kind}"
            right = accumulated(reference, source, start, exponents, first, bound)
            for cpu in cpus():
                found = accumulated(cpu, source, start, exponents, first, bound)
                assert all(map(same, found, right)), f"{cpu.level()}: {case}"


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
def test_accumulate_with_partial(cpus: Cpus, dtype: torch.dtype) -> None:
    """What is rounded has the bits of torch's own sum; neither addend is written."""
    random = torch.Generator().manual_seed(SEED)
    small = itertools.product(LENGTHS, (0, 777), (-20, 40, 140), (1, 20, 51, 62), (False, True))
    small = small if cpus.threads == 1 else ()
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
            for earlier, sum_of_both in ((partial, both), (narrower, both_narrower)):
                case = f"seed {SEED}: {count}, {first}, {exponent}, {bound}, {wild}, {kind}, {earlier.dtype}"
                right = accumulated(reference, source, start, exponents, first, bound, earlier)
                for cpu in cpus():
                    for rounded, other in ((source, earlier), (sum_of_both, None)):
                        found = accumulated(cpu, rounded, start, exponents, first, bound, other)
                        assert all(map(same, found, right)), f"{cpu.level()}: {case}"
        assert all(same(one, other) for one, other in zip((source, partial), before, strict=True))


def accumulated(
    implementation: Any, source: torch.Tensor, start: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulator and report. ``rest``: exponents, first index, bound, what is accumulated with the source."""
    accumulator, report = start.clone(), torch.tensor([5, 0])
    exponents, first, bound, *others = rest
    implementation.adder(accumulator, first, bound, report)(source, exponents, *others)
    return accumulator, report


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accumulate_two_gradients_and_over_what_was_there(cpus: Cpus, dtype: torch.dtype) -> None:
    """Two gradients apart give what one after the other gives; the first ones do not see the accumulator's contents."""
    random = torch.Generator().manual_seed(SEED)
    small = itertools.product((0, 5, 5000), (0, 777), (-20, 140), (1, 20, 51, 62), (False, True))
    small = small if cpus.threads == 1 else ()
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
                    reference.adder(one_by_one, first, bound, report)(gradient, exponents)
                case = f"seed {SEED}: {count}, {first}, {exponent}, {bound}, {wild}, {kind}, {over}"
                for implementation in itertools.chain((reference,), cpus()):
                    found = accumulated(implementation, source, start, exponents, first, bound, other, True, over)
                    assert all(map(same, found, (one_by_one, report))), f"{case}, {dispatch.implementation('cpu')}"


def sums_of_all_sizes(count: int, kind: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Integers of all magnitudes; the sum of two wraps now and then."""
    width = torch.iinfo(kind).bits
    values = torch.randint(-(2**63), 2**63 - 1, (count + 1,), generator=random) >> 64 - width
    values >>= torch.randint(0, width, (count + 1,), generator=random)
    values[::7] = 0
    for number, value in enumerate((torch.iinfo(kind).min, torch.iinfo(kind).max, -1, 1)):
        values[1 + number :: 97] = value
    return values.to(kind)[1:]


SEGMENTS = [(5, 705, 300), (705, 705, 2048), (720, 3900, 4096), (3900, 3901, 9215), (4000, 9000, 10257)]
"""Positions and first indices in a tensor of 9050 elements: with gaps, without elements, within one block."""
RANGES = [(0, 9050), (0, 1), (1, 4999), (719, 3182), (2000, 17), (3899, 4), (8990, 60), (9000, 50), (9100, 20), (7, 0)]
"""Starts and counts."""
SCALES = [(-127, 126), (-128, 127), (150, 190), (-130, -60), (20, 60), (-800, 800)]
"""Ranges of exponents: at the ends of what fp32 scales by, denormal results, infinite ones, usual ones, all."""


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_convert(cpus: Cpus, kind: torch.dtype) -> None:
    random = torch.Generator().manual_seed(SEED)
    forms = list(itertools.product((True, False), repeat=2))
    small = itertools.product([SEGMENTS], RANGES, SCALES, forms) if cpus.threads == 1 else ()
    # two threads, and what is written past the cache
    layout = [(3, LARGE // 3, 300), (LARGE // 3 + 9, 2_000_000, 1 << 20)]
    large = [(layout, (1, count), (20, 60), (True, True)) for count in (LARGE, 1_100_001)]
    for layout, (start, count), scales, (with_addend, with_found) in [*small, *large]:
        segments = torch.tensor(layout)
        blocks = int((segments[:, 2] + segments[:, 1] - segments[:, 0]).max()) // kernels.BLOCK + 1
        exponents = torch.randint(scales[0], scales[1] + 1, (blocks,), dtype=torch.int16, generator=random)
        exponents[::5] = scales[1]
        sums = sums_of_all_sizes(count, kind, random)
        addend = sums_of_all_sizes(count, kind, random) if with_addend else None
        case = f"seed {SEED}: {start} + {count} of {layout}, scales {scales}, {with_addend}, {with_found}"
        right = None
        for implementation in itertools.chain((reference,), cpus()):
            destination = torch.full((count + 1,), 7.0)
            found = torch.arange(2 * len(segments)).view(-1, 2) if with_found else None
            implementation.convert(segments, exponents, start, sums, addend, destination[1:], found)
            assert destination[0] == 7
            result = destination, torch.zeros(1) if found is None else found
            right = right or result
            assert all(map(same, result, right)), f"{dispatch.implementation('cpu')}: {case}"


def floats_of_all_sizes(count: int, random: torch.Generator) -> torch.Tensor:
    """fp32 of all bits, without NaN, and of usual sizes; zeros of both signs, infinities, the largest numbers."""
    bits = torch.randint(-(2**31), 2**31 - 1, (count + 1,), generator=random).int().view(torch.float32)
    values = torch.where(bits.isnan(), torch.randn(count + 1, generator=random), bits)
    values[::3] = torch.randn(len(values[::3]), generator=random)
    for number, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.finfo(torch.float32).max, 2.0**-149)):
        values[1 + number :: 97] = value
    return values[1:]


def whole(count: int, first_index: int = 0) -> torch.Tensor:
    """A tensor to finalize as one segment."""
    return torch.tensor([(0, count, 0, first_index)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finalize(cpus: Cpus, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(SEED)
    # of 24 bits and of more, powers of two, the largest and the smallest
    divisors = (1.0, 3.0, -4.0, 96.0, 1e-3, -16777217.0, 2.0**20, 2.0**100, -(2.0**-100), 1.5 * 2.0**99)
    cases = list(itertools.product(LENGTHS, divisors, (0, 777))) if cpus.threads == 1 else []
    for count, divisor, first in [*cases, (LARGE, 96.0, 777), (2_200_001, 3.0, 0)]:
        total = floats_of_all_sizes(count, random)
        peaks = floats_of_all_sizes(kernels._num_blocks(first, count), random).abs().view(torch.int32)
        case = f"seed {SEED}: count {count}, divisor {divisor}, first {first}"
        right = None
        for implementation in itertools.chain((reference,), cpus()):
            result = torch.full((count + 1,), 7.0, dtype=dtype)[1:], peaks.clone()
            implementation.finalize(whole(count, first), total, result[0], divisor, result[1])
            right = right or result
            assert all(map(same, result, right)), f"{dispatch.implementation('cpu')}: {case}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finalize_of_a_list_has_the_bits_of_its_segments(cpu: native.CpuLibrary, dtype: torch.dtype) -> None:
    """Segments in any order, some without elements, some larger than one thread's work, and gaps between them."""
    random = torch.Generator().manual_seed(SEED)
    table = [(5, 3005, 7, 1024), (4000, 4000, 0, 0), (3005, 3006, 5000, 9 * 1024), (9000, 2_209_000, 6000, 10 * 1024)]
    table.append((8000, 8700, 3100, 4 * 1024 + 777))
    total = floats_of_all_sizes(2_210_000, random)
    listed, single = torch.full((2, 2_210_000), 7.0, dtype=dtype)
    peaks = floats_of_all_sizes(kernels._num_blocks(0, 10 * 1024 + 2_200_000), random).abs().view(torch.int32)
    peaks_of_single = peaks.clone()
    kernels.Finalizer(torch.tensor(table), peaks).finalize(total, listed, 3.0)
    for start, stop, to, index in table:
        out, blocks = single[to : to + stop - start], kernels._num_blocks(index, stop - start)
        of_segment = peaks_of_single[index // kernels.BLOCK :][:blocks]
        kernels.finalize(total[start:stop], out, 3.0, of_segment, index)
    assert same(listed, single)
    assert same(peaks, peaks_of_single)


def close_to_middles(divisor: float, bits: int, random: torch.Generator) -> torch.Tensor:
    """Totals, some denormal, whose quotients are the middles of two numbers of a format, or as close as those of fp32
    can be: rounded to fp32, many of them are such a middle of bf16."""
    middles = 2 * torch.randint(2 ** (bits - 1), 2**bits, (500,), generator=random).double() + 1
    sizes = torch.exp2(torch.randint(-170, 100, (500,), generator=random).double())
    nearest = (middles * sizes * divisor).float()
    return torch.cat([nearest, nearest.nextafter(torch.tensor(torch.inf)), nearest.nextafter(torch.tensor(0.0))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finalize_rounds_quotients_once(cpu: native.CpuLibrary, dtype: torch.dtype) -> None:
    random, bits = torch.Generator().manual_seed(SEED), 24 if dtype == torch.float32 else 8
    odd = (2 * torch.randint(2**22, 2**23, (20,), generator=random) + 1).tolist()
    for divisor in (1, 3, 5, 96, 127, 12345, -3, -64, *odd) if torch.get_num_threads() == 1 else ():
        total = close_to_middles(float(divisor), bits, random)
        results = []
        for implementation in (cpu, reference):
            out, peaks = torch.zeros(len(total), dtype=dtype), torch.zeros(2, dtype=torch.int32)
            implementation.finalize(whole(len(total)), total, out, float(divisor), peaks)
            results.append((out, peaks))
        assert all(same(one, other) for one, other in zip(*results, strict=True)), f"divisor {divisor}"


def test_finalize_rounds_denormal_quotients_by_a_power_of_two_once(cpu: native.CpuLibrary) -> None:
    """Their last bits are lost in fp32, where they become middles of two numbers of bf16."""
    middles = torch.arange(0x20).double().view(-1, 1) * 2**16 + 0x8000
    total = ((middles * 8 + torch.arange(-3, 4)) * 2.0**-60).view(-1).float()
    results = []
    for implementation in (cpu, reference):
        out, peaks = torch.zeros(len(total), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
        implementation.finalize(whole(len(total)), total, out, 2.0**92, peaks)
        results.append(out)
    assert same(*results)
    assert len(results[0].unique()) == 0x21


@pytest.mark.parametrize("divisor", [3.0, -3.0, 4.0, -4.0, -16777217.0])
def test_finalize_keeps_the_sign_of_zero(cpu: native.CpuLibrary, divisor: float) -> None:
    total = torch.tensor([0.0, -0.0]).repeat(50)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.ones(100, dtype=dtype)
        kernels.finalize(total, out, divisor, torch.zeros(1, dtype=torch.int32))
        assert out.tolist() == [0.0] * 100
        assert out.signbit().tolist() == [divisor < 0, divisor > 0] * 50


def test_a_caller_in_c_converts_in_threads_of_its_own(cpu: native.CpuLibrary) -> None:
    random = torch.Generator().manual_seed(SEED)
    segments, exponents = torch.tensor(SEGMENTS), torch.full((16,), 30, dtype=torch.int16)
    sums, addend = (sums_of_all_sizes(9050, torch.int64, random) for _ in range(2))
    converter = kernels.Converter(segments, exponents)
    expected, all_found = torch.empty(9050), torch.zeros(5, 2, dtype=torch.int64)
    converter.convert(0, sums, addend, expected, all_found)

    def converted(piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        destination, found = torch.empty(9050), torch.zeros(5, 2, dtype=torch.int64)
        compiled = converter.compiled(torch.int64, found)
        assert compiled is not None
        job = compiled.job
        call = CFUNCTYPE(None, POINTER(type(job)), c_int)(compiled.function)
        for start in range(0, 9050, piece):
            job.start, job.count = start, min(piece, 9050 - start)
            job.sums, job.addend = sums.data_ptr() + 8 * start, addend.data_ptr() + 8 * start
            job.destination = destination.data_ptr() + 4 * start
            call(byref(job), 1)
        return destination, found

    with ThreadPoolExecutor(4) as pool:
        for destination, found in pool.map(converted, (333, 1024, 4001, 10_000)):
            assert same(destination, expected)
            assert same(found, all_found)


def test_checksum_and_digest(cpus: Cpus) -> None:
    random = torch.Generator().manual_seed(SEED)
    for count in (*LENGTHS, 3_000_001):
        raw = torch.randint(0, 256, (count + 3,), dtype=torch.uint8, generator=random)[3:]
        parts = [raw, raw[: count // 3]]
        right = reference.digest_sums(parts)
        for cpu in cpus():
            assert same(cpu.digest_sums(parts), right), f"seed {SEED}: {count} bytes, {cpu.level()}"
        values = torch.randint(-(2**62), 2**62, (count,), generator=random)
        for integers, first in itertools.product((values, (values >> 31).int()), (0, 99, 1 << 40)):
            # with an empty one, and so that two threads meet inside one
            ends = [0, count // 7, count // 7, count // 7 + 5, count] if count > 10 else [0, count]
            segments = torch.tensor([(*ends[i : i + 2], first + 1024 * i) for i in range(len(ends) - 1)])
            expected = torch.arange(len(segments))
            reference.checksums(integers, segments, expected)
            for cpu in cpus():
                found = torch.arange(len(segments))
                cpu.checksums(integers, segments, found)
                assert same(found, expected), f"seed {SEED}: {count} of {integers.dtype} from {first}, {cpu.level()}"


def total_of(halves: torch.Tensor) -> int:
    low, high = halves.tolist()
    return (high << 32) + low


def test_largest_and_squares(cpu: native.CpuLibrary) -> None:
    random = torch.Generator().manual_seed(SEED)
    small = list(itertools.product(LENGTHS, (-149, -100, 0, 127), (1, 40))) if torch.get_num_threads() == 1 else []
    for count, top, orders in [*small, (LARGE, 3, 5), (LARGE, -20, 60)]:
        sizes = torch.exp2(top - torch.rand(count + 1, generator=random, dtype=torch.float64) * orders)
        values = (sizes * torch.empty(count + 1).uniform_(-1, 1, generator=random)).float()[1:]
        values[::9] = 2.0**top  # squares of 2^52
        parts = [values, values[: count // 3], values[:0]]
        case = f"seed {SEED}: count {count}, up to 2^{top}, {orders} orders"
        assert same(cpu.largest(parts), reference.largest(parts)), case
        exponent = kernels.SQUARE_BITS - top
        assert total_of(cpu.squares(parts, exponent)) == total_of(reference.squares(parts, exponent)), case
    for special in (torch.inf, -torch.inf, torch.nan, -0.0, 2.0**-149):
        values = torch.full((5000,), 2.0**-149)
        values[4321] = special
        assert same(cpu.largest([values]), reference.largest([values])), special


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


def test_flush_denormal_is_not_obeyed_by_what_is_made_of_sums(cpu: native.CpuLibrary) -> None:
    segments, exponents = torch.tensor([(0, 3000, 0)]), torch.full((3,), 148, dtype=torch.int16)
    total, out = torch.empty(3000), torch.empty(3000)
    peaks, small = torch.zeros(3, dtype=torch.int32), torch.full((3000,), 2.0**-140)
    supported = torch.set_flush_denormal(True)
    try:
        squares = kernels.squares([small], 144)
        kernels.Converter(segments, exponents).convert(0, torch.ones(3000, dtype=torch.int64), None, total, None)
        kernels.finalize(total, out, 0.5, peaks)
    finally:
        torch.set_flush_denormal(False)
    assert supported
    assert total_of(squares) == 3000 * 2**8
    assert total.tolist() == [2.0**-148] * 3000
    assert out.tolist() == [2.0**-147] * 3000
    assert peaks.tolist() == [2, 2, 2]


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
