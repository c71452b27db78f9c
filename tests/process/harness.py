"""Runs jobs through spare-launch for tests, kills their processes from outside, and judges what they left behind.

Every run ends in :meth:`Job.finish`, which waits, reaps, and checks what must hold for any job: the journal replays to
the same actions, every step is in metrics.jsonl once and in order, and no process is left.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spare_megatron.coordinator import journal
from spare_megatron.coordinator.journal import Record
from spare_megatron.launch.preload_client import ForkedProcess
from tests import preloaded
from tests.process.growing import GrowingJournal, GrowingLines
from tests.process.running import has_not_ended, processes

ROOT = Path(__file__).resolve().parents[2]
TOY = "tests/process/toy_train.py"
FORKING = "tests.process.forking_launch"
STARTED: list[Job] = []
"""The jobs of the tests and fixtures that are not over."""


@dataclass
class Job:
    """One spare-launch in flight."""

    run_dir: Path
    process: subprocess.Popen[str] | ForkedProcess
    seen: set[int] = field(default_factory=set)
    """Pids of every process that the job was seen to have."""
    ranks_seen: set[int] = field(default_factory=set)
    """Those of its ranks."""
    _listed: str = ""
    """What processes.json had when it was looked at last."""

    def __post_init__(self) -> None:
        self._lines = GrowingLines(self.run_dir / "metrics.jsonl")
        self._journal = GrowingJournal(self.run_dir / "journal.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl so far."""
        return self._lines.lines()

    def records(self) -> list[Record]:
        """The journal so far."""
        return self._journal.records()

    def ranks(self) -> list[dict[str, Any]]:
        """The rank processes as processes.json lists them now."""
        path = self.run_dir / "processes.json"
        return json.loads(path.read_text())["ranks"] if path.exists() else []

    def pid(self, group: int, position: int) -> int:
        """Of one rank."""
        return next(r["pid"] for r in self.ranks() if (r["group"], r["position"]) == (group, position))

    def pids(self, group: int) -> list[int]:
        """Of all ranks of a group."""
        return [r["pid"] for r in self.ranks() if r["group"] == group]

    def wait_for(self, what: str, true: Callable[[], bool], timeout_s: float = 60.0, every_s: float = 0.02) -> None:
        """Poll until ``true()``; AssertionError with the job's output when it ends or the time is over first."""
        deadline_s = time.monotonic() + timeout_s
        while not true():
            if self.process.poll() is not None and not true():
                raise AssertionError(f"the job ended before {what}\n{self.report()}")
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.report()}")
            self._look()
            time.sleep(every_s)

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> None:
        """Until ``step`` is in metrics.jsonl."""
        self.wait_for(f"step {step}", lambda: any(m["step"] >= step for m in self.metrics[-3:]), timeout_s)

    def kill(self, *pids: int, number: signal.Signals = signal.SIGKILL) -> None:
        """A real signal to real processes of this job."""
        for pid in pids:
            os.kill(pid, number)

    def wait_for_exit(self, *pids: int, timeout_s: float = 30.0) -> None:
        """Until these processes are gone."""
        self.wait_for(f"the exit of {pids}", lambda: not any(has_not_ended(pid) for pid in pids), timeout_s)

    def wait_until_gone(self, timeout_s: float = 20.0) -> None:
        """Until no process of the job is left; for a job whose spare-launch was killed."""
        deadline_s = time.monotonic() + timeout_s
        while _processes_of(self.run_dir) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        try:
            self._nothing_is_left()
        finally:
            self.end()

    def report(self) -> str:
        """What the job printed, for a failing test."""
        output = (self.run_dir / "launch.out").read_text()[-4000:]
        logs = sorted(self.run_dir.glob("logs/**/*.log"))
        tails = "\n".join(f"--- {p.relative_to(self.run_dir)}\n{p.read_text()[-1500:]}" for p in logs)
        return f"{output}\n{tails}"

    def finish(self, code: int = 0, timeout_s: float = 90.0) -> list[dict[str, Any]]:
        """Wait for the end, check everything that holds for any job; the lines of metrics.jsonl."""
        try:
            self.wait_for("the end", lambda: self.process.poll() is not None, timeout_s)
            assert self.process.returncode == code, f"exit code {self.process.returncode}, not {code}\n{self.report()}"
            self._nothing_is_left()
        finally:
            self.end()
        if (self.run_dir / "journal.jsonl").exists():
            journal.verify(self.run_dir / "journal.jsonl")
        lines = self.metrics
        _check_lines(lines)
        return lines

    def end(self) -> None:
        """Kill what still runs, whatever happened."""
        self._look()
        self.process.kill()
        self.process.wait()
        for pid in self.seen.intersection(_processes_of(self.run_dir)):
            os.kill(pid, signal.SIGKILL)

    def _look(self) -> None:
        try:
            text = (self.run_dir / "processes.json").read_text()
        except FileNotFoundError:
            return
        if not text or text == self._listed:
            return
        self._listed, there = text, json.loads(text)
        self.ranks_seen |= {r["pid"] for r in there["ranks"]}
        self.seen |= self.ranks_seen
        coordinator = there.get("coordinator") or {}
        self.seen |= {coordinator["pid"]} if coordinator.get("pid") else set()

    def _nothing_is_left(self) -> None:
        left = _processes_of(self.run_dir)
        assert not left, f"processes are left behind: {left}\n{self.report()}"


