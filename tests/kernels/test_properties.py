"""What the exact sum promises, through the public functions: order and grouping do not matter, checksums are linear and
find every flipped bit, values are those of exact rational arithmetic.
"""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron import kernels
from spare_megatron.kernels import dispatch, reference, weights

COUNT, PIECES = 1300, 12
EXPONENT, BOUND, FIRST = 40, 54, 100
EXPONENTS, BOUND_32 = torch.tensor([18, 15], dtype=torch.int16), 27
FLOATS, SUMS = (torch.float32, torch.bfloat16, torch.float16), (torch.int64, torch.int32)


def summed(pieces: list[torch.Tensor], accumulator: torch.Tensor, report: torch.Tensor) -> None:
    """Into int64 with one exponent, or into int32 with one for each block."""
    for piece in pieces:
        if accumulator.dtype == torch.int64:
            kernels.accumulate(piece, accumulator, EXPONENT, FIRST, BOUND, report)
        else:
            kernels.accumulate(piece, accumulator, EXPONENTS, FIRST, BOUND_32, report)


def checksum(values: torch.Tensor, first_index: int) -> int:
    sums = torch.zeros(1, dtype=torch.int64)
    kernels.checksums(values, torch.tensor([(0, values.numel(), first_index)]), sums)
    return int(sums)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), order=st.permutations(range(PIECES)), groups=st.integers(1, 5), data=st.data())
