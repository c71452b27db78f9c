"""What a step costs here against plain megatron-core data parallelism with the same ranks, model and batch.

    python benchmarks/step_overhead.py [--rounds 2] [--steps 16]

Both sides run in turn (ours, plain, ours, plain, ...), so that a machine whose speed drifts drifts for both. A step of
ours is from commit to commit, as metrics.jsonl has it; a step of the plain side is its wall time on rank 0. The first
steps of a run are left out. The result is the median step of ours over that of the plain side, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _report import report

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 4
CASES = {
    "PP2 x 2 groups, K=8": (2, 2, ("--pipeline-model-parallel-size", "2"), 8),
    "1 x 4 groups, K=8": (4, 1, (), 8),
}
MODEL = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "256"),
    *("--max-position-embeddings", "256", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--split", "100,0,0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
    *("--log-interval", "1000"),
)


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    rows = []
    for name, (groups, size, layout, pieces) in CASES.items():
        batch = ("--global-batch-size", str(groups * pieces), "--train-iters", str(options.steps))
        flags = (*MODEL, *layout, *batch)
        pairs = [(_ours(groups, flags), _plain(groups, size, flags)) for _ in range(options.rounds)]
        ratios = [ours / plain for ours, plain in pairs]
        rows.append(
            {
                "case": name,
                "ours_s": round(statistics.median(ours for ours, _ in pairs), 4),
                "plain_s": round(statistics.median(plain for _, plain in pairs), 4),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_min": round(min(ratios), 4),
                "ratio_max": round(max(ratios), 4),
            }
        )
    report("step_overhead", {"model": " ".join(MODEL), "rounds": options.rounds, "steps": options.steps}, rows)


def _environment() -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")


def _ours(groups: int, flags: tuple[str, ...]) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(groups)]
        command += ["--run-dir", scratch, "pretrain_gpt.py", *flags]
        subprocess.run(command, cwd=ROOT, env=_environment(), check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(scratch) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_time_s"] for line in lines[WARM_UP_STEPS:])


def _plain(groups: int, size: int, flags: tuple[str, ...]) -> float:
    """The same ranks as one world: D = ``groups`` data-parallel ranks."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = groups * size
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "seconds.json"
        base = [sys.executable, "benchmarks/plain_ddp.py", str(output)]
        processes = [
            subprocess.Popen(
                [*base, str(rank), str(ranks), str(port), *flags, "--spare-inner-data-parallel", str(groups)],
                cwd=ROOT,
                env=_environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"plain_ddp.py left with {codes}")
        return statistics.median(json.loads(output.read_text())[WARM_UP_STEPS:])


if __name__ == "__main__":
    main()