RESTARTS = "--spare-max-group-restarts"


def launch(
    run_dir: Path,
    *words: str,
    groups: int = 3,
    group_size: int | None = 2,
    inject: Sequence[str] = (),
    script: str = TOY,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
) -> Job:
    """Start ``spare-launch``, behind the words ``under``, with its output in RUN_DIR/launch.out. Lost groups stay lost,
    unless ``words`` say otherwise."""
    run_dir.mkdir(parents=True, exist_ok=True)
    module, flags = "spare_megatron.cli.launch", ["--num-groups", str(groups), "--run-dir", str(run_dir)]
    flags += ["--group-size", str(group_size)] if group_size is not None else []
    for spec in inject:
        flags += ["--inject", spec]
    flags += [*options, script, *words]
    if RESTARTS not in words:
        flags += [RESTARTS, "0"]
    environment = {**preloaded.environment(), **(environ or {})}
    if not under and "LD_PRELOAD" not in environment:
        environment = {preloaded.LISTENING: preloaded.socket_path(), **environment}
    process: subprocess.Popen[str] | ForkedProcess
    if not under and preloaded.can_fork(environment):
        (run_dir / "launch.out").write_text("")
        process = preloaded.fork_module(FORKING, flags, environment, run_dir / "launch.out")
    else:
        command = [*under, sys.executable, "-m", module, *flags]
        with (run_dir / "launch.out").open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True)
    STARTED.append(Job(run_dir, process))
    return STARTED[-1]


def end_since(number: int) -> None:
    """End the jobs that were started after the first ``number`` and still run: their test has failed."""
    while len(STARTED) > number:
        job = STARTED.pop()
        if job.process.poll() is None:
            job.end()


def toy_digests(run_dir: Path) -> dict[str, str]:
    """'group-G-rank-M' -> digest of the weights that the rank left."""
    return {path.stem: path.read_text() for path in sorted((run_dir / "toy").glob("*.txt"))}


def _check_lines(lines: list[dict[str, Any]]) -> None:
    """Each job attempt commits its steps once, in order, with every piece counted."""
    for before, after in itertools.pairwise(lines):
        if after["life"] == before["life"]:
            assert after["step"] == before["step"] + 1, f"step {after['step']} follows {before['step']}"
    for line in lines:
        assert line["pieces_discarded"] == 0, line
        assert line["pieces_computed"] >= line["pieces"], line


def _processes_of(run_dir: Path) -> list[int]:
    """Pids of live processes that belong to the job of a run directory, by their environment or command line."""
    return list(processes(f"SPARE_RUN_DIR={run_dir}", str(run_dir)))
