"""The job of goodput.py under spare-launch, where lost groups come back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks._goodput_account import State
from benchmarks._goodput_model import BATCH, FLAGS, GROUPS, environment
from benchmarks._goodput_system import System
from spare_megatron.cli.display import FollowedFile
from spare_megatron.config.exits import ExitCode
from spare_megatron.launch.preloaded_ranks import LISTENING
from tests.process.harness import RESTARTS, Job, launch

OWN = ("--spare-redundancy", str(GROUPS), "--save-interval", "auto")
LEAVE_S = 60.0


class Ours(System):
    """spare_megatron: survivors mask the loss, the group is started again and joins."""

    name = "spare_megatron"
    notes = " ".join(OWN)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._job: Job | None = None
        self._lines = FollowedFile(folder / "run" / "metrics.jsonl")
        self._lost = 0
        """Groups that were lost as members."""

    @property
    def version(self) -> str:
        return f"spare_megatron {version('spare_megatron')}"

    def start(self) -> None:
        words = (*FLAGS, *OWN, "--save", str(self.folder / "save"), RESTARTS, "100000")
        words += ("--spare-group-restart-pause-s", "0")
        environ = {**environment(self.scratch), LISTENING: ""}  # with a parent of its own, as users' jobs have it
        self._job = launch(
            self.folder / "run", *words, groups=GROUPS, group_size=None, script="pretrain_gpt.py", environ=environ
        )

    def look(self) -> None:
        assert self._job is not None, "started"
        now_s = time.monotonic()
        for line in map(json.loads, self._lines.new_lines()):
            self.course.states.append(State(now_s, line["step"], line["live_groups"], BATCH))
            self._lost += len((line["recovery"] or {}).get("lost_groups", ()))
        if self._job.process.poll() is not None:
            raise RuntimeError(f"spare-launch ended\n{self._job.report()}")

    def kill(self, group: int) -> int:
        assert self._job is not None, "started"
        struck = 0
        for pid in self._job.pids(group):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                # not a process that has the number since; ranks are forked by the job's parent of preloaded ones
                if any(one.pid == os.getpid() for one in psutil.Process(pid).parents()):
                    os.kill(pid, signal.SIGKILL)
                    struck += 1
        return struck

    def failure_free(self, now: bool) -> None:
        """It saves as ever."""

    def own_failures(self, kills: int) -> int:
        return max(0, self._lost - kills)

    def end(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        try:
            if job.process.poll() is None:
                job.kill(job.process.pid, number=signal.SIGTERM)
                job.process.wait(LEAVE_S)
            if job.process.returncode != ExitCode.REQUEUE:
                print(f"spare-launch ended with exit code {job.process.returncode}, not {ExitCode.REQUEUE}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"spare-launch did not end within {LEAVE_S:g} s of SIGTERM", flush=True)
        finally:
            job.end()
