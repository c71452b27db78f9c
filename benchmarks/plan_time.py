"""Measures how long spare-plan takes for 600,000 GPUs, from the start of its process to its answer.

    python benchmarks/plan_time.py [--runs N] [--json FILE]

It plans the worked example of docs/theory.md, section 7, with staged and with shared data, and one in which lost groups
come back. Figures are medians; CPU time is that of the process with its imports; the wall time is meaningful only on an
idle machine. Goals: 2 s, and 5 s where groups come back.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    *("--gpus", "600000", "--gpus-per-group", "600", "--mtbf-s", "300", "--weibull-shape", "0.78"),
    *("--restart-s", "3600", "--save-s", "60", "--compute-s", "64", "--reduce-s", "10"),
)
CASES = {
    "staged": ("--data", "staged", "--data-gib", "60000"),
    "shared": ("--data", "shared"),
    "staged, re-join": ("--data", "staged", "--data-gib", "60000", "--rejoin-s", "600", "--state-gib", "40"),
}


def once(words: tuple[str, ...]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one process."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "spare_megatron.cli.plan", *FLAGS, *words],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for label, words in CASES.items():
        cpu_s, wall_s = zip(*(once(words) for _ in range(args.runs)), strict=True)
        rows.append({"data": label, "cpu_s": round(median(cpu_s), 3), "wall_s": round(median(wall_s), 3)})
    report("plan_time", {"runs": args.runs, "groups": 1000}, rows, args.json)


if __name__ == "__main__":
    main()
