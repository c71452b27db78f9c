"""Draws frames of one run from its picture, one after another. Pure but for what it keeps between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from spare_megatron.config.plural import counted
from spare_megatron.monitor.durations import duration
from spare_megatron.monitor.job_picture import JobPicture, StepSeries
from spare_megatron.monitor.job_texts import (
    SHOWN_S,
    back_text,
    clock,
    cost_text,
    effective_text,
    happenings,
    parts_shown,
    share,
)
from spare_megatron.monitor.page.frame import Cell, Frame, StepPoint
from spare_megatron.monitor.speed_texts import speed_lines
from spare_megatron.monitor.status_texts import QUIET_S, outlook, short_shards
from spare_megatron.monitor.wall_time import PARTS, WallTime

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


REPORTED_MAX = 200
USUAL = 0.15
"""A speed that differs by less from the median group's is shown as the same: most cells then stay as they are."""


class RunDrawing:
    """Frames of one run."""

    def __init__(self) -> None:
        self._picture: JobPicture | None = None
        self._key: tuple[object, ...] | None = None
        """Other happenings have another one."""

    def frame(self, picture: JobPicture, now_unix_s: float) -> Frame:
        """The frame at ``now_unix_s``, seconds since 1970."""
        if picture is not self._picture:
            self._picture, self._points, self._key = picture, StepPoints(), None
            self._listed: list[Mapping[str, Any]] = []
        wall_time = picture.wall_time()
        history = picture.history
        ended = [job_attempt.ended_s for job_attempt in history.job_attempts]
        coordinators = sum(len(job_attempt.coordinators_s) for job_attempt in history.job_attempts)
        numbers = (len(history.failures), len(history.returns), len(history.saves), coordinators)
        key = (*numbers, len(wall_time.steps), len(wall_time.job_attempts), *ended, *history.returns[-1:])
        if key != self._key:
            self._key, self._listed = key, _listed(picture, wall_time)
        return Frame(
            _head(picture, wall_time, now_unix_s),
            cells_of(picture),
            tuple(_parts(wall_time)),
            self._listed,
            self._points.take(picture.series),
        )


def cells_of(picture: JobPicture) -> tuple[Cell, ...]:
    """How all groups are."""
    history, status = picture.history, picture.status
    if not history.job_attempts:
        return ()
    job_attempt, load = history.job_attempt, status.get("load", {})
    learners, stages, known = (status.get(name, {}) for name in ("learners", "learning", "groups"))
    cells = list[Cell]()
    for group in range(job_attempt.spec.num_groups):
        name = str(group)
        if group in history.live:
            state = "patching" if group in history.patching else "live"
            speed = known.get(name, {}).get("speed", 0.0)
            speed = 1.0 if abs(speed - 1) < USUAL else round(speed, 1)
            cells.append((state, load.get(name, 0), history.live[group], "", speed))
        elif name in learners and job_attempt.ended_s is None:
            cells.append(("learning", 0, learners[name], stages.get(name, ""), 0.0))
        else:
            cells.append(
                ("starting" if job_attempt.begun_s is None and job_attempt.ended_s is None else "dead", 0, -1, "", 0.0)
            )
    return tuple(cells)


def _head(picture: JobPicture, wall_time: WallTime, now_unix_s: float) -> dict[str, Any]:
    history, status = picture.history, picture.status
    if not history.job_attempts:
        return {"phase": "starting", "tone": "", "facts": (), "lines": ("no group has come yet",)}
    job_attempt, quiet_s = history.job_attempt, picture.quiet_s(now_unix_s)
    lines = [*outlook(status), *speed_lines(status)] if status else []
    if quiet_s > QUIET_S:
        whole_s = QUIET_S * (quiet_s // QUIET_S)  # the page changes that often
        quiet = f"{whole_s:g} s" if whole_s < 60 else duration(whole_s)
        lines.insert(0, f"the coordinator has written nothing new for {quiet}")
    phase = job_attempt.outcome or ("starting" if job_attempt.begun_s is None else "training")
    if picture.is_over:
        phase = job_attempt.outcome or "failed"
    tone = "bad" if phase in ("wipe-out", "failed") else "warn" if quiet_s > QUIET_S else "good"
    threatened = status.get("hosts_least") == 1 < len(job_attempt.spec.offsets)
    if phase == "training" and (threatened or short_shards(status.get("state_copies"))):
        tone = "warn"
    return {
        "phase": phase,
        "tone": tone,
        "facts": tuple(_facts(picture)),
        "effective": effective_text(wall_time),
        "lines": tuple(lines),
        "share": job_attempt.committed / max(1, job_attempt.spec.last_step),
        "marks": [round(failure.time_s, 3) for failure in history.failures[-REPORTED_MAX:]],
        "began": f"began {clock(history.job_attempts[0].opened_s)} UTC",
    }


def _facts(picture: JobPicture) -> Iterator[tuple[str, str]]:
    """(name, value)."""
    history, series = picture.history, picture.series
    job_attempt = history.job_attempt
    yield "step", f"{job_attempt.committed} of {job_attempt.spec.last_step}"
    if series.step:
        yield "loss", f"{series.loss[-1]:.4f}" if math.isfinite(series.loss[-1]) else "-"
        yield "step time", duration(series.step_time_s[-1])
    yield "groups live", f"{len(history.live)} of {job_attempt.spec.num_groups}"
    if picture.status.get("load") and job_attempt.ended_s is None:
        yield "load", counted(max(picture.status["load"].values()), "piece")
    masked = sum(failure.masked for failure in history.failures)
    others = len(history.failures) - masked
    yield "failures", f"{masked} masked" + (f", {others} not" if others else "")
    yield "returns", str(len(history.returns))
    yield "lives", str(len(history.job_attempts))


def _parts(wall_time: WallTime) -> Iterator[tuple[str, str, str, float]]:
    for part in parts_shown(wall_time) if wall_time.wall_s else ():
        seconds, portion = wall_time.parts[part], wall_time.share(part)
        if abs(seconds) < SHOWN_S:
            seconds = portion = 0.0
        yield part, PARTS[part], f"{duration(seconds)}, {share(portion)}", round(max(0.0, portion), 4)


def _listed(picture: JobPicture, wall_time: WallTime) -> list[Mapping[str, Any]]:
    """The last happenings, each with the protocol machine's reason and cost where it has them."""
    costs = iter(sorted(picture.failures(wall_time), key=lambda cost: cost.failure.time_s))
    listed: list[Mapping[str, Any]] = []
    saves = 0  # in a row
    for one in happenings(picture):
        entry: dict[str, Any] = {"time": one.time_s, "clock": clock(one.time_s), "kind": one.kind, "text": one.text}
        if one.kind == "failure":
            cost = next(costs)
            entry |= {
                "why": cost.failure.reason,
                "groups": cost.failure.groups,
                "cost": cost_text(cost),
                "back": back_text(cost),
                "masked": cost.failure.masked,
            }
        elif one.kind == "save":
            saves += 1
            if saves > 1:  # they would push out what happens less often
                listed.pop()
                entry["text"] += f", and {saves - 1} before it"
        saves = saves if one.kind == "save" else 0
        listed.append(entry)
    return listed[-REPORTED_MAX:]
