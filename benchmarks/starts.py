"""Measures the start of a job, from spare-launch to its first iteration line, with and without a preloaded parent.

    python benchmarks/starts.py [--rounds 10]

A small Megatron job of 4 groups x PP2 is started in turns in three ways: each rank makes its own imports
(``--spare-preload none``), spare-launch starts a parent that forks the ranks, and a parent that an earlier job has left
forks them (SPARE_PRELOADED). Taken at the first iteration line: the time since the start of spare-launch, the CPU time
of all processes of the job, and the memory of its ranks and their parents, with pages that several share divided by
their number (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks.masked_failure import FLAGS, GROUPS
from spare_megatron.launch.preloaded_ranks import LISTENING
from tests import preloaded

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("own imports", "forked", "forked again")
"""Each rank imports; a parent of this job's own; a parent that is there already."""


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            with tempfile.TemporaryDirectory() as scratch:
                found[way].append(_start(Path(scratch), way))
            print(f"round {number + 1} of {options.rounds}: {way}: {found[way][-1]}", flush=True)
    rows = [
        {"way": way, **{name: round(statistics.median(one[name] for one in starts), 2) for name in starts[0]}}
        | {"ratio": round(statistics.median(_ratios(found, way)), 3)}
        for way, starts in found.items()
    ]
    report("starts", {"flags": " ".join(FLAGS), "ranks": 2 * GROUPS, "rounds": options.rounds}, rows)


def _ratios(found: dict[str, list[dict[str, float]]], way: str) -> list[float]:
    """Wall time against own imports, round by round."""
    return [one["wall_s"] / own["wall_s"] for one, own in zip(found[way], found[WAYS[0]], strict=True)]


def _start(run_dir: Path, way: str) -> dict[str, float]:
    environ = {**preloaded.environment(), LISTENING: preloaded.socket_path() if way == WAYS[2] else ""}
    more = ["--spare-preload", "none"] if way == WAYS[0] else []
    command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS)]
    command += [
        "--run-dir",
        str(run_dir),
        "pretrain_gpt.py",
        *FLAGS,
        "--train-iters",
        "100000",
        "--log-interval",
        "1",
        *more,
    ]
    began_s = time.monotonic()
    with (run_dir / "launch.out").open("w") as output:
        job = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        while " iteration " not in (run_dir / "launch.out").read_text():
            assert job.poll() is None, (run_dir / "launch.out").read_text()
            time.sleep(0.02)
        wall_s = time.monotonic() - began_s
        processes = list(_of(job.pid, run_dir))
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in processes)
        pss = sum(process.memory_full_info().pss for process in processes)
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
    return {"wall_s": wall_s, "cpu_s": cpu_s, "pss_mb": pss / 1e6}


def _of(launcher: int, run_dir: Path) -> Iterator[psutil.Process]:
    """The launcher and all that it has started or had forked, with a parent of its own."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            mine = process.environ().get("SPARE_RUN_DIR") == str(run_dir) or str(run_dir) in process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and (mine or process.pid == launcher):
                yield process


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
