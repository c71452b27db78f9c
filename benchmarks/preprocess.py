"""Compares the speed of tools/preprocess_data.py with Megatron-LM's tool, and checks that both write the same bytes.

    python benchmarks/preprocess.py --megatron-lm PATH [--megabytes 200] [--workers 2] [--rounds 3]
        [--kinds sentencepiece gpt2 huggingface tiktoken null] [--json FILE]

PATH is a checkout of Megatron-LM; its megatron.training imports the packages six and triton, which must be importable
(``pip install --no-deps --target DIR six triton`` and ``PYTHONPATH=DIR``). Text and tokenizers (vocabulary of 16,000)
are made first, the same on every machine. Then both tools run in turn (ours, Megatron's, Megatron's, ours, ...) with
the same flags, from the start of the command to its end, imports included. The rate ratio is Megatron's seconds over
ours in each round, of which the median is reported; CPU seconds are those of all processes of a command. After each
round the .bin and .idx of both must be equal byte for byte, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import filecmp
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _corpus import tokenizer_flags, write_corpus
from _report import report
from _tokenizers import train

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 16_000
PR_SET_CHILD_SUBREAPER = 36
KINDS = tuple(tokenizer_flags(Path(), VOCABULARY))


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:4])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # processes that outlive their command become children of this process, so that their CPU time is counted too
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    tools = {"ours": ROOT, "megatron": args.megatron_lm.resolve()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", args.megabytes)
        flags = train(folder, VOCABULARY)
        rows = [measure(folder, tools, kind, flags[kind], args) for kind in args.kinds]
    commit = subprocess.run(
        ["git", "-C", str(args.megatron_lm), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    config = {
        "megatron_lm_commit": commit or "unknown",
        "megabytes": args.megabytes,
        "workers": args.workers,
        "rounds": args.rounds,
        "vocabulary": VOCABULARY,
    }
    report("preprocess", config, rows, args.json)


def measure(
    folder: Path, tools: dict[str, Path], kind: str, flags: list[str], args: argparse.Namespace
) -> dict[str, object]:
    """The row of one tokenizer, from all its rounds. RuntimeError where the files differ."""
    wall: dict[str, list[float]] = {who: [] for who in tools}
    cpu: dict[str, list[float]] = {who: [] for who in tools}
    for number in range(args.rounds):
        for who in sorted(tools, reverse=number % 2 == 0):
            seconds, cpu_seconds = run(folder, who, tools[who], flags, args.workers)
            wall[who].append(seconds)
            cpu[who].append(cpu_seconds)
            print(f"{kind} round {number + 1}: {who} {seconds:.1f} s, {cpu_seconds:.1f} CPU s", flush=True)
        check_equal(folder, kind)
    ratios = [theirs / ours for ours, theirs in zip(wall["ours"], wall["megatron"], strict=True)]
    cpu_ratios = [theirs / ours for ours, theirs in zip(cpu["ours"], cpu["megatron"], strict=True)]
    size = (folder / "corpus.jsonl").stat().st_size / 1e6
    return {
        "tokenizer": kind,
        "ours_s": round(statistics.median(wall["ours"]), 2),
        "megatron_s": round(statistics.median(wall["megatron"]), 2),
        "ours_mb_per_s": round(size / statistics.median(wall["ours"]), 2),
        "megatron_mb_per_s": round(size / statistics.median(wall["megatron"]), 2),
        "rate_ratio": round(statistics.median(ratios), 2),
        "rate_ratio_min": round(min(ratios), 2),
        "cpu_ratio": round(statistics.median(cpu_ratios), 2),
        "bytes_equal": True,
    }


def run(folder: Path, who: str, tool: Path, flags: list[str], workers: int) -> tuple[float, float]:
    """Run one command; returns its wall seconds and CPU seconds."""
    words = [sys.executable, "-W", "ignore", str(tool / "tools" / "preprocess_data.py"), "--input", "corpus.jsonl"]
    words += ["--output-prefix", who, "--append-eod", "--workers", str(workers), "--log-interval", "1000000", *flags]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # Megatron's GPT-2 tokenizer is read from the folder gpt2 in the working directory
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True)
    seconds = time.perf_counter() - started_s
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{who} failed:\n{done.stderr[-2000:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def check_equal(folder: Path, kind: str) -> None:
    """Compare the pairs of both and remove them."""
    for end in ("bin", "idx"):
        (ours,), (theirs,) = folder.glob(f"ours_*.{end}"), folder.glob(f"megatron_*.{end}")
        if not filecmp.cmp(ours, theirs, shallow=False):
            raise RuntimeError(f"{kind}: {ours.name} and {theirs.name} differ")
        ours.unlink()
        theirs.unlink()


if __name__ == "__main__":
    main()
