"""Measures the time from the SIGKILL of a whole group to the commit of the step in which it died, and its parts.

    python benchmarks/masked_failure.py [--kills 10] [--state-copies 4 2]

Real Megatron jobs of 4 groups x PP2, or ``--stages``, with a hidden size of 128, or ``--hidden-sizes`` (the larger, the
more of a rank's time goes into products, which leave the interpreter to its other threads). Each masks up to three
kills at random moments of random steps, from outside, by the pids of processes.json. Communicators form
(``rebuild_s``, of the slowest rank) beside the agreement (``agree_s``); ``formed_s`` is how long both took together,
from the decision on. ``total_s`` is this benchmark's own clock, from the signal to the commit's line in metrics.jsonl;
the parts are the coordinator's and the ranks' figures in that line.

``--state-copies`` takes several numbers of copies of the optimizer's state (4: every group keeps all). Their jobs run
in turns, with kills at the same steps, and there are more rows, from the journal. ``whole_s`` is from the signal until
each state shard has its copies again, as far as there are groups, and ``copied_mb`` what was copied for that by all
ranks, in 10^6 bytes. ``step_by_before`` is the mean time of the two steps behind the masked one, of which the first
begins with what copies need, over the median of the three before the kill; fewer groups have more pieces each then,
whatever they keep.
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
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.cli.display import FollowedFile
from spare_megatron.coordinator import journal
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.messages import SendCommit, SendView
from spare_megatron.protocol.view import View
from spare_megatron.worker.job_arguments import parse_job
from spare_megatron.worker.memory_forecast import memory_items
from spare_megatron.worker.piece_choice import likely_vocabulary

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
    parser.add_argument("--state-copies", type=int, nargs="+", default=[GROUPS], help="copies of each state shard")
    parser.add_argument("--json", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    rows = []
    for stages, hidden in itertools.product(options.stages, options.hidden_sizes):
        found = _in_turns(options.seed, options.kills, flags(stages, hidden), options.state_copies)
        for copies, kills in found.items():
            name = f"PP{stages} x {GROUPS}"
            known = {"shape": name, "hidden": hidden, "state_copies": copies}
            parts = (*PARTS, "all_but_patch_and_reduce_s", "total_s")
            if options.state_copies != [GROUPS]:
                parts += ("step_by_before", *(("whole_s", "copied_mb") if copies < GROUPS else ()))
            rows += [{**known, **_row(part, kills)} for part in parts]
    name = "masked_failure" if options.state_copies == [GROUPS] else "masked_failure_state"
    report(name, {"flags": " ".join(MODEL), "kills": options.kills, "seed": options.seed}, rows, options.json)


def _in_turns(seed: int, kills: int, words: tuple[str, ...], numbers: list[int]) -> dict[int, list[dict[str, float]]]:
    """Number of copies -> the figures of so many kills. One job of each in turn, every second time in reverse order."""
    found: dict[int, list[dict[str, float]]] = {copies: [] for copies in numbers}
    draws = {copies: random.Random(seed) for copies in numbers}
    order = list(numbers)
    while len(found[order[0]]) < kills:
        for copies in order:
            left = kills - len(found[copies])
            found[copies] += _job(draws[copies], min(KILLS_PER_JOB, left), words, copies)
        order.reverse()
    return found


def _row(part: str, found: list[dict[str, float]]) -> dict[str, object]:
    values = [one[part] for one in found]
    return {
        "part": part,
        "median_s": round(statistics.median(values), 4),
        "min_s": round(min(values), 4),
        "max_s": round(max(values), 4),
    }


def _job(
    draw: random.Random, kills: int, words: tuple[str, ...] = FLAGS, copies: int = GROUPS
) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch)
        steps = STEPS_BETWEEN * (kills + 1)
        if copies < GROUPS:
            words = (*words, "--spare-state-redundancy", f"{copies}")
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
            records = list(journal.read(run_dir / "journal.jsonl"))
        finally:
            process.kill()
    return [{**one, **_recorded(records, one["killed_unix_s"], words, copies)} for one in found]


def _recorded(records: list[Record], killed_s: float, words: tuple[str, ...], copies: int) -> dict[str, float]:
    """What the journal says of one kill: how long steps took, and when copies of state were made again."""
    commits = [one.time_unix_s for one in records if any(isinstance(action, SendCommit) for action in one.actions)]
    masked = next(n for n, time_s in enumerate(commits) if time_s > killed_s)
    before = [late - early for early, late in itertools.pairwise(commits[max(0, masked - 4) : masked])]
    after_s = (commits[masked + 2] - commits[masked]) / 2
    views = [(one.time_unix_s, a.view) for one in records for a in one.actions if isinstance(a, SendView)]
    first = next(n for n, (time_s, _) in enumerate(views) if time_s > killed_s)
    whole_s = next((time_s for time_s, view in views[first:] if _is_whole(view, copies)), killed_s) - killed_s
    new = sum(host.is_new for host in views[first][1].state_hosts)
    copied = new * _shard_bytes(words) if new else 0.0
    step = after_s / statistics.median(before)
    return {"step_by_before": step, "whole_s": whole_s, "copied_mb": copied / 1e6}


def _is_whole(view: View, copies: int) -> bool:
    counts = Counter(host.shard for host in view.state_hosts if host.counts)
    return len(counts) == GROUPS and min(counts.values()) >= min(copies, len(view.live))


@cache
def _shard_bytes(words: tuple[str, ...]) -> float:
    """The optimizer's state of one shard, of all ranks of a group."""
    job, namespace = parse_job([*words, "--train-iters", "1"], {"SPARE_NUM_GROUPS": f"{GROUPS}"})
    rank = memory_items(namespace, job.shape, likely_vocabulary(namespace))["optimizer"]
    return rank / namespace.spare_state_redundancy * namespace.pipeline_model_parallel_size


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
    total_s = time.monotonic() - killed_s
    unix_s = time.time() - total_s
    return {**recovery, "all_but_patch_and_reduce_s": rest, "total_s": total_s, "killed_unix_s": unix_s}


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