@pytest.mark.parametrize("kind", SUMS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_order_and_partition_of_pieces(
    dtype: torch.dtype, kind: torch.dtype, seed: int, order: list[int], groups: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    orders = torch.randint(-40, 10, (PIECES, COUNT), generator=generator).float()
    pieces = torch.randn(PIECES, COUNT, generator=generator) * torch.exp2(orders)
    pieces[3, 5], pieces[4, 6], pieces[5, 7] = torch.nan, 1e30 if dtype != torch.float16 else 6e4, -torch.inf
    pieces = pieces.to(dtype)
    whole, report = torch.zeros(COUNT, dtype=kind), torch.zeros(2, dtype=torch.int64)
    summed(list(pieces), whole, report)

    owner = data.draw(st.lists(st.integers(0, groups - 1), min_size=PIECES, max_size=PIECES))
    parts = [torch.zeros(COUNT, dtype=kind) for _ in range(groups)]
    reports = torch.zeros(groups, 2, dtype=torch.int64)
    for group in range(groups):
        summed([pieces[piece] for piece in order if owner[piece] == group], parts[group], reports[group])
    total = torch.stack(parts).sum(0, dtype=kind)
    assert torch.equal(total, whole)
    assert int(reports[:, 0].sum()) == int(report[0])
    flags = 0
    for flag in reports[:, 1].tolist():
        flags |= flag
    assert flags == int(report[1]) == kernels.OVERFLOW | kernels.NOT_FINITE

    assert checksum(total, FIRST) == int(report[0])


@settings(max_examples=200)
@given(value=st.floats(width=32), exponent=st.integers(-60, 250), bound=st.integers(1, 62))
def test_one_value_is_rounded_as_a_fraction_is(value: float, exponent: int, bound: int) -> None:
    accumulator, report = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    kernels.accumulate(torch.tensor([value]), accumulator, exponent, 0, bound, report)
    flags = 0
    if not math.isfinite(value):
        expected, flags = 0, kernels.NOT_FINITE
    else:
        exact = Fraction(value) * Fraction(2) ** exponent
        if abs(exact) > 2**bound:
            exact, flags = Fraction(2**bound if exact > 0 else -(2**bound)), kernels.OVERFLOW
        expected = round(exact)
    assert (int(accumulator), int(report[1])) == (expected, flags)


def nearest(exact: Fraction, bits: int, unit_bits: int) -> float:
    """The number of ``bits`` significant bits nearest to ``exact``, ties to even; denormal ones are multiples of
    2^unit_bits, and what is 2^128 or more is infinite."""
    size = abs(exact).numerator.bit_length() - exact.denominator.bit_length()
    size -= abs(exact) < Fraction(2) ** size
    unit = Fraction(2) ** max(size - bits + 1, unit_bits)
    found = round(exact / unit) * unit
    return float(found) if abs(found) < 2**128 else math.copysign(math.inf, exact)


@settings(max_examples=200)
@given(total=st.integers(-(2**63), 2**63 - 1), addend=st.integers(-(2**63), 2**63 - 1), exponent=st.integers(-150, 230))
@pytest.mark.parametrize("kind", SUMS, ids=str)
def test_one_sum_is_converted_as_a_fraction_is(kind: torch.dtype, total: int, addend: int, exponent: int) -> None:
    width = torch.iinfo(kind).bits
    total, addend = total >> 64 - width, addend >> 64 - width
    converter = kernels.Converter(torch.tensor([(0, 1, 0)]), torch.tensor([exponent], dtype=torch.int16))
    out = torch.empty(1)
    converter.convert(0, torch.tensor([total], dtype=kind), torch.tensor([addend], dtype=kind), out, None)
    wrapped = (total + addend + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)
    assert float(out) == nearest(Fraction(float(wrapped)) / Fraction(2) ** exponent, 24, -149)


@settings(max_examples=300)
@given(
    total=st.floats(width=32, allow_nan=False),
    divisor=st.sampled_from([1.0, 96.0, 0.1, -3.0, 16777217.0, 2.0**-90, 2.0**99]),
)
@pytest.mark.parametrize(("dtype", "bits", "unit_bits"), [(torch.float32, 24, -149), (torch.bfloat16, 8, -133)])
def test_one_quotient_is_rounded_as_a_fraction_is(
    dtype: torch.dtype, bits: int, unit_bits: int, total: float, divisor: float
) -> None:
    out, peaks = torch.empty(1, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    kernels.finalize(torch.tensor([total]), out, divisor, peaks)
    quotient = total / divisor
    expected = nearest(Fraction(quotient), bits, unit_bits) if math.isfinite(quotient) else quotient
    assert float(out) == expected
    assert bool(out.signbit()) == (math.copysign(1, quotient) < 0)
    assert float(peaks.view(torch.float32)) == abs(total)


def test_bf16_is_rounded_once() -> None:
    """A quotient just above a tie of bf16, which fp32 cannot tell from the tie."""
    divisor = (2.0**32 - 1) / (2**8 + 1)
    total = torch.tensor([2.0**32])
    assert float(total / divisor) == 2**8 + 1 < float(total.double() / divisor)
    out = torch.empty(1, dtype=torch.bfloat16)
    kernels.finalize(total, out, divisor, torch.zeros(1, dtype=torch.int32))
    assert float(out) == 2**8 + 2


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, 5000), max_size=6), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("kind", SUMS, ids=str)
def test_any_ranges_give_what_the_whole_gives(kind: torch.dtype, cuts: list[int], seed: int) -> None:
    """And the checksums are those of the integers and of the result's bits."""
    segments = torch.tensor([(0, 900, 1024), (1000, 1000, 9), (1024, 4000, 3072), (4010, 4990, 7007)])
    exponents = torch.arange(30, 38, dtype=torch.int16)
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    generator = torch.Generator().manual_seed(seed)
    sums, addend = (torch.randint(low, high, (5000,), dtype=kind, generator=generator) for _ in range(2))
    converter = kernels.Converter(segments, exponents)
    whole, found = torch.empty(5000), torch.zeros(4, 2, dtype=torch.int64)
    converter.convert(0, sums, addend, whole, found)
    parts, found_in_parts = torch.empty(5000), torch.zeros(4, 2, dtype=torch.int64)
    ends = [0, *sorted(cuts), 5000]
    for start, stop in itertools.pairwise(ends):
        part = slice(start, stop)
        converter.convert(start, sums[part], addend[part], parts[part], found_in_parts)
    assert torch.equal(parts, whole)
    assert torch.equal(found_in_parts, found)
    expected = torch.zeros(2, 4, dtype=torch.int64)
    kernels.checksums(sums + addend, segments, expected[0])
    kernels.checksums(whole.view(torch.int32), segments, expected[1])
    assert torch.equal(found, expected.t())
    inside = torch.zeros(5000, dtype=torch.bool)
    for start, stop, _ in segments.tolist():
        inside[start:stop] = True
    assert not whole[~inside].view(torch.int32).any()


@settings(max_examples=100)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    repeats=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 8000), max_size=4),
)
def test_squares_are_rounded_as_fractions_are_in_any_division(
    values: list[float], repeats: int, cuts: list[int]
) -> None:
    numbers = torch.tensor(values).repeat(repeats)
    bits = int(kernels.largest([numbers]))
    largest = max(map(abs, values))
    assert float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)) == largest
    exponent = kernels.SQUARE_BITS - math.frexp(largest)[1]
    expected = repeats * sum(round((Fraction(value) * Fraction(2) ** exponent) ** 2) for value in values)
    ends = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    parts = [numbers[start:stop].clone() for start, stop in itertools.pairwise(ends)]
    for given_parts in ([numbers], parts):
        low, high = kernels.squares(given_parts, exponent).tolist()
        assert 0 <= low < 2**32
        assert (high << 32) + low == expected


