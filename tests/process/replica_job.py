"""The test's side of :mod:`tests.process.replica_rank`: starts ranks, moves them to epochs, kills and stops them.

The test's process plays the coordinator: it knows the addresses and sends the views. Every process is killed by its pid
when the block is left.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil

from tests import preloaded
from tests.polling import until
from tests.spawn import ROOT, environment

PATIENCE_S = 60.0
"""For one line of a rank: its start alone took 20 s beside a load of 26 on 2 cores."""
Line = dict[str, Any]


class RankProcess:
    """One rank, and the lines it wrote that nobody has read yet."""

    def __init__(self, spec: dict[str, Any], inside: list[str]) -> None:
        """``inside``: what comes before the command, to run it elsewhere."""
        self.group = spec["group"]
        module, words = "tests.process.replica_rank", [json.dumps(spec)]
        self.process: preloaded.PipedProcess | subprocess.Popen[str]
        if not inside:
            self.process = preloaded.PipedProcess(module, words, environment())
        else:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", module, *words],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.lines: queue.Queue[Line] = queue.Queue()
        self.log: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_lines, self._read_log)]
        for reader in self._readers:
            reader.start()

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def expect(self, wanted: Callable[[Line], bool]) -> Line:
        """The next line for which ``wanted`` holds; no line before it may tell of a wrong sum."""
        deadline_s = time.monotonic() + PATIENCE_S
        seen: list[Line] = []
        while True:
            try:
                seen.append(self.lines.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                what = f"group {self.group} (exit {self.process.poll()}) wrote {seen[-3:]}, not what was awaited"
                raise AssertionError(f"{what}; its log: {''.join(self.log[-20:])}") from None
            assert seen[-1].get("right", True), f"group {self.group} got a wrong sum: {seen[-1]}"
            if wanted(seen[-1]):
                return seen[-1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)


class ReplicaJob:
    """Ranks of one rank position, one for each group, and the epoch they are in."""

    def __init__(
        self,
        numel: int,
        bucket_bytes: int,
        timeout_s: float,
        host: Callable[[int], str] = lambda group: "127.0.0.1",
        inside: Callable[[int], list[str]] = lambda group: [],
    ) -> None:
        self._inside = inside
        self.ranks: dict[int, RankProcess] = {}
        self.epoch = 0
        self._spec = {"numel": numel, "bucket_bytes": bucket_bytes, "timeout_s": timeout_s}
        self._host = host
        self._addresses: dict[int, str] = {}

    def start(self, groups: Iterable[int]) -> None:
        new = {
            group: RankProcess({"group": group, "host": self._host(group), **self._spec}, self._inside(group))
            for group in groups
        }
        self.ranks.update(new)
        for group, rank in new.items():
            self._addresses[group] = rank.expect(lambda line: line["event"] == "up")["address"]

    def view(self, groups: Iterable[int], fault: dict[int, Line] | None = None, reductions: int = 0) -> float:
        """Send the view of a new epoch to its members; returns when."""
        members = sorted(groups)
        self.epoch += 1
        sent_s = time.monotonic()
        for group, right in zip(members, members[1:] + members[:1], strict=True):
            adopt = {"epoch": self.epoch, "groups": members, "right_at": self._addresses[right]}
            self.ranks[group].send(adopt=adopt, fault=(fault or {}).get(group), reductions=reductions)
        return sent_s

    def sums(self, groups: Iterable[int]) -> list[float]:
        """When each group had its next sum in the present epoch, a right one."""
        epoch = self.epoch
        return [
            self.ranks[group].expect(lambda line: line["event"] == "reduced" and line["epoch"] == epoch and line["ok"])[
                "at_s"
            ]
            for group in groups
        ]

    def struck(self, group: int) -> None:
        """Wait until the fault that was ordered with the view has come: the process is stopped, or dead."""
        rank = self.ranks[group]
        rank.expect(lambda line: line["event"] == "fault")
        ended, process = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE), psutil.Process(rank.process.pid)
        until(f"group {group} has struck itself", lambda: process.status() in ended, PATIENCE_S, every_s=0.001)

    def strike(self, group: int, number: signal.Signals) -> None:
        self.ranks[group].process.send_signal(number)

    def resources(self, group: int) -> Line:
        self.ranks[group].send(resources=True)
        return self.ranks[group].expect(lambda line: line["event"] == "resources")

    def end(self, group: int) -> None:
        self.ranks.pop(group).end()

    def close(self) -> None:
        for group in list(self.ranks):
            self.end(group)


@contextlib.contextmanager
def replica_job(groups: int, numel: int, bucket_bytes: int = 16 << 20, timeout_s: float = 30.0) -> Iterator[ReplicaJob]:
    job = ReplicaJob(numel, bucket_bytes, timeout_s)
    try:
        job.start(range(groups))
        yield job
    finally:
        job.close()
