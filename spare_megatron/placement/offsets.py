"""Finds the offsets of a placement: independent ones (any two groups share at most one shard) wherever they exist."""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.placement.overlap import max_overlap, overlap_bound
from spare_megatron.placement.rulers import absent, known_ruler
from spare_megatron.placement.search import EffortSpentError, exhaustive, tabu


@dataclass(frozen=True)
class Offsets:
    """Offsets with the smallest largest overlap (shards that two groups share) found, and what is proven about it."""

    offsets: tuple[int, ...]
    overlap: int
    unproven: tuple[int, ...]
    """Smaller overlaps for which no offsets were found, but which are not proven impossible."""


def independent_offsets(num_groups: int, redundancy: int) -> Offsets:
    """r ascending offsets mod N, the first 0, with the smallest largest overlap that was found; needs 1 <= r <= N.

    A set of r > N/2 offsets and its complement have the same differences up to a constant 2r - N at every distance,
    so the smaller of the two is searched.
    """
    if 2 * redundancy <= num_groups:
        return _search(num_groups, redundancy)
    common = 2 * redundancy - num_groups
    rest = _search(num_groups, num_groups - redundancy) if redundancy < num_groups else Offsets((), 0, ())
    kept = sorted(set(range(num_groups)) - set(rest.offsets))
    offsets = tuple(mark - kept[0] for mark in kept)
    return Offsets(offsets, max_overlap(num_groups, offsets), tuple(low + common for low in rest.unproven))


def _search(num_groups: int, redundancy: int) -> Offsets:
    unproven: list[int] = []
    overlap = overlap_bound(num_groups, redundancy)
    while True:
        found, proven = _with_overlap(num_groups, redundancy, overlap)
        if found is not None:
            return Offsets(found, overlap, tuple(unproven))
        if not proven:
            unproven.append(overlap)
        overlap += 1


def _with_overlap(num_groups: int, redundancy: int, overlap: int) -> tuple[tuple[int, ...] | None, bool]:
    """(offsets with this overlap or None, whether it is proven that there are none if None)."""
    if overlap == 1:
        if absent(num_groups, redundancy):
            return None, True
        ruler = known_ruler(num_groups, redundancy)
        if ruler is not None:
            return ruler, True
    try:
        return exhaustive(num_groups, redundancy, overlap), True
    except EffortSpentError:
        return tabu(num_groups, redundancy, overlap), False
