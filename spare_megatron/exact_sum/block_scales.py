"""Chooses the power of two by which each block of 1024 elements is scaled to 32-bit integers, for ``exact32``.

Like :mod:`spare_megatron.exact_sum.scales` it uses committed sums alone; it handles all blocks of a rank at once:

* ``bound_bits`` B = 31 - bit_length(terms): terms x 2^B < 2^31, so no sum of bounded terms leaves int32.
* A block's last committed sum had a largest element below 2^m. m follows a rise at once and a fall by 1/16 bit a step:
  what is rare in the data (a token, an expert) keeps its scale for a while.
* The m of a block is taken to be at most ROOM_BITS below the largest m of its tensor, because blocks of one tensor take
  turns in being large.
* e = B - GROWTH_BITS - m. A piece may be 2^GROWTH_BITS times the last sum before it is flagged.
* Where a block's sum was near its bound in a flagged step, m rises by SATURATED_BITS more, because values beyond the
  bound were cut to it and their size is not known.
* Nothing is known before the first sums, and 32 bits do not span the possible sizes of a gradient. The first steps
  *measure*: step k = 0, 1, ... takes 2^FIRST_BITS * 2^-(k (B - 1)) as the bound of the blocks whose sums were all zero
  so far, and its sum is not applied.

The rounding error of a sum is at most terms / 2 units: at most terms / 2 * 2^(GROWTH_BITS - B) of the largest element
of its block, or of 2^-ROOM_BITS times the largest of its tensor where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spare_megatron.exact_sum.scales import EXPONENT_MAX

GROWTH_BITS = 5
ROOM_BITS = 4
"""Measured on a small GPT and real text, 300 steps: with these values an element of a piece came within 2 bits of the
bound once, and each further bit was ten times rarer. Without ROOM_BITS, blocks would have been flagged six times: the
rows of rare tokens."""
SATURATED_BITS = 6
FIRST_BITS = 6
"""Bits of room above a gradient of 1 in the first measuring step."""
SMALLEST_BITS = -40
"""Blocks of smaller gradients than 2^-40 of the mean loss count as zero until they grow."""
PARTS = 16
"""Magnitudes are kept in sixteenths of a bit."""
_UNKNOWN = -(2**15)


class BlockScales:
    """The exponents of one rank's blocks: tensors on its device, no host synchronisation."""

    def __init__(self, blocks: Sequence[int], terms: int, unit_bits: int, device: torch.device) -> None:
        """
        Args:
            blocks: number of blocks of each tensor.
            terms, unit_bits: see :class:`~spare_megatron.exact_sum.scales.Scales`.
            device: of the tensors that hold the scales.
        """
        self.bound_bits = 31 - terms.bit_length()
        self.measuring_steps = math.ceil((FIRST_BITS - SMALLEST_BITS) / (self.bound_bits - 1))
        self.steps = 0
        """Number of committed steps; it stops counting at ``measuring_steps``."""
        self._first = FIRST_BITS - GROWTH_BITS + unit_bits
        counts = torch.tensor(list(blocks), dtype=torch.int64)
        self._tensor_of = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
        self._tensors = len(counts)
        self.magnitudes = torch.full((int(counts.sum()),), _UNKNOWN, dtype=torch.int16, device=device)
        """16 m of each block (int16), for gradients of the loss itself (loss scale 1)."""

    @property
    def measuring(self) -> bool:
        """Whether the step in flight only measures scales, so that its sum is not applied."""
        return self.steps < self.measuring_steps

    def exponents(self, loss_scale_bits: int) -> torch.Tensor:
        """e of each block (int16) for a step whose loss is multiplied by 2^loss_scale_bits."""
        known = self.magnitudes.int()
        largest = torch.full((self._tensors,), _UNKNOWN, dtype=torch.int32, device=known.device)
        largest.scatter_reduce_(0, self._tensor_of, known, "amax")
        bits = torch.maximum(known, (largest - ROOM_BITS * PARTS)[self._tensor_of])
        guess = self._first - self.steps % self.measuring_steps * (self.bound_bits - 1)
        unknown = largest[self._tensor_of] == _UNKNOWN
        if self.measuring:
            unknown = known == _UNKNOWN
        magnitude = torch.where(unknown, guess, (bits + PARTS - 1).div(PARTS, rounding_mode="floor"))
        found = self.bound_bits - GROWTH_BITS - loss_scale_bits - magnitude
        return found.clamp_(-EXPONENT_MAX, EXPONENT_MAX).to(torch.int16)

    def update(self, sizes: torch.Tensor, exponents: torch.Tensor, loss_scale_bits: int, overflows: bool) -> None:
        """Take in a committed step.

        Args:
            sizes: float32 (blocks,), the largest magnitude of each block's sum, finite.
            exponents: int16 (blocks,), what :meth:`exponents` returned for the step.
            loss_scale_bits: as given to :meth:`exponents`.
            overflows: whether a piece of the step exceeded the bound somewhere.
        """
        bits = torch.frexp(sizes).exponent
        now = bits - loss_scale_bits
        if overflows:
            now = torch.where(bits + exponents >= self.bound_bits, now + SATURATED_BITS, now)
        now = torch.where(sizes > 0, now * PARTS, _UNKNOWN)
        before = self.magnitudes.int()
        fallen = torch.where((sizes > 0) & (before > _UNKNOWN), before - 1, before)
        self.magnitudes = torch.maximum(now, fallen).to(torch.int16)
        self.steps = min(self.steps + 1, self.measuring_steps)
