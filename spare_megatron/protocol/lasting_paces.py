"""Measures who is slow for long: paces beside the median group's, over the last committed steps. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from spare_megatron.protocol.messages import SpeedsMeasured
from spare_megatron.protocol.speeds import SLOW, slowness_after
from spare_megatron.protocol.state import State

STEPS = 18
"""So many committed steps in a row are measured, each half of which has a median."""


class LastingPaces:
    """Follows all groups of one job attempt at a time."""

    def __init__(self, steps: int = STEPS) -> None:
        """``steps``: W, twice an odd number."""
        self._steps = steps
        self._rows: deque[NDArray[np.float64]] = deque()
        """[N] for each of the last steps: how many times as long as the median group a group took for a piece; NaN
        where that is not known of its present process."""
        self._slow: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """[N]: in how many of these steps the group was slow."""
        self._live: Mapping[int, int] = {}
        self._place = (0, 0)
        """(job attempt, the last of these steps)."""

    def committed(self, state: State, piece_s: Mapping[int, float]) -> SpeedsMeasured | None:
        """A step was committed, which led to ``state``; in it groups took ``piece_s`` seconds for a piece, as far as
        is known. The event that follows; None where nothing changes by it."""
        place = (state.job_attempt, state.committed[0])
        if place != (self._place[0], self._place[1] + 1):
            self._rows.clear()
        self._place = place
        if state.phase != "running" or state.job.granularity == "shard":
            self._rows.clear()
            return None
        self._add(state, {group: one_s for group, one_s in piece_s.items() if one_s > 0 and group in state.live})
        if len(self._rows) < self._steps or state.committed[0] - self._steps < state.slowness_step:
            return None
        half = self._steps // 2
        may = np.flatnonzero(self._slow >= half).tolist()
        looked_at = [group for group in sorted({*may, *state.slowness}) if group in state.live]
        if not looked_at:
            return None
        table = np.stack(self._rows)[:, looked_at]
        medians = np.round([np.median(table[:half], axis=0), np.median(table[half:], axis=0)], 3).T.tolist()
        paces = tuple(
            (group, state.live[group], first, second)
            for group, (first, second) in zip(looked_at, medians, strict=True)
            if not math.isnan(first + second)
        )
        event = SpeedsMeasured(state.committed[0], self._steps, paces)
        return event if slowness_after(state, event) != state.slowness else None

    def _add(self, state: State, piece_s: Mapping[int, float]) -> None:
        row = np.full(state.job.num_groups, np.nan)
        if piece_s:
            row[list(piece_s)] = list(piece_s.values())
            row /= median_low(piece_s.values())
        if self._live is not state.live:
            others = sorted({group for group, _ in self._live.items() ^ state.live.items()})
            for known in self._rows:
                known[others] = np.nan
            self._live = state.live
        self._rows.append(row)
        if len(self._rows) > self._steps:
            self._rows.popleft()
        self._slow = (np.stack(self._rows) >= SLOW).sum(axis=0)
