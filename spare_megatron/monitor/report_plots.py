"""The plots of a report, as its template draws them: lines, ticks and marks in the coordinates of an ``svg`` element.
Pure.

They are drawn here because a launcher makes the report when its job ends: importing matplotlib would take it longer
than all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spare_megatron.monitor.job_history import Failure
from spare_megatron.monitor.job_picture import JobPicture, StepSeries

POINTS_MAX = 1500
"""More steps than that are drawn in so many bins."""
MARKS_MAX = 500
"""Of more failures, so many of the last ones are marked."""
WIDTH, HEIGHT = 900, 210
LEFT, RIGHT, TOP, BOTTOM = 64, 890, 8, 170
"""The area of a plot in its svg element."""
TICKS = 5
GAP_S = 0.001
PlotPoint = tuple[float, float]


@dataclass(frozen=True)
class StepPlot:
    """One plot."""

    y_name: str
    x_name: str
    lines: list[str]
    """Each the ``points`` of a polyline."""
    x_ticks: list[tuple[float, str]]
    """(coordinate, text)."""
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, Failure]]
    """(x coordinate, failure)."""


def step_plots(picture: JobPicture) -> list[StepPlot]:
    """Loss over steps, step time and live groups over time. There must be a step."""
    series, failures = picture.series, picture.history.failures
    began_s = series.time_unix_s[0] - series.step_time_s[0]
    unit_s, unit = _unit(series.time_unix_s[-1] - began_s)
    bins = _bins(len(series.step))
    marks = [((failure.time_s - began_s) / unit_s, failure) for failure in failures[-MARKS_MAX:]]
    name = f"{unit} since the first step"
    if len(failures) > MARKS_MAX:
        name += f" (the last {MARKS_MAX} of {len(failures)} failures are marked)"
    losses = [(series.step[one[-1]], series.loss[one[-1]]) for one in bins]
    parts = _without_gaps(series, bins)
    times = [[(series.time_unix_s[one[-1]] - began_s) / unit_s for one in part] for part in parts]
    longest = [
        list(zip(at, _each(part, series.step_time_s, max), strict=True)) for at, part in zip(times, parts, strict=True)
    ]
    live = [
        _stairs(list(zip(at, _each(part, series.live_groups, min), strict=True)))
        for at, part in zip(times, parts, strict=True)
    ]
    lines = [line for line in _growing(losses) if line]
    return [
        *([_plot("loss", "step", lines, (), from_zero=False)] if lines else []),
        _plot("step time, s", name, longest, marks),
        _plot("live groups", name, live, marks),
    ]


def _plot(
    y_name: str,
    x_name: str,
    lines: Sequence[Sequence[PlotPoint]],
    marks: Iterable[tuple[float, Failure]],
    from_zero: bool = True,
) -> StepPlot:
    xs, ys = zip(*(point for line in lines for point in line), strict=True)
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(0.0 if from_zero else min(ys), max(ys))
    across = _scale(min(xs), max(xs), LEFT, RIGHT)
    up = _scale(min(y_ticks[0], *ys), max(y_ticks[-1], *ys), BOTTOM, TOP)
    return StepPlot(
        y_name,
        x_name,
        [" ".join(f"{across(x)},{up(y)}" for x, y in line) for line in lines],
        [(across(x), f"{x:g}") for x in x_ticks if min(xs) <= x <= max(xs)],
        [(up(y), f"{y:g}") for y in y_ticks],
        [(across(x), failure) for x, failure in marks],
    )


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """The coordinate of a value between ``low`` and ``high``."""
    length = high - low or 1.0
    return lambda value: round(first + (value - low) / length * (last - first), 1)


def _ticks(low: float, high: float) -> list[float]:
    """Some round numbers around the values, about ``TICKS`` of them."""
    rough = (high - low) / TICKS or abs(high) / TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(apart * number, 10) for number in range(math.floor(low / apart), math.ceil(high / apart) + 1)]


def _unit(length_s: float) -> tuple[float, str]:
    """Seconds of a unit of time for an axis, and its name."""
    if length_s < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if length_s < 36_000 else (3600.0, "hours")


def _bins(number: int) -> list[range]:
    """The steps of each point."""
    points = min(number, POINTS_MAX)
    edges = [index * number // points for index in range(points + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


def _each(bins: Sequence[range], values: Sequence[float], of: Callable[..., float]) -> list[float]:
    return [of(values[one.start : one.stop]) for one in bins]


def _without_gaps(series: StepSeries, bins: Sequence[range]) -> list[list[range]]:
    """The bins in parts: a step that does not begin with the end of the one before begins another part."""
    parts = [[bins[0]]]
    for before, after in pairwise(bins):
        began_s = series.time_unix_s[after[0]] - series.step_time_s[after[0]]
        if began_s > series.time_unix_s[before[-1]] + GAP_S:
            parts.append([])
        parts[-1].append(after)
    return parts


def _growing(points: Iterable[PlotPoint]) -> list[list[PlotPoint]]:
    """The points that have a value, in lines within which the step grows."""
    lines: list[list[PlotPoint]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            if lines[-1] and x <= lines[-1][-1][0]:
                lines.append([])
            lines[-1].append((x, y))
    return lines


def _stairs(points: Sequence[PlotPoint]) -> list[PlotPoint]:
    """The points with a corner before each change."""
    corners = [(after[0], before[1]) for before, after in pairwise(points)]
    return [point for pair in zip(points, corners, strict=False) for point in pair] + [points[-1]]
