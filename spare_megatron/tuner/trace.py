"""Failure traces: CSV lines ``time_s,node``, in order of time since the job's start; what they say of the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gamma, isfinite

import numpy as np

from spare_megatron.config.errors import ConfigError

FIRST_GAPS_MAX = 50.0
"""A first loss so many mean gaps after time 0 is not counted from the job's start: a random one has a chance of e^-50,
one of shape 0.3 of 0.2%."""
FIRST_CHANCE_MIN = 1e-4
"""Few gaps tell their mean badly: with n of them a random first loss is x means away with chance (1 + x / n)^-n, and
one less likely than this is refused."""


@dataclass(frozen=True)
class Trace:
    """Losses, ascending in time."""

    times_s: tuple[float, ...]
    nodes: tuple[str, ...]
    first_line: str = "the trace"
    """File and line of the first loss, for messages; the default is for losses that were in no file."""

    @property
    def mtbf_s(self) -> float:
        """Time up to the last loss over the number of losses.

        Raises:
            ConfigError: the times are not from the job's start."""
        gaps = len(self.times_s) - 1
        gap_s = (self.times_s[-1] - self.times_s[0]) / max(1, gaps)
        most = max(FIRST_GAPS_MAX, gaps * (FIRST_CHANCE_MIN ** (-1 / max(1, gaps)) - 1))
        if gap_s > 0 and self.times_s[0] > most * gap_s:
            raise ConfigError(
                f"{self.first_line}: the first loss is at {self.times_s[0]:g} s, but losses are {gap_s:g} s apart on "
                "the mean; times count from the start of the job: subtract it from each"
            )
        return self.times_s[-1] / len(self.times_s)

    def weibull_shape(self) -> float:
        """Of the gaps between the losses of the cluster, by their coefficient of variation; 0.3 to 3.

        The time up to the first loss is no gap: the trace may begin anywhere between two. Fewer than 10 gaps say
        nothing: 1."""
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
    """``name`` is the file's, for the message. A first line 'time_s,node' and empty lines are skipped.

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
        raise ConfigError(f"{name} holds no loss after time 0; give at least one line TIME_S,NODE")
    return Trace(tuple(times), tuple(nodes), f"{name} line {first}")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
