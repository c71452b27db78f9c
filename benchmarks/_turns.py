"""Runs jobs in turns of a few steps, so that a machine whose speed drifts affects all of them alike.

Each ``Side`` is a job that writes a line of JSON for every step. All are started and warmed up; then one runs for a
few steps while every process of the others is stopped (SIGSTOP), and so on, every second round in reverse order. A step
during which a side was stopped does not count, so what is compared lies seconds apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spare_megatron.launch.preloaded_ranks import LISTENING

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 4
PATIENCE_S = 300.0
LOOK_S = 0.02


class Side:
    """A job of one or more commands in a checkout; ``record`` is the file to which it writes its lines."""

    def __init__(self, commands: Sequence[Sequence[str]], record: Path, checkout: Path = ROOT) -> None:
        environ = dict(os.environ, PYTHONPATH=str(checkout), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
        environ[LISTENING] = ""  # with a parent of its own, whose ranks are below the launcher
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._record = record
        self._seen = self._lines = 0
        self._roots = [subprocess.Popen(command, cwd=checkout, env=environ, **quiet) for command in commands]
        self._cpu_s = 0.0
        self._steps = 0
        self.turns_cpu_s: list[float] = []
        """CPU seconds per step of all its processes in each turn since ``forget``."""

    def run(self, steps: int) -> list[dict]:
        """Let the job run for so many whole steps and stop it again; returns the lines of these steps."""
        before_s = self._used_s()
        there = self._written()
        self._signal(signal.SIGCONT)
        deadline_s = time.monotonic() + PATIENCE_S
        while self._written() <= there + steps:
            if any(root.poll() is not None for root in self._roots) or time.monotonic() > deadline_s:
                raise SystemExit(f"{self._record}: {self._written() - there} lines, not {steps + 1}, before the end")
            time.sleep(LOOK_S)
        self._signal(signal.SIGSTOP)
        lines = self._record.read_text().splitlines()[: self._written()]
        used_s, steps_run = self._used_s() - before_s, len(lines) - there
        self._cpu_s += used_s
        self._steps += steps_run
        self.turns_cpu_s.append(used_s / steps_run)
        return [json.loads(line) for line in lines[there + 1 :]]

    def cpu_s(self) -> float:
        """CPU seconds per step of all its processes, over all turns since ``forget``."""
        return self._cpu_s / self._steps

    def forget(self) -> None:
        """Do not count the CPU time used so far, for imports and first steps."""
        self._cpu_s, self._steps = 0.0, 0
        self.turns_cpu_s.clear()

    def kill(self) -> None:
        """Kill all its processes, launchers first, so that they do not react to the deaths of the others."""
        self._signal(signal.SIGKILL)
        for root in self._roots:
            root.wait()

    def _written(self) -> int:
        """Number of whole lines in the record so far; reads what is new."""
        if self._record.exists():
            with self._record.open("rb") as record:
                record.seek(self._seen)
                new = record.read()
            self._seen, self._lines = self._seen + len(new), self._lines + new.count(b"\n")
        return self._lines

    def _processes(self) -> list[psutil.Process]:
        found = []
        for root in self._roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _used_s(self) -> float:
        used = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                used += sum(process.cpu_times()[:2])
        return used


def take_turns(sides: Mapping[str, Side], rounds: int, steps: int) -> list[dict[str, list[dict]]]:
    """The lines of every side's turn, round by round, without the warm-up. At the end, or at SIGTERM, all sides are
    killed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    try:
        for side in sides.values():
            side.run(WARM_UP_STEPS)
        for side in sides.values():
            side.forget()
        orders = (list(sides), list(reversed(sides)))
        return [{name: sides[name].run(steps) for name in orders[number % 2]} for number in range(rounds)]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends two
        for side in sides.values():
            side.kill()
