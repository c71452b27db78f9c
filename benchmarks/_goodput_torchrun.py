"""The job of goodput.py as plain megatron-core data parallelism that torchrun restarts from its newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks._goodput_account import State
from benchmarks._goodput_model import BATCH, GROUPS
from benchmarks._goodput_system import System, end_with_children
from spare_megatron.cli.display import FollowedFile

LOOKS_EVERY_S = 0.05
"""torchrun's --monitor-interval."""


class Torchrun(System):
    """torchrun kills all ranks when one has died and starts all of them again (restarted_rank.py)."""

    name = "torchrun"
    notes = f"--monitor-interval {LOOKS_EVERY_S:g}"

    def __init__(self, folder: Path, mean_gap_s: float, interval_s: float) -> None:
        super().__init__(folder)
        self._mean_gap_s, self._interval_s = mean_gap_s, interval_s
        self._lines = FollowedFile(folder / "steps.jsonl")
        self._process: psutil.Popen | None = None
        self._saved = 0
        self._saving: tuple[float, float] | None = None
        self._restarts = 0

    @property
    def version(self) -> str:
        return f"torch {version('torch')}, megatron-core {version('megatron-core')}"

    def start(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GROUPS)]
        command += ["--max-restarts", "100000", "--monitor-interval", f"{LOOKS_EVERY_S:g}"]
        command += ["benchmarks/restarted_rank.py", str(self.folder), str(self._mean_gap_s), str(self._interval_s)]
        self._process = self.run_logged(command, "torchrun")

    def look(self) -> None:
        assert self._process is not None, "started"
        now_s = time.monotonic()
        for line in map(json.loads, self._lines.new_lines()):
            if "saved" in line:
                self._saved = line["saved"]
                self._saving = line["interval_s"], line["save_s"]
            else:
                self.course.states.append(State(now_s, line["step"], line["groups"], BATCH))
                self._restarts = line["restarts"]
        if self._process.poll() is not None:
            raise self.failed("torchrun", "has ended")

    def kill(self, group: int) -> int:
        assert self._process is not None, "started"
        struck = 0
        for process in self._process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("RANK") == str(group):
                    process.kill()
                    struck += 1
        self.look()
        if struck:
            # What was trained since the newest checkpoint is lost from now on.
            self.course.states.append(State(time.monotonic(), self._saved, 0, 0.0))
        return struck

    def failure_free(self, now: bool) -> None:
        mark = self.folder / "calm"
        if now:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def own_failures(self, kills: int) -> int:
        return max(0, self._restarts - kills)

    def end(self) -> None:
        end_with_children(self._process)

    def saving(self) -> tuple[float, float] | None:
        return self._saving
