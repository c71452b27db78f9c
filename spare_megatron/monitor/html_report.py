"""Writes the report of a job: one HTML file that needs nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import jinja2

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.monitor import job_texts, report_plots
from spare_megatron.monitor.durations import duration
from spare_megatron.monitor.job_picture import FailureCost, JobPicture
from spare_megatron.monitor.observed_choice import observed_choice
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.monitor.wall_time import PARTS, WallTime
from spare_megatron.monitor.written_file import write_drawn
from spare_megatron.runtime.run_directory import RunDirectory

TEMPLATE = "report.html.j2"
FAILURES_SHOWN, HAPPENINGS_SHOWN = 500, 1000


@dataclass(frozen=True)
class _PartRow:
    """One part of the wall time."""

    part: str
    name: str
    seconds: str
    share: str
    percent: float


def write_report(run_dir: RunDirectory, path: Path) -> None:
    """Write the report of the job of ``run_dir`` to ``path``.

    Raises:
        ConfigError: the directory is of no job, cannot be read, or has no committed step; or ``path`` cannot be
            written.
    """
    text = report_html(RunFiles(run_dir).look(), str(run_dir.path))
    write_drawn("report", path, text.encode("utf-8", "replace"))


@functools.cache
def template() -> jinja2.Template:
    """What a report is made of, compiled."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))


def report_html(picture: JobPicture, name: str) -> str:
    """The report of a job as HTML; ``name`` says which. Raises ConfigError where no step was committed."""
    if not picture.series.step:
        why = job_texts.left_out_text(picture.lines_left_out)
        raise ConfigError(why or f"{name} has no committed step yet, so there is nothing to report")
    wall_time = picture.wall_time()
    costs = picture.failures(wall_time)
    reported = [one for one in job_texts.happenings(picture) if one.kind != "failure"]
    return template().render(
        name=name,
        head=job_texts.effective_text(wall_time) or "its first steps",
        facts=list(_facts(picture, wall_time)),
        parts=[_row(part, wall_time) for part in job_texts.parts_shown(wall_time)],
        plots=report_plots.step_plots(picture),
        area=report_plots,
        costs=costs[-FAILURES_SHOWN:],
        costs_left_out=max(0, len(costs) - FAILURES_SHOWN),
        reported=reported[-HAPPENINGS_SHOWN:],
        reported_left_out=max(0, len(reported) - HAPPENINGS_SHOWN),
        choice=_choice(picture, wall_time, costs),
        text=job_texts,
        duration=duration,
    )


def _facts(picture: JobPicture, wall_time: WallTime) -> Iterator[tuple[str, str]]:
    """What stands at the top: (name, value)."""
    series, history = picture.series, picture.history
    job_attempt = history.job_attempt
    yield "outcome", job_attempt.outcome or "running"
    yield "began", f"{job_texts.clock(history.job_attempts[0].opened_s)} UTC"
    yield "wall time", duration(wall_time.wall_s)
    yield "last step", f"{series.step[-1]} of {job_attempt.spec.last_step}"
    yield "groups", f"{job_attempt.spec.num_groups}, redundancy {len(job_attempt.spec.offsets)}"
    masked = sum(failure.masked for failure in history.failures)
    yield "failures", f"{masked} masked, {counted(len(history.failures) - masked, 'other')}"
    yield "returns", str(len(history.returns))
    yield "lives", str(len(history.job_attempts))
    losses = [loss for loss in series.loss if math.isfinite(loss)]
    if losses:
        yield "loss", f"{losses[0]:.4f} to {losses[-1]:.4f}"
    if picture.lines_left_out:
        yield "not read", job_texts.left_out_text(picture.lines_left_out)


def _row(part: str, wall_time: WallTime) -> _PartRow:
    seconds, share = wall_time.parts[part], wall_time.share(part)
    return _PartRow(part, PARTS[part], duration(seconds), job_texts.share(share), round(100 * max(0.0, share), 3))


def _choice(picture: JobPicture, wall_time: WallTime, costs: list[FailureCost]) -> tuple[list[tuple[str, str]], str]:
    """The rows of what spare-plan would choose, and its reason."""
    try:
        choice = observed_choice(picture, wall_time, costs)
    except ConfigError as error:
        return [], str(error)
    return choice.rows(), choice.reason
