"""The L2 norm of gradients as a sum of integers: the same bits for any division of the elements over tensors and ranks.

megatron-core adds squares in fp32, tensor by tensor and rank by rank, so its norm, and with clipping each weight,
depends in its last digits on how the layers are split. Here

* the largest magnitude is that of all ranks (a maximum rounds nothing), below 2^m;
* with e = 26 - m each element x becomes rint((x * 2^e)^2): the square, of up to 48 bits, is exact in double and is
  rounded once, to a unit that is at most 2^-50 of the largest square;
* these integers, up to 2^52, are added as two int64 per rank and over ranks: a sum of up to 2^41 elements is exact;
* the sum is rounded to double, and so is its root.

The norm is at most n / 2 of those units off under the root for n elements; relative to it that is n * 2^-52 where only
the largest element counts, and 2^-53 and what three roundings in double make where elements are of like size.

May assume: exact sums, whose gradients are the same bits on all ranks that share parameters.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist

from spare_megatron import kernels
from spare_megatron.exact_sum.formats import INFINITY_BITS

Summand = tuple[Sequence[torch.Tensor], dist.ProcessGroup]
"""Some of this rank's gradients, and the ranks of which each has other elements of the same kind."""


def gradient_norm(parts: Sequence[Summand], device: torch.device) -> float:
    """The norm of all gradients of the group's world: infinite where one is, NaN where one is, 0 where there are none.

    Collective in the world and in each of the parts' groups, in their order, which is the same on all ranks. Waits for
    the device twice.

    Args:
        parts: gradients of any shape; parts of one group may be several.
        device: of the gradients, and of sums where this rank has none.
    """
    of_group: list[tuple[dist.ProcessGroup, list[torch.Tensor]]] = []
    for gradients, group in parts:
        flat = [one.detach().float().contiguous().view(-1) for one in gradients]
        known = next((there for other, there in of_group if other is group), None)
        if known is None:
            of_group.append((group, flat))
        else:
            known += flat
    everything = [one for _, flat in of_group for one in flat]
    top = kernels.largest(everything) if everything else torch.zeros(1, dtype=torch.int32, device=device)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    bits = int(top)
    (largest,) = struct.unpack("<f", struct.pack("<I", bits))
    if bits == 0 or bits >= INFINITY_BITS:
        return float(largest)
    exponent = kernels.SQUARE_BITS - math.frexp(largest)[1]
    total = 0
    for group, flat in of_group:
        sums = kernels.squares(flat, exponent) if flat else torch.zeros(2, dtype=torch.int64, device=device)
        dist.all_reduce(sums, group=group)
        low, high = sums.tolist()
        total += (high << 32) + low
    return math.ldexp(math.sqrt(total), -exponent)
