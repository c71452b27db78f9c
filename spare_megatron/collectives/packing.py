"""64-bit partial sums on the wire, without the bytes that only repeat the sign.

Integer sums use up to 62 bits, but most blocks of a tensor are far below its largest element. A *packed* segment has
for each block of BLOCK elements one byte, its *width* w (1 to 8), and then the elements of all blocks, each as its
lowest w bytes, in little-endian order. w is the least that keeps every element of the block. So no bit of a sum
depends on it, and no bound has to hold: a block that needs all 64 bits has 8 bytes an element.

The compiled ring (kernels/ring.cpp) does the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 1024

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


def most_bytes(count: int) -> int:
    """How many bytes ``count`` elements take at most."""
    return blocks(count) + 8 * count


def blocks(count: int) -> int:
    """The number of blocks of ``count`` elements, each of which has a width in front."""
    return -(-count // BLOCK)


def packed(values: Integers) -> Bytes:
    """A packed segment."""
    starts = np.arange(0, len(values), BLOCK)
    used = np.bitwise_or.reduceat(values ^ (values >> 63), starts)
    widths = np.array([int(one).bit_length() // 8 + 1 for one in used], dtype=np.uint8)
    octets = values.astype("<i8", copy=False).view(np.uint8).reshape(-1, 8)
    parts = (octets[start : start + BLOCK, :width].ravel() for start, width in zip(starts, widths, strict=True))
    return np.concatenate([widths, *parts])


def packed_bytes(widths: Bytes, count: int) -> int:
    """The size of a packed segment of ``count`` elements that begins with these widths; 0 where they are none."""
    if not ((widths >= 1) & (widths <= 8)).all():
        return 0
    return int(widths.sum(dtype=np.int64)) * BLOCK - (BLOCK * len(widths) - count) * int(widths[-1]) + len(widths)


def unpacked(segment: Bytes, count: int, out: Integers) -> None:
    """Write the ``count`` elements of a packed segment to ``out``."""
    number = blocks(count)
    at, octets = number, np.zeros((BLOCK, 8), dtype=np.uint8)
    for block, width in enumerate(segment[:number].tolist()):
        start = block * BLOCK
        stop = min(start + BLOCK, count)
        here = octets[: stop - start]
        here[:, :width] = segment[at : at + (stop - start) * width].reshape(-1, width)
        here[:, width:] = np.where(here[:, width - 1 : width] >= 128, 255, 0)
        out[start:stop] = here.view("<i8").ravel()
        at += (stop - start) * width
