"""Sums that owners convert: the check vector is that of all pieces whoever owns what, and finds what is damaged."""

from __future__ import annotations

import random

import pytest
import torch

from spare_megatron import kernels
from spare_megatron.exact_sum.sum_conversion import SumConversion, SumTally

SIZES = (3000, 1100)


class Members:
    """Some members that each put something into the sums of two tensors, with three parameters and a gap, and own
    chunks of them."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.int64) -> None:
        self.random = random.Random(seed)
        self.segments = [torch.tensor([[0, 900, 0], [903, 3000, 1024]]), torch.tensor([[0, 1100, 4096 + 7]])]
        self.exponents = torch.tensor([self.random.randint(-20, 60) for _ in range(6)], dtype=torch.int16)
        generator = torch.Generator().manual_seed(seed)
        bits = 50 if dtype == torch.int64 else 20
        self.given = [
            [torch.randint(-(2**bits), 2**bits, (size,), generator=generator, dtype=dtype) for size in SIZES]
            for _ in range(self.random.randint(1, 4))
        ]
        for one in self.given:
            one[0][900:903] = 0
        self.sums = [torch.stack(one).sum(0).to(dtype) for one in zip(*self.given, strict=True)]

    def tallies(self) -> list[SumTally]:
        """Of a new attempt."""
        return [
            SumConversion(self.segments, self.exponents, lambda mine=mine: self.checksums(mine)).begin()  # type: ignore[misc]
            for mine in self.given
        ]

    def checksums(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Of each parameter."""
        found = torch.zeros(3, dtype=torch.int64)
        for number, (tensor, segments) in enumerate(zip(tensors, self.segments, strict=True)):
            kernels.checksums(tensor, segments, found[2 * number :][: len(segments)])
        return found

    def convert(self, sums: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The results and the check vector, with owners of chunks of any size."""
        tallies = self.tallies()
        results = [torch.full((size,), torch.nan) for size in SIZES]
        for number, (total, result) in enumerate(zip(sums, results, strict=True)):
            at = 0
            while at < len(total):
                end = min(len(total), at + self.random.choice((1, 7, 900, 1500, 5000)))
                self.random.choice(tallies).convert(number, at, total[at:end], None, result[at:end], True)
                at = end
        return results, torch.stack([tally.check_vector() for tally in tallies]).sum(0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("seed", range(4))
def test_the_check_vector_does_not_depend_on_who_owns_what(seed: int, dtype: torch.dtype) -> None:
    members = Members(seed, dtype)
    results, check_vector = members.convert(members.sums)
    missing, expected = check_vector.chunk(2)
    assert missing.tolist() == [0, 0, 0]
    assert torch.equal(members.checksums([one.view(torch.int32) for one in results]), expected)
    again, same = members.convert(members.sums)
    assert all(map(torch.equal, results, again))
    assert torch.equal(check_vector, same)
    for number, segments in enumerate(members.segments):
        for start, stop, index in segments.tolist():
            for at in members.random.sample(range(start, stop), 20):
                exponent = int(members.exponents[(index + at - start) // 1024])
                exact = int(members.sums[number][at]) * 2.0**-exponent
                assert results[number][at] == torch.tensor(exact).float()


@pytest.mark.parametrize("seed", range(4))
def test_any_damaged_bit_shows_in_its_parameter(seed: int) -> None:
    members = Members(seed)
    for _ in range(20):
        number = members.random.randrange(2)
        at, bit = members.random.randrange(SIZES[number]), members.random.randrange(63)
        if number == 0 and 900 <= at < 903:
            continue
        damaged = [one.clone() for one in members.sums]
        damaged[number][at] ^= 1 << bit
        missing = members.convert(damaged)[1][:3]
        wrong = 2 if number else int(at >= 903)
        assert missing.nonzero().flatten().tolist() == [wrong], (number, at, bit)


def test_what_is_converted_without_being_owned_is_not_counted() -> None:
    members = Members(7)
    tally, result = members.tallies()[0], torch.empty(SIZES[0])
    before = tally.check_vector()
    tally.convert(0, 0, members.sums[0], None, result, False)
    assert torch.equal(tally.check_vector(), before)
    assert torch.equal(result, members.convert(members.sums)[0][0])
