"""``--profile`` profiles steps of some ranks with torch or marks them for nsys; ``--record-memory-history`` writes
snapshots of CUDA memory.

As in Megatron, the steps are those from ``--profile-step-start`` to the one before ``--profile-step-end``. A rank that
is lost takes its profile with it; the job does not wait for it. nsys records a rank only when the rank is started under
it, with ``--capture-range=cudaProfilerApi``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spare_megatron.runtime.disk import words

log = logging.getLogger(__name__)


class StepProfiler:
    """Begins and ends the profile of one rank. Its methods are hooks of the training thread."""

    def __init__(self, first: int, end: int, traces: Path, name: str, with_torch: bool) -> None:
        """
        Args:
            first: the first step that is profiled; ``end`` is the first that is not.
            traces: directory of torch's traces.
            name: the trace's file name for this rank, without its suffix.
            with_torch: use torch's profiler; otherwise mark the range for nsys, which needs CUDA.
        """
        self._first, self._end = first, end
        self._traces, self._name = traces, name
        self._with_torch = with_torch or not torch.cuda.is_available()
        if self._with_torch and not with_torch:
            log.warning("--profile marks steps for nsys, which needs CUDA; torch's profiler is used instead")
        self._running: Any = None

    def before(self, step: int) -> None:
        """Begin the profile if ``step`` is the first one."""
        if step == self._first and self._running is None:
            self._running = self._begin()

    def after(self, step: int) -> None:
        """End the profile if ``step`` is the last one."""
        if self._running is not None and step >= self._end - 1:
            self.close()

    def close(self) -> None:
        """End the profile, if one runs, and write it."""
        running, self._running = self._running, None
        if running is None:
            return
        if not self._with_torch:
            torch.cuda.cudart().cudaProfilerStop()
            return
        running.__exit__(None, None, None)
        path = self._traces / f"{self._name}.pt.trace.json"
        try:
            self._traces.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except OSError as error:
            log.warning("%s cannot be written: %s", path, words(error))
            return
        log.info("steps %d to %d are profiled in %s", self._first, self._end - 1, path)

    def _begin(self) -> Any:
        if not self._with_torch:
            torch.cuda.cudart().cudaProfilerStart()
            return True
        return torch.profiler.profile(record_shapes=True).__enter__()


def record_memory(path: Path, interval: int) -> Callable[[int], None]:
    """``--record-memory-history``: a hook that writes the CUDA allocator's snapshot every ``interval`` steps."""
    if not torch.cuda.is_available():
        log.warning("--record-memory-history records CUDA allocations, and there is no CUDA: nothing is written")
        return lambda _step: None
    torch.cuda.memory._record_memory_history(
        True,  # type: ignore[arg-type]  # the older form of its arguments
        trace_alloc_max_entries=100_000,
        trace_alloc_record_context=True,
    )

    def write(step: int) -> None:
        if step % interval == 0:
            torch.cuda.memory._dump_snapshot(str(path))

    return write