def test_every_flipped_bit_is_found() -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(-(2**62), 2**62, (2100,), generator=generator)
    for data in (values, values.int()):
        expected = checksum(data, 7)
        digest = kernels.digest(data)
        width = 8 * data.element_size()
        for position in (0, 1, 1016, 1017, 2099):
            for bit in range(width):
                mask = torch.tensor(1 << bit if bit < width - 1 else -(1 << bit), dtype=data.dtype)
                data[position] ^= mask
                assert checksum(data, 7) != expected, f"position {position}, bit {bit}"
                assert kernels.digest(data) != digest, f"position {position}, bit {bit}"
                data[position] ^= mask


def test_checksum_is_the_documented_sum() -> None:
    """Against Python's integers, which cannot be wrong in the same way."""
    generator = torch.Generator().manual_seed(6)
    values = torch.randint(-(2**62), 2**62, (1500,), generator=generator)
    first, total = 900, 0
    for position, value in enumerate(values.tolist()):
        block, place = divmod(first + position, kernels.BLOCK)
        table = weights.splitmix64(weights.CHECKSUM_SEED + place) >> 32 | 1
        total += (weights.splitmix64(block) | 1) * table * value
    assert checksum(values, first) & weights.MASK == total & weights.MASK


def test_digest_depends_on_order_boundaries_and_bytes() -> None:
    shuffled = list(range(256)) * 40
    random.Random(7).shuffle(shuffled)
    data = bytes(shuffled)
    halves = [data[:5000], data[5000:]]
    tensors = [torch.tensor(list(half), dtype=torch.uint8) for half in halves]
    assert kernels.digest(halves) == kernels.digest(tensors)
    assert len({kernels.digest(data), kernels.digest(halves), kernels.digest(halves[::-1]), kernels.digest(b"")}) == 4
    assert kernels.digest(data + b"\0") != kernels.digest(data)
    weights_ = torch.randn(64, 33)
    assert kernels.digest(weights_) == kernels.digest(weights_.numpy().tobytes())
    negated = weights_.clone()
    negated[0, :2] *= -1
    negated[0, 2:4] *= -1
    assert kernels.digest(negated) != kernels.digest(weights_)
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.digest(weights_.t())


def test_a_digest_waits_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the weights in a model there are tensors on the host, as transformer-engine's ``_extra_state``."""
    calls: list[int] = []

    class Counting:
        def digest_sums(self, parts: list[torch.Tensor]) -> torch.Tensor:
            calls.append(len(parts))
            return reference.digest_sums([torch.zeros(part.shape) for part in parts])

    monkeypatch.setattr(dispatch, "kernels", lambda _device: Counting())
    shapes = [5, 1, 7, 3, 9, 2]
    places = ["meta" if number % 2 else "cpu" for number in range(6)]
    parts = [torch.zeros(size, device=place) for size, place in zip(shapes, places, strict=True)]
    mixed = kernels.digest(parts)
    assert calls == [3, 3]
    assert mixed == kernels.digest([torch.zeros(size) for size in shapes])
