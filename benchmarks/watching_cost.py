"""Measures what it costs a job to be watched: CPU time inside the code that observes, of the CPU time of the job.

    python benchmarks/watching_cost.py [--steps 60]

A real Megatron job of 4 groups x PP2 runs with its metrics, its status and TensorBoard. In each of its processes every
function that observes is bracketed with the clock of its thread (_cpu_meter.py), which counts too: status.json, lines
of metrics, figures of votes, reports of steps, events. Phases and beats of ranks, by which failures are detected, have
a row of their own: people see them too, but nothing is reported for them alone. From the commit of step 5 to the last
but one, the sums are set against the CPU time of all ranks, leaders and the coordinator: in one run, so that it does
not matter what else the machine does. Bar: 0.2 %. What the coordinator needs for a thousand groups is in
watched_job.json, and what spare-page needs, a process of its own, in page.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._cpu_meter import DETECTION, VARIABLE
from benchmarks._report import report
from benchmarks.masked_failure import FLAGS, GROUPS

ROOT = Path(__file__).resolve().parents[1]
FROM_STEP = 5


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        _job(path, options.steps)
        lines = [json.loads(text) for text in (path / "run" / "metrics.jsonl").read_text().splitlines()]
        begin_s, end_s = (next(line["time_unix_s"] for line in lines if line["step"] == step) for step in _span(lines))
        processes = [one for file in (path / "meter").iterdir() for one in _of_process(file, begin_s, end_s)]
    rows = list(_rows(processes))
    config = {"flags": " ".join(FLAGS), "groups": GROUPS, "seconds": round(end_s - begin_s, 1), **vars(options)}
    report("watching_cost", config, rows)


def _span(lines: list[dict[str, Any]]) -> tuple[int, int]:
    return FROM_STEP, lines[-2]["step"]


def _job(path: Path, steps: int) -> None:
    """Run the job, with the meter in each of its processes."""
    (path / "meter").mkdir()
    (path / "sitecustomize.py").write_text("import benchmarks._cpu_meter\n")
    command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS)]
    command += ["--run-dir", str(path / "run"), "pretrain_gpt.py", *FLAGS, "--train-iters", str(steps)]
    command += ["--tensorboard-dir", str(path / "boards")]
    environment = dict(os.environ, PYTHONPATH=f"{path}:{ROOT}", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    environment[VARIABLE] = str(path / "meter")
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def _of_process(file: Path, begin_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    """What a process did between these times; nothing where it did not live so long."""
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if begin_s <= line["at_s"] <= end_s]
    if len(lines) < 2:
        return
    first, last = lines[0], lines[-1]
    yield {
        "is_coordinator": "status" in last["calls"],
        "cpu_s": last["cpu_s"] - first["cpu_s"],
        **{
            name: {what: value - first[name].get(what, 0) for what, value in last[name].items()}
            for name in ("inside_s", "calls")
        },
    }


def _rows(processes: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """By process and purpose, then all."""
    all_s, inside_s, all_calls = sum(one["cpu_s"] for one in processes), 0.0, 0
    for name, is_coordinator in (("coordinator", True), ("ranks and leaders", False)):
        own = [one for one in processes if one["is_coordinator"] == is_coordinator]
        own_s = sum(one["cpu_s"] for one in own)
        for what in sorted({what for one in own for what in one["calls"]}):
            took_s, calls = (sum(one[key].get(what, 0) for one in own) for key in ("inside_s", "calls"))
            if what != DETECTION:
                inside_s, all_calls = inside_s + took_s, all_calls + calls
            yield _row(name, what, len(own), own_s, calls, took_s, all_s)
    yield _row("all", "all but failure detection", len(processes), all_s, all_calls, inside_s, all_s)


def _row(
    process: str, watching: str, processes: int, cpu_s: float, calls: int, took_s: float, all_s: float
) -> dict[str, object]:
    return {
        "process": process,
        "watching": watching,
        "processes": processes,
        "cpu_s": round(cpu_s, 3),
        "calls": calls,
        "inside_s": round(took_s, 4),
        "us_a_call": round(1e6 * took_s / max(1, calls), 1),
        "percent_of_job": round(100 * took_s / all_s, 4),
    }


if __name__ == "__main__":
    main()
