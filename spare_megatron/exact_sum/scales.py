"""Chooses the power of two by which each gradient tensor is scaled to fixed point. Pure.

A piece's gradient g is rounded once to the integer rint(g * 2^e), and integers are added exactly. The exponent e of a
tensor depends on what the job has *committed*, so every group computes the same e, and a run with failures computes the
same as a run without:

* ``bound_bits`` B: each of ``terms`` numbers (pieces x ranks of a group that add) stays below 2^B, and terms x 2^B <=
  2^62, so no sum leaves int64.
* The tensor's last committed sum had a largest element below 2^m, and e = B - GROWTH_BITS - m: the next sum is expected
  near 2^(B - GROWTH_BITS), and a piece is flagged when it is over 2^GROWTH_BITS times as large as the whole last sum.
* m follows a rise at once and a fall by one bit a step: a quiet step between two loud ones costs no flag.
* A tensor that had no gradient yet gets FIRST_BITS of room above a gradient of 1.

The rounding error of a sum is at most terms / 2 units, so relative to its largest element at most
2^(GROWTH_BITS + log2(terms) - B) = 2^(GROWTH_BITS + 2 log2(terms) - 62): 2^-44 for 32 pieces, 2^-30 for 4096, where
fp32 addition has about 2^-24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

GROWTH_BITS = 8
"""Measured: a tensor's largest piece element grew at most 14.7x (4 bits) from one step to the next."""
FIRST_BITS = 16
EXPONENT_MAX = 300
"""Beyond it a double cannot hold 2^e times the smallest or largest fp32 number exactly."""


class Scales:
    """The exponents of one rank's tensors. Only :meth:`update` changes them."""

    def __init__(self, tensors: int, terms: int, unit_bits: int) -> None:
        """
        Args:
            tensors: number of tensors.
            terms: how many numbers are added into one element of a step's sum, over all groups.
            unit_bits: log2 of how many times larger than a mean loss the loss of a piece is: 0 for a mean, log2 of the
                number of tokens for a sum over tokens. It counts for tensors of which no sum is known.
        """
        self.bound_bits = 62 - (terms - 1).bit_length()
        self._first = FIRST_BITS - GROWTH_BITS + unit_bits
        self.magnitudes: list[int | None] = [None] * tensors
        """m of each tensor, for gradients of the loss itself (loss scale 1); None while its sums were all zero."""

    def exponents(self, loss_scale_bits: int) -> list[int]:
        """e of each tensor for a step whose loss is multiplied by 2^loss_scale_bits."""
        top = self.bound_bits - GROWTH_BITS - loss_scale_bits
        return [_within(top - (self._first if m is None else m)) for m in self.magnitudes]

    def update(self, sizes: Sequence[float], loss_scale_bits: int) -> None:
        """Take in a committed step.

        Args:
            sizes: the largest magnitude of each tensor's sum, finite.
            loss_scale_bits: as given to :meth:`exponents`.
        """
        for number, size in enumerate(sizes):
            if size == 0:
                continue
            now, before = math.frexp(size)[1] - loss_scale_bits, self.magnitudes[number]
            self.magnitudes[number] = now if before is None else max(now, before - 1)


def _within(exponent: int) -> int:
    return max(-EXPONENT_MAX, min(EXPONENT_MAX, exponent))
