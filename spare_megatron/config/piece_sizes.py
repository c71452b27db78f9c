"""Which numbers of microbatches a piece can have."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, isqrt

from spare_megatron.config.errors import ConfigError

SOUGHT_MAX = 1 << 16
CHOSEN_FOR = ("exact",)
"""Values of --spare-reduce for which the size is chosen, by a job and by spare-plan. Only exact sums have a cost that
larger pieces save, and ``exact32`` keeps single microbatches: a sum in fp32 beside its accumulator would take the
memory that the mode is there to save."""


def sizes_that_fit(shards: Sequence[int]) -> tuple[int, ...]:
    """The possible C in ascending order: they divide the microbatches of a shard, in all batch sizes of the job. Of
    numbers above the square of SOUGHT_MAX, which no job has, some are left out."""
    common = gcd(*shards)
    small = [size for size in range(1, min(isqrt(common), SOUGHT_MAX) + 1) if common % size == 0]
    return tuple(sorted({*small, *(common // size for size in small)}))


def check(size: int, shards: Sequence[int], flag: str = "--spare-piece-microbatches") -> None:
    """ConfigError when pieces of ``size`` microbatches do not fill shards of these sizes; it names those that do."""
    fit = sizes_that_fit(shards)
    if size in fit:
        return
    below, above = [one for one in fit if one < size], [one for one in fit if one > size]
    near = " or ".join(map(str, [*below[-1:], *above[:1]]))
    of = " and ".join(str(one) for one in sorted(set(shards)))
    if size < 1:
        what = "must be at least 1"
    elif size > min(shards):
        what = f"is larger than a shard of {min(shards)} microbatches"
    else:
        what = f"does not divide the {of} microbatches of a shard"
    others = "" if len(fit) <= 2 else f" (all that fit: {', '.join(map(str, fit))})"
    raise ConfigError(f"{flag} {size} {what}; use {near}{others}")
