"""Calls hooks around each step of one rank, for what flags ask for: figures, timers, profiles, garbage collection.

:class:`ReportingEngine` stands between the step loop and the model's engine, and passes their calls on unchanged. What
it adds to a step's report goes to metrics.jsonl, the iteration line, TensorBoard and W&B. Every group reports it and
the coordinator takes the first report, so a figure is logged whichever group dies.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spare_megatron.worker.engine_decorator import PassThrough

DiagnosticsOf = Callable[[int], Mapping[str, Any]]
"""``figures(step)`` returns what is added to the report of an applied step; may be collective in the group."""


@dataclass
class StepHooks:
    """The hooks of one rank; all ranks of a group call theirs at the same steps."""

    before: Sequence[Callable[[int], None]] = ()
    """Called when a step begins, with its number."""
    reduced: Sequence[Callable[[int], None]] = ()
    """Called when a step is committed, before its update."""
    after: Sequence[Callable[[int], None]] = ()
    """Called when a step is applied."""
    figures: Sequence[DiagnosticsOf] = ()


@dataclass
class ReportingEngine(PassThrough):
    """A step engine that calls hooks around each step of the engine inside."""

    hooks: StepHooks
    with_timers: bool = False
    """Whether the times of a step's parts, in milliseconds, are added to its report under Megatron's names."""
    _began_s: float = field(default=0.0, init=False)
    _computed_s: float = field(default=0.0, init=False)

    def begin_step(self, step: int) -> None:
        """Call the hooks, then zero the engine's accumulators."""
        for hook in self.hooks.before:
            hook(step)
        self._began_s = self._computed_s = time.monotonic()
        super().begin_step(step)

    def local_sum(self) -> Sequence[torch.Tensor]:
        """The engine's accumulators, summed inside the group; notes when the computing ended."""
        self._computed_s = time.monotonic()
        return super().local_sum()

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """Apply the engine's update and call the hooks; returns the engine's report with the figures."""
        for hook in self.hooks.reduced:
            hook(step)
        committed_s = time.monotonic()
        report = dict(super().apply(step, reduced, scalars))
        if self.with_timers:
            report["timers"] = {
                "forward-backward": _ms(self._computed_s - self._began_s),
                "all-grads-sync": _ms(committed_s - self._computed_s),
                "optimizer": _ms(time.monotonic() - committed_s),
            }
        for figures in self.hooks.figures:
            report.update(figures(step))
        for hook in self.hooks.after:
            hook(step)
        return report


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)


def collect_garbage_by_hand(interval: int, eval_interval: int | None) -> Callable[[int], None]:
    """``--manual-gc``: turn automatic collection off; returns a hook that collects every ``interval`` steps (0: never)
    and before each evaluation (``eval_interval`` None: not then)."""
    gc.disable()
    gc.collect()

    def collect(step: int) -> None:
        if any(every and step % every == 0 for every in (interval, eval_interval)):
            gc.collect()

    return collect


def give_memory_back(_step: int) -> None:
    """``--empty-unused-memory-level``: return unused CUDA memory to the device; does nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
