"""Reads failure traces, CSV lines ``time_s,node`` in order of seconds since the job's start, and derives rates of
them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gamma, isfinite

import numpy as np

from spare_megatron.config.errors import ConfigError

FIRST_GAPS_MAX = 50.0
"""When the first loss is more mean gaps than this after time 0, the times do not count from the job's start: by chance
that has a probability of e^-50 with exponential gaps and of 0.2% with gaps of Weibull shape 0.3."""
FIRST_CHANCE_MIN = 1e-4
"""Smallest probability of a first loss that is accepted. A mean of n gaps is inexact: the first loss is x of these
means away with probability (1 + x / n)^-n."""


@dataclass(frozen=True)
class Trace:
    """The losses of a trace, in order of time (seconds)."""

    times_s: tuple[float, ...]
    nodes: tuple[str, ...]
    first_line: str = "the trace"
    """File and line of the first loss, for messages; the default is for losses that are not from a file."""

    @property
    def mtbf_s(self) -> float:
        """Mean time between losses: the time of the last loss / the number of losses.

        Raises:
            ConfigError: the times cannot count from the job's start."""
        gaps = len(self.times_s) - 1
        gap_s = (self.times_s[-1] - self.times_s[0]) / max(1, gaps)
        most = max(FIRST_GAPS_MAX, gaps * (FIRST_CHANCE_MIN ** (-1 / max(1, gaps)) - 1))
        if gap_s > 0 and self.times_s[0] > most * gap_s:
            raise ConfigError(
                f"{self.first_line}: the first loss is at {self.times_s[0]:g} s, but losses are {gap_s:g} s apart on "
                "the mean; give times since the start of the job: subtract its start time from each"
            )
        return self.times_s[-1] / len(self.times_s)

    def weibull_shape(self) -> float:
        """Weibull shape of the gaps between losses, from their coefficient of variation; 0.3 to 3.

        The time up to the first loss is not used, as the trace may begin anywhere between two. With fewer than 10 gaps
        the shape is 1."""
        gaps = np.diff(np.array(self.times_s))
        if len(gaps) < 10 or gaps.std() == 0:
            return 1.0
        target = float((gaps.std() / gaps.mean()) ** 2)
        low, high = 0.3, 3.0

        for _ in range(60):
            shape = (low + high) / 2
            if gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1 > target:
                low = shape
            else:
                high = shape
        return (low + high) / 2


def parse_trace(lines: Iterable[str], name: str) -> Trace:
    """The trace in these lines; a heading 'time_s,node' and empty lines are skipped. ``name`` is for messages.

    Raises:
        ConfigError: naming the line."""
    times: list[float] = []
    nodes: list[str] = []
    first = 0
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or (number == 1 and line.replace(" ", "").lower() in ("time_s,node", "time,node")):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        time_s = _number(cells[0]) if len(cells) == 2 and cells[1] else None
        if time_s is None or time_s < 0:
            raise ConfigError(f"{name} line {number} is {line!r}, but must be TIME_S,NODE with a time of at least 0")
        if times and time_s < times[-1]:
            raise ConfigError(f"{name} line {number}: time {time_s:g} is before {times[-1]:g}; sort the lines by time")
        first = first or number
        times.append(time_s)
        nodes.append(cells[1])
    if not times or times[-1] <= 0:
        raise ConfigError(f"{name} has no loss after time 0; give at least one line TIME_S,NODE")
    return Trace(tuple(times), tuple(nodes), f"{name} line {first}")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
