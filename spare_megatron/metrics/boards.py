"""Writes scalars to TensorBoard and W&B under Megatron's names, and our own under ``spare/*``; and OpenTelemetry.

Only the coordinator writes them, once per job; torch is not needed. A restarted coordinator adds an event file and
resumes the W&B run whose id it finds in the run directory; so does the job that Slurm starts again. Steps that are
computed again after a wipe-out are written again to TensorBoard, which keeps both; a W&B run only goes forwards.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config.job import JobDescription
from spare_megatron.metrics.iteration_line import EVALUATIONS, loss_values, throughput
from spare_megatron.metrics.telemetry import Telemetry

_NAMES = {"grad_norm": "grad-norm", "num_zeros": "num-zeros", "params_norm": "params-norm"}
_OVER_SAMPLES = frozenset(
    {"learning-rate", "batch-size", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm"}
)
_PERPLEXITY_EXPONENT_MAX = 20.0
"""Megatron caps the exponent of a perplexity here."""
_SPARE = ("epoch", "live_groups", "load_max", "pieces_computed", "pieces_discarded")


@dataclass(frozen=True)
class BoardPoint:
    """Named scalars of the weights after one step."""

    step: int
    consumed_samples: int
    """In all steps up to and including this one."""
    values: Mapping[str, float]
    over_samples: frozenset[str]
    """Names of the scalars that Megatron also draws over the samples consumed."""
    is_evaluation: bool = False


def points(
    line: Mapping[str, Any], job: JobDescription, consumed_samples: Callable[[int], int], batch_size: int | None = None
) -> list[BoardPoint]:
    """What one line of metrics.jsonl adds to the boards: evaluations of the weights before its step, which Megatron
    writes at the step before, then the step's own scalars, unless --tensorboard-log-interval leaves them out.

    Args:
        consumed_samples: step -> samples in all steps up to and including it.
        batch_size: number of samples of the line's step; without it, the job's global batch size counts.
    """
    step = int(line["step"])
    evaluated = evaluations(line, job)
    found = (
        [BoardPoint(step - 1, consumed_samples(step - 1), evaluated, frozenset(evaluated), True)] if evaluated else []
    )
    evaluates_only = step > job.train_iters > 0
    if not evaluates_only and not step % max(1, job.tensorboard_log_interval):
        over_samples = _OVER_SAMPLES | loss_values(line, job).keys()
        found.append(BoardPoint(step, consumed_samples(step), scalars(line, job, batch_size), over_samples))
    return found


def scalars(line: Mapping[str, Any], job: JobDescription, batch_size: int | None = None) -> dict[str, float]:
    """The named scalars of a step from its line of metrics.jsonl."""
    values: dict[str, float] = {"batch-size": float(batch_size or job.global_batch_size)}
    if line.get("lr") is not None:
        values["learning-rate"] = float(line["lr"])
    values |= loss_values(line, job)
    for key, name in _NAMES.items():
        if line.get(key) is not None:
            values[name] = float(line[key])
    step_time_s = float(line["step_time_s"])
    values["iteration-time"] = step_time_s
    if job.flops_per_step and step_time_s:
        values["throughput"] = throughput(job, step_time_s, values["batch-size"])
    for key in _SPARE:
        values[f"spare/{key}"] = float(line[key])
    for key, value in (line.get("recovery") or {}).items():
        if key.endswith("_s"):
            values[f"spare/recovery/{key}"] = float(value)
    return values | _extras(line, job)


def evaluations(line: Mapping[str, Any], job: JobDescription) -> dict[str, float]:
    """The losses of the evaluations that a line of metrics.jsonl carries."""
    values: dict[str, float] = {}
    for evaluation in EVALUATIONS:
        for name, value in line.get(evaluation, {}).items():
            values[f"{name} {evaluation}"] = float(value)
            if "validation-ppl" in job.board_extras:
                values[f"{name} {evaluation} ppl"] = math.exp(min(_PERPLEXITY_EXPONENT_MAX, float(value)))
    return values


def _extras(line: Mapping[str, Any], job: JobDescription) -> dict[str, float]:
    """The scalars that are written only when a flag asks for them (``job.board_extras``)."""
    values: dict[str, float] = {}
    extras = frozenset(job.board_extras)
    if "world-size" in extras:
        values["world-size"] = float(job.world_size)
    if "loss-scale" in extras and line.get("loss_scale") is not None:
        values["loss-scale"] = float(line["loss_scale"])
    if "timers" in extras:
        values |= {f"{name}-time": float(value) for name, value in (line.get("timers") or {}).items()}
    if "memory" in extras:
        values |= {name: float(value) for name, value in (line.get("memory") or {}).items()}
    return values


class Boards:
    """The TensorBoard writer, the W&B run and the telemetry of a job; each exists only where the job's flags ask for
    it."""

    def __init__(self, job: JobDescription, run_dir: Path) -> None:
        self.job = job
        self._events: Any = None
        self._run: Any = None
        self._begins_at = 0
        """The first step that can be written to the W&B run: behind the last one of a run that goes on."""
        if job.tensorboard_dir:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(job.tensorboard_dir, max_queue_size=job.tensorboard_queue_size)
        if job.wandb_project:
            self._run = _wandb_run(job, run_dir)
            self._begins_at = int(self._run.step)
        self._telemetry = Telemetry(job, run_dir.resolve().name) if job.otel_enabled else None

    def write(self, point: BoardPoint) -> None:
        """Write the scalars of one point."""
        if self._events is not None:
            self._event(point.values, point.step)
            again = {f"{name} vs samples": v for name, v in point.values.items() if name in point.over_samples}
            self._event(again, point.consumed_samples)
            self._events.flush()
        if self._run is not None:
            self._log(point)

    def _log(self, point: BoardPoint) -> None:
        """Write a point to W&B, if its step is not over there. The evaluation of the last step of a run that goes on,
        computed before the next one, is written at the first step that can be."""
        if point.step >= self._run.step:
            self._run.log({**point.values, "samples vs steps": point.consumed_samples}, step=point.step)
        elif point.is_evaluation and point.step == self._begins_at - 1 == self._run.step - 1:
            self._run.log(dict(point.values), step=self._begins_at)

    def tell(self, line: Mapping[str, Any]) -> None:
        """A step was committed; ``line`` is its line of metrics.jsonl."""
        if self._telemetry is not None:
            self._telemetry.step(line)

    def tell_return(self, group: int, lost_s: float, back_s: float) -> None:
        """A group is a member again; seconds since 1970."""
        if self._telemetry is not None:
            self._telemetry.came_back(group, lost_s, back_s)

    def close(self) -> None:
        """Write out what is buffered and close all."""
        if self._events is not None:
            self._events.close()
        if self._run is not None:
            self._run.finish()
        if self._telemetry is not None:
            self._telemetry.close()

    def _event(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _wandb_run(job: JobDescription, run_dir: Path) -> Any:
    import wandb

    kept = run_dir / "wandb-id"
    identity = kept.read_text().strip() if kept.exists() else secrets.token_hex(4)
    kept.write_text(identity)
    return wandb.init(
        project=job.wandb_project,
        entity=job.wandb_entity or None,
        name=job.wandb_exp_name or None,
        dir=job.wandb_save_dir or str(run_dir),
        id=identity,
        resume="allow",
        config=dict(job.identity),
    )
