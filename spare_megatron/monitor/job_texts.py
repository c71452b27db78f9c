"""Texts about a job, from its picture. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from spare_megatron.config.plural import counted
from spare_megatron.monitor.durations import duration
from spare_megatron.monitor.job_picture import FailureCost, JobPicture
from spare_megatron.monitor.wall_time import PARTS, WallTime

SHOWN_S = 0.0005
"""A smaller part of a cost is not shown."""
SHOWN_SHARE = 0.0005
"""A smaller share of the wall time is not shown in a line of text."""


def share(part: float) -> str:
    """A share, 0 to 1, in percent."""
    return f"{100 * part:.1f} %"


def clock(time_unix_s: float) -> str:
    """Date and time of day, UTC."""
    return datetime.datetime.fromtimestamp(time_unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def parts_shown(wall_time: WallTime) -> list[str]:
    """The parts that took any time, the longest first; what is attributed to nothing comes last, whatever it is."""
    named = [part for part, seconds in wall_time.parts.items() if part != "unknown" and seconds > 0]
    return [*sorted(named, key=lambda part: -wall_time.parts[part]), "unknown"]


def effective_text(wall_time: WallTime) -> str:
    """The effective training time; empty before the first step."""
    if wall_time.parts["train"] <= 0:
        return ""
    return f"effective training time {share(wall_time.share('train'))} of {duration(wall_time.wall_s)}"


def wall_time_line(wall_time: WallTime) -> str:
    """The effective training time and where the rest went; empty before the first step."""
    head = effective_text(wall_time)
    rest = [
        f"{PARTS[part]} {share(wall_time.share(part))}"
        for part in parts_shown(wall_time)
        if part != "train" and wall_time.share(part) > SHOWN_SHARE
    ]
    return f"{head}; {', '.join(rest)}" if head and rest else head


def left_out_text(lines_left_out: int) -> str:
    """What could not be read of the job; empty where all was."""
    if not lines_left_out:
        return ""
    lines = counted(lines_left_out, "line")
    return f"{lines} of metrics.jsonl left out: an older version of spare_megatron wrote what this one does not read"


def cost_text(cost: FailureCost) -> str:
    """What a failure cost, by part."""
    parts = ((name.removeprefix("failures: "), cost.parts.get(part, 0.0)) for part, name in PARTS.items())
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds >= SHOWN_S)


def back_text(cost: FailureCost) -> str:
    """When the groups of a failure were members again."""
    if not cost.back_s:
        return "with the next job attempt" if cost.started_again else "not back"
    return ", ".join(f"group {group} after {duration(seconds)}" for group, seconds in sorted(cost.back_s.items()))


@dataclass(frozen=True)
class Happening:
    """A line of the job's story."""

    time_s: float
    """Seconds since 1970."""
    kind: str
    """'life', 'failure', 'drained', 'return', 'save', 'coordinator' or 'end'."""
    text: str


def happenings(picture: JobPicture) -> list[Happening]:
    """All that happened in the job, in order."""
    return sorted(_happenings(picture), key=lambda one: one.time_s)


def _happenings(picture: JobPicture) -> Iterator[Happening]:
    history = picture.history
    for job_attempt in history.job_attempts:
        spec = job_attempt.spec
        steps = f"steps {spec.first_step + 1} to {spec.last_step}"
        begun = job_attempt.begun_s or job_attempt.opened_s
        yield Happening(
            begun, "life", f"job attempt {job_attempt.number} begins: {counted(spec.num_groups, 'group')}, {steps}"
        )
        for time_s in job_attempt.coordinators_s:
            yield Happening(time_s, "coordinator", "another coordinator goes on from the journal")
    for failure in history.failures:
        text = "; ".join(failure.causes) or failure.reason
        if failure.adopted:
            text += (
                f"; {'shards' if len(failure.adopted) > 1 else 'shard'} {', '.join(map(str, failure.adopted))} adopted"
            )
        yield Happening(failure.time_s, "failure", text)
    for left in history.drained:
        yield Happening(left.time_s, "drained", f"group {left.group} has left on request, after step {left.step}")
    for one in history.returns:
        text = f"group {one.group} is back after {duration(one.away_s)}, from step {one.step + 1} on"
        yield Happening(one.time_s, "return", text)
    for save in history.saves:
        yield Happening(save.time_s, "save", f"the checkpoint of step {save.step} by group {save.group} counts")
    for job_attempt in history.job_attempts:  # behind the failure that was the end, which has the same time
        if job_attempt.ended_s is not None:
            text = f"job attempt {job_attempt.number} ends, {job_attempt.outcome}: {job_attempt.reason}"
            yield Happening(job_attempt.ended_s, "end", text)
