"""What flags ask for around each step of one rank: figures, timers, profiles, garbage collection.

:class:`ReportingEngine` stands between the step loop and the model's engine and changes nothing of what they say to
each other. What it adds to a step's report reaches metrics.jsonl, the iteration line and the boards; the coordinator
takes the first group's report, so a figure is logged although the group that would have logged it is dead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spare_megatron.trainer.engine_decorator import PassThrough

DiagnosticsOf = Callable[[int], Mapping[str, Any]]
"""``figures(step)``: what is added to the report of a step that has been applied; may be collective in the group."""


@dataclass
class StepHooks:
    """Called on every rank at the same steps."""

    before: Sequence[Callable[[int], None]] = ()
    """With the step that begins."""
    reduced: Sequence[Callable[[int], None]] = ()
    """Between the last backward pass of a committed step and its update."""
    after: Sequence[Callable[[int], None]] = ()
    """With the step that has been applied."""
    figures: Sequence[DiagnosticsOf] = ()


@dataclass
class ReportingEngine(PassThrough):
    """A step engine with hooks. Same calls, same promises as the engine inside."""

    hooks: StepHooks
    with_timers: bool = False
    """Add the milliseconds of a step's parts to its report, under Megatron's names of them."""
    _began_s: float = field(default=0.0, init=False)
    _computed_s: float = field(default=0.0, init=False)

    def begin_step(self, step: int) -> None:
        """The engine's, after the hooks."""
        for hook in self.hooks.before:
            hook(step)
        self._began_s = time.monotonic()
        super().begin_step(step)

    def local_sum(self) -> Sequence[torch.Tensor]:
        """As the engine's."""
        self._computed_s = time.monotonic()
        return super().local_sum()

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """The engine's update and report, with the figures."""
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
    """``--manual-gc``: automatic collection off; a hook that collects every ``interval`` steps (0: never) and before
    each evaluation (None: not then)."""
    gc.disable()
    gc.collect()

    def collect(step: int) -> None:
        if any(every and step % every == 0 for every in (interval, eval_interval)):
            gc.collect()

    return collect


def give_memory_back(_step: int) -> None:
    """``--empty-unused-memory-level``: unused CUDA memory to the device; nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
