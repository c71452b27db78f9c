"""Megatron's iteration line, which users' scripts parse, with fields of our own after Megatron's.

    iteration       10/     500 | consumed samples:          320 | elapsed time per iteration (ms): 251.3 | ...

As in Megatron, losses are averaged over the steps since the previous line, without the skipped ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spare_megatron.config.job import JobDescription

EVALUATIONS = ("validation", "test")
"""Evaluations whose losses a line of metrics.jsonl may carry. They are those of the weights *before* its step."""
_EXPONENT_MAX = 20.0
"""Megatron caps the exponent of a perplexity here."""


def evaluation_lines(line: Mapping[str, Any]) -> list[str]:
    """Megatron's line for each evaluation whose losses this line of metrics.jsonl carries."""
    texts = []
    for name in EVALUATIONS:
        if name in line:
            values = [
                f"{key} value: {value:.6E} | {key} PPL: {math.exp(min(_EXPONENT_MAX, value)):.6E} |"
                for key, value in line[name].items()
            ]
            texts.append(f" {name} loss at iteration {line['step'] - 1} | " + " ".join(values))
    return texts


def loss_values(line: Mapping[str, Any], job: JobDescription) -> dict[str, float]:
    """What the loss function reported for the step, by name: the job's losses, then those that only it names."""
    values = {name: line.get("loss") if index == 0 else line.get(name) for index, name in enumerate(job.loss_names)}
    values |= {name: line.get(name) for name in line.get("reported", ()) if name not in values}
    return {name: float(value) for name, value in values.items() if value is not None}


class IterationLines:
    """Collects committed steps and makes an iteration line of them every ``log_interval`` steps."""

    def __init__(self, job: JobDescription, first_step: int) -> None:
        self._job, self._batches = job, job.batch_schedule(first_step)
        self._reset()

    def _reset(self) -> None:
        self._time_s, self._steps, self._samples, self._skipped = 0.0, 0, 0, 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._recovered: list[Mapping[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Take one line of metrics.jsonl; return the text to print when its step ends an interval, else None."""
        job = self._job
        self._steps += 1
        self._samples += self.batch_size(line["step"])
        self._time_s += line["step_time_s"]
        skipped = bool(line.get("skipped"))
        self._skipped += skipped
        for name, value in loss_values(line, job).items():
            if not skipped:
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1
        if line.get("recovery"):
            self._recovered.append(line["recovery"])
        if line["step"] % job.log_interval:
            return None
        text = self._text(line)
        self._reset()
        return text

    def consumed_samples(self, step: int) -> int:
        """Number of samples in all steps up to and including ``step``."""
        return self._batches.consumed_before(step + 1)

    def batch_size(self, step: int) -> int:
        """Number of samples in ``step``."""
        return self._batches.size(step)

    def _text(self, line: Mapping[str, Any]) -> str:
        job, step = self._job, line["step"]
        per_step_s = self._time_s / max(1, self._steps)
        fields = [
            f" iteration {step:8d}/{job.train_iters:8d}",
            f" consumed samples: {self.consumed_samples(step):12d}",
            f" elapsed time per iteration (ms): {per_step_s * 1000.0:.1f}",
        ]
        if job.flops_per_step and per_step_s:
            figure = throughput(job, self._time_s, self._samples)
            fields.append(f" throughput per GPU (TFLOP/s/GPU): {figure:.1f}")
        if line.get("lr") is not None:
            fields.append(f" learning rate: {line['lr']:.6E}")
        fields.append(f" global batch size: {self.batch_size(step):5d}")
        for name, count in self._counts.items():
            fields.append(f" {name}: {self._sums[name] / count:.6E}")
        fields.append(f" loss scale: {line.get('loss_scale') or 1.0:.1f}")
        if line.get("grad_norm") is not None:
            fields.append(f" grad norm: {line['grad_norm']:.3f}")
        if line.get("num_zeros") is not None:
            fields.append(f" num zeros: {line['num_zeros']}")
        if line.get("params_norm") is not None:
            fields.append(f" params norm: {line['params_norm']:.3f}")
        fields.append(f" number of skipped iterations: {self._skipped:3d}")
        fields.append(f" number of nan iterations: {int(line.get('nan_iterations') or 0):3d}")
        fields.append(f" live groups: {line['live_groups']}")
        fields.append(f" max load: {line['load_max']}")
        for recovery in self._recovered:
            lost = ",".join(map(str, recovery["lost_groups"]))
            fields.append(f" masked loss of group {lost} in {recovery['total_s']:.2f} s")
        return " |".join(fields) + " |"


def throughput(job: JobDescription, step_time_s: float, samples: float) -> float:
    """TFLOP/s of one rank in a step of ``samples`` samples: ``flops_per_step`` are the operations of a full batch."""
    return samples / job.global_batch_size * job.flops_per_step / step_time_s / max(1, job.world_size) / 1e12
