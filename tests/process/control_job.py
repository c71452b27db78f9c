"""A control plane in real processes for tests: one coordinator and pretended ranks, started without spare-launch."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spare_megatron.coordinator.journal import Record, verify
from spare_megatron.launch.preload_client import ForkedProcess
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory
from tests import preloaded
from tests.process.growing import GrowingJournal, GrowingLines

ROOT = Path(__file__).parents[2]
Process = subprocess.Popen[bytes] | ForkedProcess


class ControlJob:
    """Processes of one job, forked by the tests' preloaded parent; :meth:`close` leaves none behind."""

    coordinator_module = "spare_megatron.cli.coordinator"

    def __init__(self, path: Path, groups: int = 2, size: int = 1, flags: str = "") -> None:
        self.run_dir = RunDirectory(path / "run")
        self.run_dir.create()
        self._journal, self._lines = GrowingJournal(self.run_dir.journal), GrowingLines(self.run_dir.metrics)
        self.groups, self.size, self.flags = groups, size, flags.split()
        self.environment: dict[str, str] = {}
        """Of every process, beside :func:`tests.preloaded.environment`."""
        self.under: tuple[str, ...] = ()
        """A command that starts the processes, which are then new ones."""
        self.coordinator: Process | None = None
        self.ranks: dict[tuple[int, int], Process] = {}
        self._all: list[Process] = []

    def start(self) -> None:
        """The coordinator and every rank."""
        self.start_coordinator()
        for group in range(self.groups):
            self.start_group(group)

    def start_coordinator(self, *flags: str) -> CoordinatorAddress:
        """Start one and wait until it listens."""
        before = self.run_dir.coordinator()
        self.coordinator = self.popen(
            "coordinator", [self.coordinator_module, "--run-dir", str(self.run_dir.path), *flags]
        )
        old = before.fencing if before else 0
        self.until(lambda: (now := self.run_dir.coordinator()) is not None and now.fencing > old)
        published = self.run_dir.coordinator()
        assert published is not None
        return published

    def start_group(self, group: int, incarnation: int = 0, flags: tuple[str, ...] = ()) -> None:
        """Every rank of one group."""
        for position in range(self.size):
            self.start_rank(group, position, incarnation, flags)

    def start_rank(self, group: int, position: int, incarnation: int = 0, flags: tuple[str, ...] = ()) -> None:
        """One rank of a group."""
        environment = {
            "SPARE_GROUP": str(group),
            "SPARE_POSITION": str(position),
            "SPARE_NUM_GROUPS": str(self.groups),
            "SPARE_GROUP_SIZE": str(self.size),
            "SPARE_INCARNATION": str(incarnation),
            "SPARE_RUN_DIR": str(self.run_dir.path),
        }
        command = ["tests.process.control_client", *self.flags, *flags]
        self.ranks[group, position] = self.popen(f"rank-{group}-{position}-{incarnation}", command, environment)

    def popen(self, name: str, module: list[str], environment: dict[str, str] | None = None) -> Process:
        """One process, its output in a file of its own."""
        environ = {**preloaded.environment(), **self.environment, **(environment or {})}
        path = self.run_dir.path / f"{name}.out"
        process: Process
        if self.under:
            command = [*self.under, sys.executable, "-W", "error", "-m", *module]
            with path.open("ab") as out:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
        else:
            process = preloaded.fork_module(module[0], module[1:], environ, path, strict=True)
        self._all.append(process)
        return process

    def output(self, name: str) -> str:
        """What a process printed."""
        return (self.run_dir.path / f"{name}.out").read_text()

    def outputs(self) -> str:
        """Everything, for a failed test."""
        files = sorted(self.run_dir.path.glob("*.out"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def until(self, holds: Callable[[], bool], timeout_s: float = 30.0) -> float:
        """Wait for something another process does; the time it took."""
        started_s = time.monotonic()
        while not holds():
            assert time.monotonic() - started_s < timeout_s, f"did not happen in {timeout_s} s\n{self.outputs()}"
            time.sleep(0.01)
        return time.monotonic() - started_s

    def records(self) -> list[Record]:
        """The journal so far."""
        return self._journal.records()

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl so far."""
        return self._lines.lines()

    def committed(self) -> int:
        """Step of the last line of metrics.jsonl."""
        lines = self.metrics()
        return lines[-1]["step"] if lines else 0

    def kill(self, group: int, position: int, number: int = signal.SIGKILL) -> None:
        """A real signal to a real process."""
        self.ranks[group, position].send_signal(number)

    def kill_coordinator(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()

    def finish(self, timeout_s: float = 60.0) -> int:
        """Wait for the coordinator's exit code, and check its journal by replay."""
        assert self.coordinator is not None
        try:
            code = self.coordinator.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the coordinator did not end in {timeout_s} s\n{self.outputs()}") from None
        verify(self.run_dir.journal)
        return code

    def exits(self, timeout_s: float = 30.0) -> dict[tuple[int, int], int]:
        """Exit codes of all ranks."""
        return {key: process.wait(timeout_s) for key, process in self.ranks.items()}

    def check_steps(self, last: int) -> None:
        """Every step is committed exactly once, in order, and every piece once."""
        lines = self.metrics()
        assert [line["step"] for line in lines] == list(range(1, last + 1))
        assert all(line["pieces_discarded"] == 0 for line in lines)

    def close(self) -> None:
        """End every process that this object started."""
        for process in self._all:
            if process.poll() is None:
                process.kill()
        for process in self._all:
            process.wait()
