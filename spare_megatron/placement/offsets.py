"""The offsets of a placement: independent (any two groups share at most one shard) wherever that exists."""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.placement.overlap import max_overlap, overlap_bound
from spare_megatron.placement.rulers import absent, known_ruler
from spare_megatron.placement.search import EffortSpentError, exhaustive, tabu


@dataclass(frozen=True)
class Offsets:
    """Offsets of least largest overlap, and how much of 'least' is proven."""

    offsets: tuple[int, ...]
    overlap: int
    unproven: tuple[int, ...]
    """Smaller overlaps that were not found and not proven impossible either."""


def independent_offsets(num_groups: int, redundancy: int) -> Offsets:
    """r offsets mod N, first 0, ascending, of the least largest overlap that was found. 1 <= r <= N is assumed.

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
    """(offsets or None, whether None is proven)."""
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
