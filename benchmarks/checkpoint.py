"""Measures how long training waits for a checkpoint, and how fast it is written compared with a plain copy.

    python benchmarks/checkpoint.py [--steps 40] [--hidden-size 768]

One job of 2 groups saves every fifth step beside the training, then the same job lets training wait
(--spare-no-async-save). The figures are those that position 0 logs with each accepted checkpoint: the time that the
training thread waited, that time as a share of the step before, and the rate at which the files were written, with
checksums and fsync. ``copy_gb_s`` is the rate of a copy of the same files to the same disk, with fsync and without
checksums, after each job.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _report import report

ROOT = Path(__file__).resolve().parents[1]
INTERVAL, COPIES, CHUNK_BYTES = 5, 3, 1 << 22
REPORTED = re.compile(
    r"the checkpoint of step (\d+) counts: training waited ([\d.]+) ms \(([\d.]+) % of a step\), "
    r"(\d+) bytes were written in ([\d.]+) s"
)


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--directory", type=Path, help="a directory on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.directory) as name:
        for mode, extra in (("beside training", ()), ("training waits", ("--spare-no-async-save",))):
            save = Path(name) / mode.replace(" ", "-")
            rows.append({"mode": mode, **_job(save, options.steps, options.hidden_size, extra)})
    config = {"steps": options.steps, "hidden_size": options.hidden_size, "save_interval": INTERVAL}
    report("checkpoint", config, rows)


def _job(save: Path, steps: int, hidden: int, extra: tuple[str, ...]) -> dict[str, object]:
    run_dir = save.with_name(save.name + "-run")
    command = [
        *(sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", "2", "--run-dir", str(run_dir)),
        *("pretrain_gpt.py", "--num-layers", "4", "--hidden-size", str(hidden), "--num-attention-heads", "8"),
        *("--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "1"),
        *("--global-batch-size", "8", "--lr", "1e-4", "--train-iters", str(steps), "--mock-data"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "8191", "--split", "100,0,0", "--eval-iters", "0"),
        *("--num-workers", "0", "--log-interval", "10", "--spare-reduce", "fp32", "--save", str(save)),
        *("--save-interval", str(INTERVAL), "--spare-keep-checkpoints", "2", *extra),
    ]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    log = (run_dir / "logs" / "group-0" / "rank-0.log").read_text()
    found = [tuple(map(float, one)) for one in REPORTED.findall(log)]
    if len(found) < 3:
        raise SystemExit(f"only {len(found)} checkpoints were made; see {run_dir}/logs")
    found = found[2:]  # the first ones also plan, and their copies take fresh memory
    size = found[0][3]
    newest = max(save.glob("iter_*"))
    copy_s = statistics.median(_copy(newest, save / "copy") for _ in range(COPIES))
    rate = statistics.median(size / written_s / 1e9 for _, _, _, _, written_s in found)
    return {
        "megabytes": round(size / 1e6, 1),
        "stall_ms": round(statistics.median(stall for _, stall, _, _, _ in found), 2),
        "stall_percent_of_step": round(statistics.median(share for _, _, share, _, _ in found), 2),
        "write_gb_s": round(rate, 3),
        "copy_gb_s": round(size / copy_s / 1e9, 3),
        "write_of_copy": round(rate / (size / copy_s / 1e9), 3),
        "checkpoints": len(found),
    }


def _copy(source: Path, target: Path) -> float:
    """Seconds that a copy with fsync takes."""
    target.mkdir(exist_ok=True)
    started_s = time.monotonic()
    for path in source.iterdir():
        with path.open("rb") as file, (target / path.name).open("wb") as copy:
            while chunk := file.read(CHUNK_BYTES):
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
