"""The scale of exact sums: no sum leaves int64, the rule depends on committed sums alone, rises count at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.megatron_adapter.scales import GROWTH_BITS, Scales


@given(st.integers(1, 1 << 20))
def test_no_sum_of_bounded_terms_leaves_int64(terms: int) -> None:
    bound_bits = Scales(1, terms, 0).bound_bits
    assert terms * 2**bound_bits <= 2**62 < 2 * terms * 2 ** (bound_bits + 1)


@given(st.integers(1, 4096), st.floats(2.0**-100, 2.0**100), st.integers(-8, 24))
def test_a_piece_may_be_256_times_the_last_sum(terms: int, largest: float, loss_scale_bits: int) -> None:
    scales = Scales(1, terms, 0)
    first = scales.exponents(loss_scale_bits)
    scales.update([int(largest * 2.0 ** first[0]) or 1], first, loss_scale_bits)
    (exponent,) = scales.exponents(loss_scale_bits)
    committed = max(largest, 2.0 ** -first[0])
    assert committed * 2**GROWTH_BITS * 2.0**exponent <= 2.0**scales.bound_bits
    assert committed * 2 ** (GROWTH_BITS + 1) * 2.0**exponent >= 2.0**scales.bound_bits or exponent == 300


def test_a_rise_counts_at_once_and_a_fall_by_one_bit_a_step() -> None:
    scales = Scales(1, 16, 0)
    before = scales.exponents(0)
    scales.update([1 << 30], before, 0)
    quiet = scales.exponents(0)
    scales.update([1 << 10], quiet, 0)
    assert scales.exponents(0) == [quiet[0] + 1]
    now = scales.exponents(0)
    scales.update([1 << 57], now, 0)
    assert scales.exponents(0)[0] < now[0] - 6


def test_a_tensor_without_a_gradient_keeps_its_first_scale() -> None:
    scales = Scales(2, 16, 0)
    first = scales.exponents(0)
    scales.update([0, 5], first, 0)
    assert scales.exponents(0)[0] == first[0]
    assert scales.magnitudes[0] is None


@pytest.mark.parametrize("bits", [0, 16, 32])
def test_the_loss_scale_moves_the_exponents_and_not_the_magnitudes(bits: int) -> None:
    scales, other = Scales(1, 16, 0), Scales(1, 16, 0)
    scales.update([1 << 40], scales.exponents(0), 0)
    other.update([1 << 40], other.exponents(bits), bits)
    assert scales.magnitudes == other.magnitudes
    assert other.exponents(bits) == [scales.exponents(0)[0] - bits]
