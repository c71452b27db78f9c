"""State shards: each element of a buffer is in exactly one, borders lie where updates may be cut, sizes are alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.placement.shard_borders import BufferBorders, UnitRun

SIZES = st.integers(1, 60)
UNITS = st.sampled_from((1, 2, 7, 16, 1000))
PARAMETERS = st.lists(st.tuples(SIZES, UNITS, st.integers(0, 20), st.integers(0, 9)), max_size=8)
"""Of each: elements, unit, index of its first element in the parameter, padding behind it."""


def runs_of(parameters: Sequence[tuple[int, int, int, int]]) -> tuple[list[UnitRun], int]:
    """The runs of a buffer, and its size."""
    runs, end = list[UnitRun](), 0
    for size, unit, first, padding in parameters:
        runs.append(UnitRun(end, end + size, first, unit))
        end += size + padding
    return runs, end


def owners(layout: BufferBorders) -> list[int]:
    """The shard of each element, by the borders."""
    return [shard for shard in range(len(layout.borders) - 1) for _ in range(*layout.borders[shard : shard + 2])]


@given(PARAMETERS, st.integers(1, 9))
def test_each_element_is_in_exactly_one_shard(parameters: Sequence[tuple[int, int, int, int]], shards: int) -> None:
    runs, size = runs_of(parameters)
    layout = BufferBorders(runs, size, shards)
    assert layout.borders[0] == 0
    assert layout.borders[-1] == size
    assert sorted(layout.borders) == list(layout.borders)
    assert len(layout.borders) == shards + 1
    found = list(layout.spans(0, size))
    assert [span.shard for span in found for _ in range(span.start, span.stop)] == owners(layout)


@given(PARAMETERS, st.integers(1, 9), st.data())
def test_any_range_is_cut_as_the_whole_buffer(
    parameters: Sequence[tuple[int, int, int, int]], shards: int, data: st.DataObject
) -> None:
    runs, size = runs_of(parameters)
    layout = BufferBorders(runs, size, shards)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = list(layout.spans(start, stop))
    assert all(span.start < span.stop for span in found)
    assert [element for span in found for element in range(span.start, span.stop)] == list(range(start, stop))
    mine = owners(layout)
    assert all({span.shard} == set(mine[span.start : span.stop]) for span in found)


@given(PARAMETERS, st.integers(1, 9))
def test_a_border_lies_between_parameters_or_at_a_unit_of_one(
    parameters: Sequence[tuple[int, int, int, int]], shards: int
) -> None:
    runs, size = runs_of(parameters)
    for border in BufferBorders(runs, size, shards).borders:
        for run in runs:
            if run.start < border < run.stop:
                assert (border - run.start + run.first) % run.unit == 0


@given(PARAMETERS, st.integers(1, 9))
def test_sizes_differ_by_less_than_two_units(parameters: Sequence[tuple[int, int, int, int]], shards: int) -> None:
    runs, size = runs_of(parameters)
    borders = BufferBorders(runs, size, shards).borders
    most = max((run.unit for run in runs), default=1)
    assert all(0 <= size * number // shards - border < most for number, border in enumerate(borders))
    sizes = [stop - start for start, stop in itertools.pairwise(borders)]
    assert max(sizes) - min(sizes) < 2 * most


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), UNITS, st.integers(1, 9))
def test_sizes_of_whole_equal_units_differ_by_at_most_one(lengths: list[int], unit: int, shards: int) -> None:
    runs, size = runs_of([(length * unit, unit, 0, 0) for length in lengths])
    borders = BufferBorders(runs, size, shards).borders
    sizes = [stop - start for start, stop in itertools.pairwise(borders)]
    assert max(sizes) - min(sizes) in (0, unit)


def test_a_parameter_whose_update_needs_all_of_it_is_never_cut() -> None:
    runs = [UnitRun(0, 10, 0, 10), UnitRun(10, 40, 0, 30), UnitRun(40, 50, 0, 10)]
    assert BufferBorders(runs, 50, 3).borders == (0, 10, 10, 50)
    assert BufferBorders(runs, 50, 5).borders == (0, 10, 10, 10, 40, 50)
