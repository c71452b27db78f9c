"""The scales of exact sums: no sum leaves its integers, committed sums alone decide, rises count at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.exact_sum.block_scales import GROWTH_BITS as GROWTH_32
from spare_megatron.exact_sum.block_scales import ROOM_BITS, SATURATED_BITS, BlockScales
from spare_megatron.exact_sum.scales import GROWTH_BITS, Scales


@given(st.integers(1, 1 << 20))
def test_no_sum_of_bounded_terms_leaves_int64(terms: int) -> None:
    bound_bits = Scales(1, terms, 0).bound_bits
    assert terms * 2**bound_bits <= 2**62 < 2 * terms * 2 ** (bound_bits + 1)


@given(st.integers(1, 4096), st.floats(2.0**-100, 2.0**100), st.integers(-8, 24))
def test_a_piece_may_be_256_times_the_last_sum(terms: int, largest: float, loss_scale_bits: int) -> None:
    scales = Scales(1, terms, 0)
    first = scales.exponents(loss_scale_bits)
    committed = max(largest, 2.0 ** -first[0])
    scales.update([committed], loss_scale_bits)
    (exponent,) = scales.exponents(loss_scale_bits)
    assert committed * 2**GROWTH_BITS * 2.0**exponent <= 2.0**scales.bound_bits
    assert committed * 2 ** (GROWTH_BITS + 1) * 2.0**exponent >= 2.0**scales.bound_bits or exponent == 300


def test_a_rise_counts_at_once_and_a_fall_by_one_bit_a_step() -> None:
    scales = Scales(1, 16, 0)
    before = scales.exponents(0)
    scales.update([math.ldexp(1, 30 - before[0])], 0)
    quiet = scales.exponents(0)
    scales.update([math.ldexp(1, 10 - quiet[0])], 0)
    assert scales.exponents(0) == [quiet[0] + 1]
    now = scales.exponents(0)
    scales.update([math.ldexp(1, 57 - now[0])], 0)
    assert scales.exponents(0)[0] < now[0] - 6


def test_a_tensor_without_a_gradient_keeps_its_first_scale() -> None:
    scales = Scales(2, 16, 0)
    first = scales.exponents(0)
    scales.update([0.0, 5.0], 0)
    assert scales.exponents(0)[0] == first[0]
    assert scales.magnitudes[0] is None


@pytest.mark.parametrize("bits", [0, 16, 32])
def test_the_loss_scale_moves_the_exponents_and_not_the_magnitudes(bits: int) -> None:
    scales, other = Scales(1, 16, 0), Scales(1, 16, 0)
    scales.update([3.0], 0)
    other.update([3.0 * 2**bits], bits)
    assert scales.magnitudes == other.magnitudes
    assert other.exponents(bits) == [scales.exponents(0)[0] - bits]


def _blocks(counts: list[int], terms: int) -> BlockScales:
    return BlockScales(counts, terms, 0, torch.device("cpu"))


def _commit(scales: BlockScales, largest: list[float], overflows: bool = False) -> list[int]:
    """One committed step whose blocks had these largest sums; the exponents that it ran with."""
    exponents = scales.exponents(0)
    bound = 2**31 - 1
    sizes = [min(bound, round(size * 2.0**e)) * 2.0**-e for size, e in zip(largest, exponents.tolist(), strict=True)]
    scales.update(torch.tensor(sizes), exponents, 0, overflows)
    return exponents.tolist()


@given(st.integers(1, 1 << 20))
def test_no_sum_of_bounded_terms_leaves_int32(terms: int) -> None:
    assert terms * 2 ** _blocks([1], terms).bound_bits < 2**31


@given(st.integers(1, 4096), st.floats(2.0**-38, 2.0**4))
def test_the_measuring_steps_find_a_gradient_of_any_size(terms: int, size: float) -> None:
    scales = _blocks([1], terms)
    while scales.measuring:
        _commit(scales, [size])
    (exponent,) = scales.exponents(0).tolist()
    room = scales.bound_bits - GROWTH_32 - math.log2(size * 2.0**exponent)
    assert -0.01 <= room <= 2 + 1 / 16


def test_a_block_counts_as_at_most_room_bits_smaller_than_its_tensor() -> None:
    scales = _blocks([2, 1], 32)
    for _ in range(4):
        _commit(scales, [1.0, 2.0**-12, 2.0**-12])
    large, small, alone = scales.exponents(0).tolist()
    assert small == large + ROOM_BITS
    assert alone == large + 12


def test_a_block_rises_at_once_and_falls_a_sixteenth_of_a_bit_a_step() -> None:
    scales = _blocks([1], 32)
    for _ in range(4):
        before = _commit(scales, [1.0])
    _commit(scales, [8.0])
    assert _commit(scales, [1.0]) == [before[0] - 3]
    for _ in range(15):
        _commit(scales, [1.0])
    assert scales.exponents(0).tolist() == [before[0] - 2]


def test_a_block_at_its_bound_rises_beyond_it() -> None:
    scales = _blocks([2], 32)
    for _ in range(4):
        before = _commit(scales, [1.0, 1.0])
    _commit(scales, [2.0**20, 1.0], overflows=True)
    after = scales.exponents(0).tolist()
    assert before[0] - after[0] > GROWTH_32 + SATURATED_BITS - 1
    assert after[1] == after[0] + ROOM_BITS


def test_what_never_had_a_gradient_is_measured_when_it_gets_one() -> None:
    scales = _blocks([1, 1], 32)
    for _ in range(7):
        _commit(scales, [1.0, 0.0])
    for _ in range(2 * scales.measuring_steps):
        _commit(scales, [1.0, 2.0**-12])
    first, second = scales.exponents(0).tolist()
    assert second == first + 12
