"""Measures the time from the SIGKILL of a whole group to the commit of the step in which it died, and its parts.

    python benchmarks/masked_failure.py [--kills 10]

Real Megatron jobs of 4 groups x PP2, or ``--stages``, with a hidden size of 128, or ``--hidden-sizes`` (the larger, the
more of a rank's time goes into products, which leave the interpreter to its other threads). Each masks up to three
kills at random moments of random steps, from outside, by the pids of processes.json. Communicators form
(``rebuild_s``, of the slowest rank) beside the agreement (``agree_s``); ``formed_s`` is how long both took together,
from the decision on. ``total_s`` is this benchmark's own clock, from the signal to the commit's line in metrics.jsonl;
the parts are the coordinator's and the ranks' figures in that line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.cli.display import FollowedFile

ROOT = Path(__file__).resolve().parents[1]
GROUPS, KILLS_PER_JOB, STEPS_BETWEEN = 4, 3, 6
PARTS = ("detect_s", "agree_s", "rebuild_s", "formed_s", "patch_s", "reduce_s")
MODEL = (
    *("--num-layers", "4", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--micro-batch-size", "1", "--global-batch-size", "16", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "1023", "--split", "100,0,0", "--eval-iters", "0", "--log-interval", "1000"),
    *("--spare-redundancy", "4", "--num-workers", "0"),
)


def flags(stages: int = 2, hidden: int = 128) -> tuple[str, ...]:
    """Of pretrain_gpt.py, for a job of this shape."""
    return (*MODEL, "--pipeline-model-parallel-size", f"{stages}", "--hidden-size", f"{hidden}")


FLAGS = flags()


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", type=int, nargs="+", default=[2], help="pipeline stages of the jobs")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[128])
    options = parser.parse_args()
    rows = []
    for stages, hidden in itertools.product(options.stages, options.hidden_sizes):
        draw = random.Random(options.seed)
        found: list[dict[str, float]] = []
        while len(found) < options.kills:
            found += _job(draw, min(KILLS_PER_JOB, options.kills - len(found)), flags(stages, hidden))
        name = f"PP{stages} x {GROUPS}"
        rows += [_row(name, hidden, part, found) for part in (*PARTS, "all_but_patch_and_reduce_s", "total_s")]
    report("masked_failure", {"flags": " ".join(MODEL), "kills": options.kills, "seed": options.seed}, rows)


def _row(shape: str, hidden: int, part: str, found: list[dict[str, float]]) -> dict[str, object]:
    values = [one[part] for one in found]
    return {
        "shape": shape,
        "hidden": hidden,
        "part": part,
        "median_s": round(statistics.median(values), 4),
        "min_s": round(min(values), 4),
        "max_s": round(max(values), 4),
    }


def _job(draw: random.Random, kills: int, words: tuple[str, ...] = FLAGS) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch)
        steps = STEPS_BETWEEN * (kills + 1)
        command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS), "--run-dir", scratch]
        command += ["pretrain_gpt.py", *words]
        command += ["--train-iters", f"{steps}", "--spare-max-group-restarts", "0"]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        try:
            victims = draw.sample(range(GROUPS), kills)
            lines = _lines(run_dir / "metrics.jsonl", process)
            found = [_kill(run_dir, group, STEPS_BETWEEN * (n + 1), draw, lines) for n, group in enumerate(victims)]
            if process.wait() != 0:
                raise SystemExit(f"spare-launch ended with exit code {process.returncode}")
        finally:
            process.kill()
    return found


def _kill(
    run_dir: Path, group: int, after: int, draw: random.Random, lines: Iterator[dict[str, Any]]
) -> dict[str, float]:
    """Kill ``group`` in a step after ``after``; returns the times of the recovery's parts."""
    next(line for line in lines if line["step"] >= after - 3)
    time.sleep(draw.uniform(0, 0.4))
    ranks = json.loads((run_dir / "processes.json").read_text())["ranks"]
    killed_s = time.monotonic()
    for rank in ranks:
        if rank["group"] == group:
            os.kill(rank["pid"], signal.SIGKILL)
    line = next(line for line in lines if group in (line["recovery"] or {}).get("lost_groups", ()))
    recovery = {part: line["recovery"][part] for part in PARTS}
    rest = recovery["detect_s"] + recovery["formed_s"]
    return {**recovery, "all_but_patch_and_reduce_s": rest, "total_s": time.monotonic() - killed_s}


def _lines(metrics: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, each once, as they come; whoever waits takes no time from the job that matters."""
    file = FollowedFile(metrics)
    while True:
        yield from map(json.loads, file.new_lines())
        if process.poll() is not None:
            raise SystemExit(f"the job ended with exit code {process.returncode} before the expected moment")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
