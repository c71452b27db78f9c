"""limited_pretrain.py with a clock for each part of a step: writes a line of JSON for every step of its rank, with CPU
milliseconds and page faults, into a file of the folder that SPARE_BENCHMARK_LINES names.

benchmarks/step_lines.py starts it. Parts overlap where one calls another; what the ring's thread does is beside the
training thread's.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.reduction_attempt import OpenReduction
from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
from spare_megatron.megatron_adapter.model.replica import GroupDDP

LINES = "SPARE_BENCHMARK_LINES"
PARTS: dict[str, tuple[type, str]] = {
    "zero": (MegatronEngine, "begin_step"),
    "check result": (MegatronEngine, "result_fault"),
    "digest result": (MegatronEngine, "result_digest"),
    "digest weights": (MegatronEngine, "weights_digest"),
    "write gradients": (MegatronEngine, "_take_gradients"),
    "reduce": (OpenReduction, "finish"),
    "ring": (RingBackend, "sum"),
}
"""Part of a step -> the method that does it. "add pieces" is the hook of a gradient."""


class Clock:
    """CPU seconds of each part since the last step."""

    def __init__(self, record: Path) -> None:
        self._record = record.open("w", buffering=1)
        self._spent_s: dict[str, float] = {}
        self._used: resource.struct_rusage | None = None

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, whose CPU time counts for ``part``."""

        @functools.wraps(work)
        def run(*given: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                self._spent_s[part] = self._spent_s.get(part, 0.0) + time.thread_time() - began_s

        return run

    def step_begins(self, step: int) -> None:
        """Write the line of the step before ``step``."""
        used, before = resource.getrusage(resource.RUSAGE_SELF), self._used
        if before is not None:
            whole_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            parts = {part: 1000 * spent_s for part, spent_s in {**self._spent_s, "whole rank": whole_s}.items()}
            line = {"step": step - 1, "faults": used.ru_minflt - before.ru_minflt, "parts": parts}
            self._record.write(json.dumps(line) + "\n")
        self._used, self._spent_s = used, {}


def watch(clock: Clock) -> None:
    """Put ``clock`` into every part."""
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    zero, made = MegatronEngine.begin_step, GroupDDP._make_backward_post_hook

    def begin_step(engine: MegatronEngine, step: int) -> None:
        clock.step_begins(step)
        zero(engine, step)

    def hook(ddp: GroupDDP, parameter: Any) -> Callable[..., Any]:
        return clock.timed("add pieces", made(ddp, parameter))

    MegatronEngine.begin_step, GroupDDP._make_backward_post_hook = begin_step, hook


if __name__ == "__main__":
    watch(Clock(Path(os.environ[LINES]) / f"{os.getpid()}.jsonl"))
    runpy.run_path(str(Path(__file__).with_name("limited_pretrain.py")), run_name="__main__")
