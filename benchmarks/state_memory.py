"""Measures the memory of ranks whose groups keep only some parts of the optimizer's state, beside the forecast.

    python benchmarks/state_memory.py [--groups 2 4 8] [--copies 2] [--layers 8] [--hidden 512] [--json FILE]

For each number of groups N two jobs of real processes train some steps (``_measured_pretrain.py``), one with
--spare-state-redundancy R and one whose groups keep all state; each group is one rank. ``optimizer_mb`` is the largest
rank's optimizer tensors, ``formula_mb`` 12 R / N bytes a parameter, ``forecast_mb`` the item of --spare-check.
``resident_mb`` is the mean resident memory at the end, ``whole_mb`` that of the groups that keep all, and
``most_resident_mb`` the greatest that a rank had. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _measured_pretrain import LINES
from _report import report

from spare_megatron.worker.job_arguments import parse_job
from spare_megatron.worker.memory_forecast import memory_items
from spare_megatron.worker.piece_choice import likely_vocabulary

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8191
SEQ_LENGTH = 32


def flags_of(groups: int, layers: int, hidden: int, copies: int) -> list[str]:
    """Of a job of three steps."""
    model = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --seq-length {SEQ_LENGTH} "
    model += f"--max-position-embeddings {SEQ_LENGTH}"
    data = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --split 100,0,0 --eval-iters 0"
    training = f"--micro-batch-size 1 --global-batch-size {groups} --lr 1e-4 --train-iters 3 --bf16 --num-workers 0"
    ours = f"--spare-redundancy 2 --spare-max-group-restarts 0 --spare-state-redundancy {copies}"
    return f"{model} {data} {training} {ours}".split()


def measured(groups: int, flags: list[str]) -> list[dict[str, int]]:
    """What each rank has written."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(groups)]
        command += ["--run-dir", f"{folder}/run", str(ROOT / "benchmarks/_measured_pretrain.py"), *flags]
        environ = {**os.environ, LINES: folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"a job of {groups} groups ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        return [json.loads((Path(folder) / f"{group}.json").read_text()) for group in range(groups)]


def mean_mb(ranks: list[dict[str, int]], name: str) -> float:
    """Over ranks."""
    return statistics.mean(one[name] for one in ranks) / 1e6


def row_of(groups: int, copies: int, layers: int, hidden: int) -> dict[str, object]:
    """The figures of one number of groups."""
    flags = flags_of(groups, layers, hidden, copies)
    some = measured(groups, flags)
    whole = some if copies == groups else measured(groups, flags_of(groups, layers, hidden, groups))
    job, namespace = parse_job(flags, {"SPARE_NUM_GROUPS": str(groups)})
    elements = some[0]["elements"]
    found = max(one["optimizer_bytes"] for one in some)
    formula = 12 * elements * copies / groups
    forecast = memory_items(namespace, job.shape, likely_vocabulary(namespace))["optimizer"]
    return {
        "groups": groups,
        "copies": copies,
        "parameters": elements,
        "optimizer_mb": found / 1e6,
        "formula_mb": formula / 1e6,
        "forecast_mb": forecast / 1e6,
        "by_formula": found / formula,
        "by_forecast": found / forecast,
        "resident_mb": mean_mb(some, "resident_bytes"),
        "whole_mb": mean_mb(whole, "resident_bytes"),
        "most_resident_mb": mean_mb(some, "most_resident_bytes"),
        "whole_most_mb": mean_mb(whole, "most_resident_bytes"),
        "formula_less_mb": (12 * elements - formula) / 1e6,
    }


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8], help="numbers of groups")
    parser.add_argument("--copies", type=int, default=2, help="--spare-state-redundancy")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/state_memory.json)")
    options = parser.parse_args()
    rows = [row_of(groups, options.copies, options.layers, options.hidden) for groups in options.groups]
    config = {"layers": options.layers, "hidden": options.hidden, "vocabulary": VOCABULARY, "seq_length": SEQ_LENGTH}
    report("state_memory", config, rows, options.json)


if __name__ == "__main__":
    main()
