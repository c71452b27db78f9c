"""Measures what the leader of a large group takes from the training thread of position 0.

    python benchmarks/leader.py [--ranks 600 ...] [--rounds 6] [--json FILE]

One group under a real coordinator: position 0 is a real process with a real session, and its training thread does short
torch kernels with Python between them. All other ranks are played by two processes (_led_ranks.py) with the real
streams, beats at the usual interval and after each piece, step reports and ballots; the leader relays every commit to
them. A training thread loses time to a leader of its own process by waiting for the interpreter (each kernel gives it
up and must get it back), and by what changes of threads cost its caches.

The players are stopped (SIGSTOP) and go on in turns, so that each round is a pair: the same training thread with a
leader that has nothing to hear, and with one that has. The kernel says for how long the thread ran, and for how long it
was ready and had no core (/proc/PID/task/TID/schedstat); on a machine with few cores the players take cores too, which
is no cost of a leader, so the time without a core is left out:

* ``taken_pct``: of the time in which the thread had a core or waited for something else than a core, how much of its
  work (units) is missing beside the quiet turn. This is the share of its CPU seconds that the leader takes. Bar: 1 %.
* ``waited_pct``: its part that is waiting for the interpreter: neither running nor ready. If the thread that has the
  interpreter is itself without a core, that is in it: on a busy machine this is an upper bound.
* ``cpu_per_unit_pct``: how much more CPU time a unit took. Cores that share caches or are two threads of one core show
  here too, whoever used the other one.
* ``other_threads_cpu_pct``: CPU time of the other threads of the process, of one core: a control thread has the
  interpreter for most of it. ``leader_process_cpu_pct``: of processes that position 0 has started.

Each number of ranks has two rows, with steps of 2 s and with a step that does not end: beats alone. What a step costs
follows from the two, and so the share at a step of 64 s (``taken_at_64_s_pct``, in the row of the 2 s).
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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._led_ranks import PIECES, TIMES
from benchmarks._report import report
from spare_megatron.control.run_directory import RunDirectory

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
        self._path = path
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
        leader_s = sum(_process_s(child.pid) for child in psutil.Process(pid).children(recursive=True))
        return Sample(time.monotonic(), *self._count(), ran_s, unserved_s, _process_s(pid) - ran_s, leader_s)


def _schedule(pid: int, tid: int) -> tuple[float, float]:
    """For how long a thread ran, and for how long it was ready and had no core."""
    ran, unserved, _ = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(unserved) / 1e9


def _process_s(pid: int) -> float:
    """CPU time of all threads of a process that live."""
    return sum(_schedule(pid, int(name))[0] for name in os.listdir(f"/proc/{pid}/task"))


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


def measure(ranks: int, step_s: float, rounds: int, window_s: float) -> dict[str, object]:
    """One row: one group."""
    with tempfile.TemporaryDirectory() as scratch:
        group = LedGroup(Path(scratch), ranks, step_s)
        try:
            pairs = [(turn(*group.window(False, window_s)), turn(*group.window(True, window_s))) for _ in range(rounds)]
        finally:
            group.close()
    quiet, busy = ([one[n] for one in pairs] for n in range(2))

    def added(name: str) -> list[float]:
        return [getattr(b, name) - getattr(q, name) for q, b in zip(quiet, busy, strict=True)]

    taken = [1 - b.rate / q.rate for q, b in zip(quiet, busy, strict=True)]
    more = [b.cpu_per_unit_s / q.cpu_per_unit_s - 1 for q, b in zip(quiet, busy, strict=True)]
    return {
        "ranks": ranks,
        "step_s": step_s if step_s < ENDLESS_S else "endless",
        "taken_pct": 100 * float(np.median(taken)),
        "taken_pct_min": 100 * min(taken),
        "taken_pct_max": 100 * max(taken),
        "waited_pct": 100 * float(np.median(added("waited"))),
        "cpu_per_unit_pct": 100 * float(np.median(more)),
        "other_threads_cpu_pct": 100 * float(np.median(added("others"))),
        "leader_process_cpu_pct": 100 * float(np.median(added("leader"))),
        "quiet_unit_ms": 1e3 * float(np.median([one.cpu_per_unit_s for one in quiet])),
        "steps": sum(one.steps for one in busy),
        "no_core_pct": 100 * float(np.median([one.unserved for one in busy])),
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
        beats, steps = (measure(ranks, step_s, args.rounds, args.window_s) for step_s in (ENDLESS_S, STEP_S))
        for name in ("taken", "other_threads_cpu"):
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
