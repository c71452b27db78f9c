"""Measures what the control plane adds to a step: the time from the last rank's report 'reduced' until all ranks have
the commit.

    python benchmarks/control_plane.py [--json FILE]

Coordinator, leaders and ranks are real processes, but there is no model: a rank waits a few milliseconds per piece and
reports that it reduced. The round trip is rank -> leader -> coordinator (journal on the disk) -> leader -> rank. CPU
time is per step and kind of process; the only rank of a group is its leader too. Goal: about 3 ms for 4 groups of 2
ranks on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from tests.process.control_job import ControlJob

SHAPES = ((2, 1), (4, 1), (4, 2), (8, 2))
STEPS = 150
PIECE_S = 0.01
WARM_UP = 10


def measure(groups: int, size: int) -> dict[str, object]:
    """One row: one job."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        job = ControlJob(path, groups, size, f"--steps {STEPS} --piece-s {PIECE_S} --pieces 2 --latency {path}/times")
        try:
            job.start()
            job.until(lambda: job.committed() >= WARM_UP)
            assert job.coordinator is not None
            kinds = {"coordinator": job.coordinator.pid, "leader": job.ranks[1, 0].pid}
            if size > 1:
                [leader] = psutil.Process(job.ranks[1, 0].pid).children()
                kinds |= {"leader": leader.pid, "rank": job.ranks[1, 1].pid}
            before = {kind: cpu_s(pid) for kind, pid in kinds.items()}
            first = job.committed()
            job.until(lambda: job.committed() >= STEPS - WARM_UP)
            steps = job.committed() - first
            spent = {f"{kind}_cpu_ms": (cpu_s(pid) - before[kind]) / steps * 1e3 for kind, pid in kinds.items()}
            job.finish()
            job.exits()
        finally:
            job.close()
        times = round_trips(path)
    return {
        "groups": groups,
        "ranks_per_group": size,
        "steps": len(times),
        "last_rank_ms_median": float(np.median(times[:, 0])),
        "last_rank_ms_p95": float(np.percentile(times[:, 0], 95)),
        "mean_rank_ms_median": float(np.median(times[:, 1])),
        "coordinator_cpu_ms": spent["coordinator_cpu_ms"],
        "leader_cpu_ms": spent["leader_cpu_ms"],
        "rank_cpu_ms": spent.get("rank_cpu_ms", "-"),
    }


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def round_trips(path: Path) -> np.ndarray:
    """Steps x (until the last rank, until the mean rank sees the commit), in ms."""
    steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for file in path.glob("times.*"):
        for step, reduced_s, committed_s in json.loads(file.read_text())[WARM_UP:]:
            steps[step].append((reduced_s, committed_s))
    rows = []
    for ranks in steps.values():
        reduced, committed = np.array(ranks).T
        rows.append((committed.max() - reduced.max(), committed.mean() - reduced.max()))
    return np.array(rows) * 1e3


def sync_cost_ms() -> float:
    """Median time of appending a record to a file and fdatasync."""
    with tempfile.TemporaryFile() as file:
        times = []
        for _ in range(200):
            started_s = time.perf_counter()
            os.write(file.fileno(), b"x" * 400)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started_s)
    return float(np.median(times)) * 1e3


def main() -> None:
    """Print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    rows = [measure(groups, size) for groups, size in SHAPES]
    config = {"steps": STEPS, "piece_s": PIECE_S, "pieces_per_shard": 2, "fdatasync_ms": round(sync_cost_ms(), 3)}
    report("control_plane", config, rows, args.json)


if __name__ == "__main__":
    main()
