"""The committed steps of a job as at most so many points, however long it runs. Pure."""

from __future__ import annotations

import math
from itertools import zip_longest

from spare_megatron.monitor.job_picture import StepSeries
from spare_megatron.monitor.page.frame import StepPoint

POINTS_MAX = 800
"""More are joined in pairs; a browser draws three plots of so many within a few milliseconds."""


class StepPoints:
    """Points of one series. A point stands for ``width`` steps, the last one for fewer."""

    def __init__(self) -> None:
        self.points: list[StepPoint] = []
        self._width, self._taken = 1, 0

    def take(self, series: StepSeries) -> tuple[StepPoint, ...]:
        """All points, with the steps that are new in ``series``."""
        for index in range(self._taken, len(series.step)):
            loss = series.loss[index]
            point = (
                series.step[index],
                round(series.time_unix_s[index], 3),
                float(f"{series.step_time_s[index]:.4g}"),
                series.live_groups[index],
                float(f"{loss:.6g}") if math.isfinite(loss) else None,
            )
            if index % self._width:
                self.points[-1] = _joined(self.points[-1], point)
            else:
                self.points.append(point)
            if len(self.points) > POINTS_MAX:
                self._halve()
        self._taken = len(series.step)
        return tuple(self.points)

    def _halve(self) -> None:
        pairs = zip_longest(self.points[::2], self.points[1::2])
        self.points = [_joined(first, second) if second else first for first, second in pairs]
        self._width *= 2


def _joined(first: StepPoint, second: StepPoint) -> StepPoint:
    loss = first[4] if second[4] is None else second[4]
    return second[0], second[1], max(first[2], second[2]), min(first[3], second[3]), loss
