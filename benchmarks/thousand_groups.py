"""Measures a real coordinator process with a thousand groups: from a death to the last new view, from the last vote to
the last commit, its CPU time and its memory.

    python benchmarks/thousand_groups.py [--groups 1000 ...] [--pieces 1] [--json FILE]

The coordinator is the real one: gRPC server, journal on the disk, machine, detector. The groups' leaders are played by
a few processes (_many_leaders.py) that speak the real messages, each leader on a connection of its own; all groups end
a step at the same moment, so that their votes come at once. A group dies at a chosen moment of its step, in turn each
of ``MOMENTS``: a death just before the votes has its views delivered among a thousand votes. Deaths are reported as
spare-launch does (ReportExit). The players share the machine with the coordinator, so what they need to send and
receive is in the times: ``idle`` is the CPU time that was left of all cores. Bars for 1000 groups: both times 250 ms,
0.4 cores, 500 MB. The journal is replayed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._many_leaders import PATCH_S, RANKS, REDUNDANCY
from benchmarks._report import report
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security, call_once, open_channel
from spare_megatron.coordinator.journal import verify
from spare_megatron.runtime.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
PLAYERS = 2
FAILURE_FREE_STEPS = 8
STEP_S = 2.0
MOMENTS = (0.1, 0.5, 0.8, 0.9, 0.95)
"""When groups die, as shares of a step from its beginning: as the last commits are delivered; failure-free; 0.4, 0.2
and 0.1 s before the votes."""
DEATHS = 5
"""Deaths at each moment."""


class PlayedJob:
    """The processes of one job."""

    def __init__(self, path: Path, groups: int, pieces: int, profile: str) -> None:
        self.run_dir, self.groups = RunDirectory(path), groups
        self.run_dir.create()
        self.token = Security(self.run_dir.token(create=True))
        module = ["-m", "spare_megatron.cli.coordinator"]
        if profile:
            module = ["-m", "cProfile", "-o", profile, *module]
        self.log = (path / "coordinator.out").open("w")
        self.coordinator = subprocess.Popen(
            [sys.executable, *module, "--run-dir", str(path)], cwd=ROOT, stdout=self.log, stderr=self.log
        )
        self.wait(lambda: self.run_dir.coordinator() is not None, 60.0)
        published = self.run_dir.coordinator()
        assert published is not None
        self.address = published.address
        bounds = [groups * n // PLAYERS for n in range(PLAYERS + 1)]
        self.players = [
            subprocess.Popen(
                [sys.executable, "benchmarks/_many_leaders.py", *map(str, (path, first, end, groups, pieces, STEP_S))],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, end in pairwise(bounds)
        ]
        self._ends = bounds[1:]

    def status(self) -> dict[str, Any]:
        """status.json."""
        found: dict[str, Any] = json.loads(self.run_dir.status.read_text()) if self.run_dir.status.exists() else {}
        return found

    def wait(self, holds: Any, timeout_s: float) -> None:
        """Wait for something that another process does."""
        started_s = time.monotonic()
        while not holds():
            if self.coordinator.poll() is not None or time.monotonic() - started_s > timeout_s:
                raise RuntimeError(f"it did not happen; see {self.log.name}: {Path(self.log.name).read_text()[-2000:]}")
            time.sleep(0.02)

    def steps(self, count: int) -> None:
        """Let ``count`` more steps be committed."""
        goal = self.status().get("step", 0) + count
        self.wait(lambda: self.status().get("step", 0) >= goal, 60.0 + 30.0 * count * STEP_S)

    def die(self, group: int, moment: float) -> float:
        """A group dies at this moment of a step, a share of it; when it died."""
        player = self.players[next(n for n, end in enumerate(self._ends) if group < end)]
        assert player.stdin is not None
        assert player.stdout is not None
        player.stdin.write(f"die {group} {moment * STEP_S}\n")
        player.stdin.flush()
        died_s = float(player.stdout.readline())
        exited = pb.Exited(group=group, incarnation=0, position=3, status=-9)

        async def tell() -> None:
            async with open_channel(self.address, self.token, 30.0) as channel:
                await call_once(channel, "ReportExit", self.token, exited, 30.0)

        asyncio.run(tell())
        return died_s

    def received(self) -> list[dict[str, Any]]:
        """End the players; what they have measured."""
        answers = []
        for player in self.players:
            assert player.stdin is not None
            assert player.stdout is not None
            player.stdin.close()
            answers.append(json.loads(player.stdout.readline()))
        return answers

    def close(self, number: int = signal.SIGKILL) -> None:
        """End the processes."""
        for process in self.players:
            process.kill()
            process.wait()
        self.coordinator.send_signal(number)
        self.coordinator.wait(60.0)
        self.log.close()


def cpu_s(process: psutil.Process) -> float:
    """CPU time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(groups: int, pieces: int, profile: str) -> dict[str, object]:
    """One row: one job."""
    with tempfile.TemporaryDirectory() as scratch:
        started_s = time.monotonic()
        job = PlayedJob(Path(scratch), groups, pieces, profile)
        try:
            job.wait(lambda: job.status().get("step", 0) >= 2, 300.0)
            began_s = time.monotonic() - started_s
            coordinator = psutil.Process(job.coordinator.pid)
            spent_s, clock_s, idle_s = cpu_s(coordinator), time.monotonic(), psutil.cpu_times().idle
            first = job.status()["step"]
            job.steps(FAILURE_FREE_STEPS)
            steps, took_s = job.status()["step"] - first, time.monotonic() - clock_s
            spent_s, idle_s = cpu_s(coordinator) - spent_s, psutil.cpu_times().idle - idle_s
            count = DEATHS * len(MOMENTS)
            died_s = []
            for n in range(count):
                died_s.append(job.die((2 * n + 1) * groups // (2 * count), MOMENTS[n % len(MOMENTS)]))
            job.steps(2)
            memory = coordinator.memory_info().rss
            received = job.received()
        finally:
            job.close(signal.SIGINT if profile else signal.SIGKILL)
        records = verify(job.run_dir.journal)
        journal_bytes = job.run_dir.journal.stat().st_size
    rounds = np.array(commit_rounds(received)) * 1e3
    deaths = np.array([last_view_s(received, 2 + n) - at_s for n, at_s in enumerate(died_s)]) * 1e3
    by_moment = {str(moment): deaths[n :: len(MOMENTS)] for n, moment in enumerate(MOMENTS)}
    return {
        "groups": groups,
        "pieces_per_shard": pieces,
        "death_to_last_view_ms_median": float(np.median(deaths)),
        "death_to_last_view_ms_worst": float(deaths.max()),
        "death_to_last_view_ms_median_by_moment": {at: float(np.median(taken)) for at, taken in by_moment.items()},
        "death_to_last_view_ms_worst_by_moment": {at: float(taken.max()) for at, taken in by_moment.items()},
        "last_vote_to_last_commit_ms_median": float(np.median(rounds)),
        "last_vote_to_last_commit_ms_worst": float(rounds.max()),
        "coordinator_cores": spent_s / took_s,
        "coordinator_cpu_ms_per_step": spent_s / steps * 1e3,
        "idle_cores": idle_s / took_s,
        "coordinator_rss_mb": memory / 1e6,
        "first_commits_s": began_s,
        "records": records,
        "journal_mb": journal_bytes / 1e6,
    }


def commit_rounds(received: list[dict[str, Any]]) -> list[float]:
    """From the last vote that was sent for a step to the last commit of it that was received, of all steps."""
    voted: dict[int, float] = {}
    committed: dict[int, float] = {}
    for one in received:
        for step, _, at_s in one["voted"]:
            voted[step] = max(at_s, voted.get(step, 0.0))
        for step, at_s in one["committed"]:
            committed[step] = max(at_s, committed.get(step, 0.0))
    last = max(committed)
    return [committed[step] - voted[step] for step in sorted(committed) if 1 < step < last]


def last_view_s(received: list[dict[str, Any]], epoch: int) -> float:
    """When the last view of an epoch was received."""
    return float(max(last_s for one in received for found, _, last_s in one["viewed"] if found == epoch))


def main() -> None:
    """Print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1000], help="numbers of groups; default: 1000")
    parser.add_argument("--pieces", type=int, default=1, help="pieces of a shard; default: 1")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--profile", default="", help="write a cProfile of the coordinator there; times do not count")
    args = parser.parse_args()
    rows = [measure(groups, args.pieces, args.profile) for groups in args.groups]
    config = {
        "ranks_per_group": RANKS, "redundancy": REDUNDANCY, "step_s": STEP_S, "patch_s": PATCH_S,
        "calm_steps": FAILURE_FREE_STEPS, "moments": MOMENTS, "deaths_at_each_moment": DEATHS, "players": PLAYERS,
        "load_before": round(os.getloadavg()[1], 1),
    }  # fmt: skip
    report("thousand_groups", config, rows, args.json)


if __name__ == "__main__":
    main()
