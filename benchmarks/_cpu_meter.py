"""Counts the CPU time that a process spends inside the functions that watch a job (watching_cost.py).

It is imported before everything else, in each process of a job: a module named in :data:`WATCHING` has its functions
wrapped once it is executed. Time inside of nested ones counts for the outermost. A line with the sums so far is written
at most once a second, by whoever calls.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "SPARE_CPU_METER"
"""The folder of the files."""
DETECTION = "failure detection: phases, beats"
"""What is reported of a rank for its failures; that people see it too costs nothing more."""
WATCHING: Mapping[str, Mapping[str, str]] = {
    "spare_megatron.coordinator.records": {
        "Records.write_status": "status",
        "Records.observe": "metrics: decisions",
        "Records.report": "metrics: lines, iteration line",
        "Records.write_ready": "metrics: lines, iteration line",
    },
    "spare_megatron.metrics.metrics": {
        "MetricsBook.figures": "metrics: figures of votes",
        "MetricsBook.seen": "metrics: figures of votes",
    },
    "spare_megatron.coordinator.job_events": {"JobEvents.observe": "events"},
    "spare_megatron.control_plane.session": {"Session.progress": DETECTION, "Session.report_step": "reports"},
    "spare_megatron.control_plane.rank_ledger": {"RankLedger.receive": DETECTION, "RankLedger.heartbeat": DETECTION},
    "spare_megatron.control_plane.group_aggregation": {"greatest": "figures of votes", "merge_reports": "reports"},
}
"""Module -> function or method -> what it is counted for."""
WRITES_S = 1.0


class _Meter:
    def __init__(self, path: Path) -> None:
        self._path, self._written_s = path, 0.0
        self._inside_s: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._own = threading.local()
        self._lock = threading.Lock()

    def wrapped(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Counts for ``what``."""

        @functools.wraps(work)
        def counted(*args: Any, **named: Any) -> Any:
            if getattr(self._own, "inside", False):
                return work(*args, **named)
            self._own.inside, began_s = True, time.thread_time()
            try:
                return work(*args, **named)
            finally:
                self._add(what, time.thread_time() - began_s)
                self._own.inside = False

        return counted

    def _add(self, what: str, took_s: float) -> None:
        with self._lock:
            self._inside_s[what] = self._inside_s.get(what, 0.0) + took_s
            self._calls[what] = self._calls.get(what, 0) + 1
            if time.monotonic() - self._written_s < WRITES_S:
                return
            self._written_s = time.monotonic()
            line = {"at_s": time.time(), "cpu_s": time.process_time(), "inside_s": self._inside_s, "calls": self._calls}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class _Finder:
    """Finds the modules that are wrapped."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter

    def find_spec(
        self, name: str, path: Sequence[str] | None, _: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As a finder of sys.meta_path does."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in WATCHING else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for place, what in WATCHING[name].items():
                *owner, last = place.split(".")
                holder = getattr(module, owner[0]) if owner else module
                setattr(holder, last, self._meter.wrapped(what, getattr(holder, last)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, _Finder(_Meter(Path(os.environ[VARIABLE]) / f"{os.getpid()}.jsonl")))
