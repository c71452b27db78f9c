"""The job of goodput.py as replicas of torchft, which a supervisor starts again at once."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path

import psutil

from benchmarks._goodput_account import State
from benchmarks._goodput_model import BATCH, GROUPS
from benchmarks._goodput_system import System, end_with_children
from spare_megatron.cli.display import FollowedFile

HEARTBEAT_S, JOIN_S = 1.0, 10.0
"""The Lighthouse's time-outs: a replica without heartbeats is dead; a living one that does not ask for the quorum which
the others wait for is left out."""
LIGHTHOUSE_S = 20.0


class Torchft(System):
    """One process a replica (torchft_replica.py), one Lighthouse; this is the supervisor."""

    name = "torchft"

    def __init__(self, folder: Path, python: Path, timeout_s: float) -> None:
        super().__init__(folder)
        self._python, self._timeout_s = python, timeout_s
        self.notes = f"heartbeat time-out {HEARTBEAT_S:g} s, time-out of gloo {timeout_s:g} s"
        self._address = ""
        self._lighthouse: psutil.Popen | None = None
        self._replicas: dict[int, psutil.Popen] = {}
        self._struck: set[int] = set()
        """Process ids that were killed by the schedule: all other ends are failures of their own."""
        self._lines = [FollowedFile(folder / f"replica-{group}.jsonl") for group in range(GROUPS)]
        self._unstruck = 0

    @property
    def version(self) -> str:
        code = "from importlib.metadata import version as v; print(v('torchft-nightly'), v('torch'))"
        reported = subprocess.run([self._python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        return f"torchft-nightly {reported[0]}, torch {reported[1]}"

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        command = [str(self._python.with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
        command += ["--min_replicas", "1", "--quorum_tick_ms", "20"]
        command += ["--heartbeat_timeout_ms", f"{HEARTBEAT_S * 1000:.0f}", "--join_timeout_ms", f"{JOIN_S * 1000:.0f}"]
        self._lighthouse = self.run_logged(command, "lighthouse")
        deadline_s = time.monotonic() + LIGHTHOUSE_S
        while not _listens(port):
            if time.monotonic() > deadline_s:
                raise self.failed("lighthouse", "does not listen")
            time.sleep(0.05)
        for group in range(GROUPS):
            self._start_replica(group)

    def look(self) -> None:
        now_s = time.monotonic()
        states = {
            line["step"]: State(now_s, line["step"], line["groups"], line["groups"] * BATCH / GROUPS)
            for lines in self._lines
            for line in map(json.loads, lines.new_lines())
        }
        self.course.states += [states[step] for step in sorted(states)]
        assert self._lighthouse is not None, "started"
        if self._lighthouse.poll() is not None:
            raise self.failed("lighthouse", "has ended")
        for group, process in list(self._replicas.items()):
            if process.poll() is not None:
                self._unstruck += process.pid not in self._struck
                self._start_replica(group)

    def kill(self, group: int) -> int:
        process = self._replicas[group]
        self._struck.add(process.pid)
        process.kill()
        return 1

    def failure_free(self, now: bool) -> None:
        """It is always ready."""

    def own_failures(self, kills: int) -> int:
        return self._unstruck

    def end(self) -> None:
        for process in (*self._replicas.values(), self._lighthouse):
            end_with_children(process)

    def _start_replica(self, group: int) -> None:
        command = [str(self._python), "benchmarks/torchft_replica.py", str(group), self._address]
        command += [str(self.folder), str(self._timeout_s)]
        self._replicas[group] = self.run_logged(command, f"replica-{group}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
