"""Measures what the leader of a large group takes from the training thread of position 0.

    python benchmarks/leader.py [--ranks 600 ...] [--rounds 6] [--json FILE]

One group under a real coordinator: position 0 is a real process with a real session, and its training thread does short
torch kernels with Python between them. All other ranks are played by two processes (_led_ranks.py) with the real
streams, beats at the usual interval and after each piece, step reports and ballots; the leader relays every commit to
them. Whatever else runs in position 0's process takes time from its training thread, because one thread at a time has
the interpreter: each kernel gives it up and must get it back.

The players are stopped (SIGSTOP) and go on in turns, so that each round is a pair: the same training thread with a
leader that has nothing to receive, and with one that has. The kernel says for how long each thread ran, and for how
long it was ready and had no core (/proc/PID/task/TID/schedstat). On a machine with few cores the players take cores
too, which is no cost of a leader. So there are two measures, one that cores do not matter to and one that leaves them
out:

* ``other_threads_cpu_pct``: CPU time of the other threads of position 0's process, of the time that passes;
  ``other_threads_quiet_pct``: in the quiet turns. Nearly all of it is the control thread, in Python, with the
  interpreter. With a core for each thread no more than this can be taken from the training thread: this is the bar,
  1 % of its CPU seconds. It holds on a busy machine as well.
* ``taken_pct``: how much of its work (units) is missing beside the quiet turn, of the time in which the training thread
  had a core or waited for something else than a core. ``waited_pct`` is the part in which it neither ran nor was ready:
  it waited for the interpreter. A thread that has the interpreter and no core is in both, so these two count only where
  ``no_core_pct`` is small: the share of time in which the training thread was ready and had no core.

``leader_process_cpu_pct`` is the CPU time of processes that position 0 has started. Each number of ranks has two rows,
with steps of 2 s and with a step that does not end: beats alone. What a step costs follows from the two, and so the
share at a step of 64 s (in the row of the 2 s).
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._led_ranks import PIECES
from benchmarks._played_job import TIMES
from benchmarks._report import report
from spare_megatron.runtime.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
PLAYERS = 2
STEP_S = 2.0
LONG_STEP_S = 64.0
ENDLESS_S = 1e6
SETTLE_S = 1.5
"""After the players were stopped or went on: what has piled up is dealt with."""
START_S = 180.0


class Sample(NamedTuple):
    """What was counted up to one moment; seconds."""

    at_s: float
    units: int
    steps: int
    ran_s: float
    unserved_s: float
    others_s: float
    leader_s: float


class LedGroup:
    """The processes of one group."""

    def __init__(self, path: Path, ranks: int, step_s: float) -> None:
        run_dir = RunDirectory(path / "run")
        run_dir.create()
        run_dir.token(create=True)
        self._counts = path / "counts"
        self._counts.write_bytes(bytes(16))
        self._started: list[subprocess.Popen[bytes]] = []
        self._log = (path / "log").open("wb")
        self._start("-m", "spare_megatron.cli.coordinator", "--run-dir", str(run_dir.path))
        self._until(lambda: run_dir.coordinator() is not None)
        common = (str(run_dir.path), str(ranks), str(step_s))
        self.rank = self._start("benchmarks/_led_ranks.py", "train", *common, str(self._counts))
        bounds = [1 + (ranks - 1) * n // PLAYERS for n in range(PLAYERS + 1)]
        self._players = [
            self._start("benchmarks/_led_ranks.py", "play", *common, str(first), str(end))
            for first, end in pairwise(bounds)
            if end > first
        ]
        self._until(lambda: self._count()[0] > 0)

    def window(self, playing: bool, window_s: float) -> tuple[Sample, Sample]:
        """One turn: the counts at its begin and at its end."""
        for player in self._players:
            player.send_signal(signal.SIGCONT if playing else signal.SIGSTOP)
        time.sleep(SETTLE_S)
        before = self._sample()
        time.sleep(window_s)
        return before, self._sample()

    def close(self) -> None:
        """End the processes."""
        for process in reversed(self._started):
            process.kill()
            process.wait()
        self._log.close()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=self._log, stderr=self._log)
        self._started.append(process)
        return process

    def _until(self, holds) -> None:
        started_s = time.monotonic()
        while not holds():
            dead = any(process.poll() is not None for process in self._started)
            if dead or time.monotonic() - started_s > START_S:
                raise RuntimeError(f"it did not happen: {Path(self._log.name).read_text()[-3000:]}")
            time.sleep(0.05)

    def _count(self) -> tuple[int, int]:
        units, steps = struct.unpack("qq", self._counts.read_bytes())
        return units, steps

    def _sample(self) -> Sample:
        self._until(lambda: True)
        pid = self.rank.pid
        ran_s, unserved_s = _schedule(pid, pid)
        others_s = sum(_schedule(pid, tid)[0] for tid in _threads(pid) if tid != pid)
        children = [child.pid for child in psutil.Process(pid).children()]
        leader_s = sum(_schedule(child, tid)[0] for child in children for tid in _threads(child))
        return Sample(time.monotonic(), *self._count(), ran_s, unserved_s, others_s, leader_s)


def _schedule(pid: int, tid: int) -> tuple[float, float]:
    """For how long a thread ran, and for how long it was ready and had no core."""
    ran, unserved, _ = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(unserved) / 1e9


def _threads(pid: int) -> list[int]:
    return list(map(int, os.listdir(f"/proc/{pid}/task")))


class Turn(NamedTuple):
    """Shares of one window."""

    rate: float
    """Units a second, of the time in which the thread had a core or waited for something else."""
    waited: float
    cpu_per_unit_s: float
    others: float
    leader: float
    steps: int
    unserved: float


def turn(before: Sample, after: Sample) -> Turn:
    """What happened between two samples."""
    passed = Sample(*(b - a for a, b in zip(before, after, strict=True)))
    served_s = passed.at_s - passed.unserved_s
    return Turn(
        rate=passed.units / served_s,
        waited=(served_s - passed.ran_s) / served_s,
        cpu_per_unit_s=passed.ran_s / passed.units,
        others=passed.others_s / passed.at_s,
        leader=passed.leader_s / passed.at_s,
        steps=passed.steps,
        unserved=passed.unserved_s / passed.at_s,
    )


def measure(args: argparse.Namespace, ranks: int, step_s: float) -> dict[str, object]:
    """One row: one group."""
    with tempfile.TemporaryDirectory() as scratch:
        group = LedGroup(Path(scratch), ranks, step_s)
        try:
            pairs = []
            for _ in range(args.rounds):
                quiet_turn = turn(*group.window(False, args.window_s))
                pairs.append((quiet_turn, turn(*group.window(True, args.window_s))))
        finally:
            group.close()
    quiet, busy = ([one[n] for one in pairs] for n in range(2))

    def percent(shares: Iterable[float]) -> float:
        return 100 * float(np.median(list(shares)))

    taken = [1 - b.rate / q.rate for q, b in pairs]
    return {
        "ranks": ranks,
        "step_s": step_s if step_s < ENDLESS_S else "endless",
        "other_threads_cpu_pct": percent(one.others for one in busy),
        "other_threads_quiet_pct": percent(one.others for one in quiet),
        "taken_pct": percent(taken),
        "taken_pct_min": 100 * min(taken),
        "taken_pct_max": 100 * max(taken),
        "waited_pct": percent(b.waited - q.waited for q, b in pairs),
        "leader_process_cpu_pct": percent(one.leader for one in busy),
        "quiet_unit_ms": 1e3 * float(np.median([one.cpu_per_unit_s for one in quiet])),
        "steps": sum(one.steps for one in busy),
        "no_core_pct": percent(one.unserved for one in busy),
    }


def main() -> None:
    """Print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[600], help="ranks of the group; default: 600")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of turns; default: 6")
    parser.add_argument("--window-s", type=float, default=6.0, help="seconds of a turn; default: 6")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        beats, steps = (measure(args, ranks, step_s) for step_s in (ENDLESS_S, STEP_S))
        for name in ("other_threads_cpu", "taken"):
            alone, both = float(str(beats[f"{name}_pct"])), float(str(steps[f"{name}_pct"]))
            at_long = f"{name}_at_{LONG_STEP_S:.0f}_s_pct"
            steps[at_long], beats[at_long] = alone + (both - alone) * STEP_S / LONG_STEP_S, "-"
        rows += [steps, beats]
    config = {
        "interval_s": TIMES.heartbeat_interval_s, "pieces": PIECES, "players": PLAYERS, "rounds": args.rounds,
        "window_s": args.window_s, "load_before": round(os.getloadavg()[1], 1),
    }  # fmt: skip
    report("leader", config, rows, args.json)


if __name__ == "__main__":
    main()
