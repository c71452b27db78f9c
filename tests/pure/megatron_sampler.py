"""What megatron-core's own samplers give to a rank, written down a second time as a reference."""

from __future__ import annotations

Rows = list[list[int]]


def in_order(total: int, consumed: int, size: int, rank: int, ranks: int) -> Rows:
    """Microbatches of one data-parallel rank: whole rows of the remaining samples, cut by rank; the rest is dropped."""
    left = list(range(consumed, total))
    rows = [left[start : start + size * ranks] for start in range(0, len(left), size * ranks)]
    return [row[rank * size : (rank + 1) * size] for row in rows if len(row) == size * ranks]
