"""Compares what checking input costs with another checkout, in turns, by paired ratios: preprocess and a job's start.

    python benchmarks/input_checks.py ../other-checkout [--megabytes 6] [--rounds 5] [--json FILE]

Preprocess tokenizes a made-up corpus as JSON lines and as .jsonl.zst of many frames, with a SentencePiece model and one
worker. The job is two groups of one rank that build a small model, read the data that preprocess has written and end
after their first step. CPU seconds are those of all processes of a command, its imports included; on a shared machine
the ratio that counts is that of CPU time. Both checkouts run their own code with this one's Python.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zstandard
from _corpus import lines, write_corpus
from _report import report
from _tokenizers import _sentencepiece

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36
VOCABULARY, FRAME_BYTES = 4000, 1 << 18
JOB = (
    *("--split", "100,0,0", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--train-iters", "1", "--lr", "1e-3", "--eval-iters", "0"),
)


def timed(words: list[str], folder: Path, checkout: Path) -> tuple[float, float]:
    """Run a command of a checkout; returns its wall and CPU seconds."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "SPARE_PRELOADED": ""}
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True)
    wall_s = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {words} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(folder: Path, checkout: Path, name: str, turn: int) -> dict[str, list[str]]:
    """What is measured -> its command."""
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "bpe.model")]
    tool = ["-W", "ignore", str(checkout / "tools" / "preprocess_data.py"), "--append-eod", *tokenizer]
    run = f"run-{name}-{turn}"
    job = ["-m", "spare_megatron.cli.launch", "--num-groups", "2", "--run-dir", run, str(checkout / "pretrain_gpt.py")]
    return {
        "preprocess jsonl": [*tool, "--input", "corpus.jsonl", "--output-prefix", f"{name}-plain"],
        "preprocess jsonl.zst": [*tool, "--input", "corpus.jsonl.zst", "--output-prefix", f"{name}-zst"],
        "job of one step": [*job, *JOB, *tokenizer, "--data-path", "data_text_document"],
    }


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, with its kernels built")
    parser.add_argument("--megabytes", type=float, default=6, help="size of the corpus, 10^6 bytes (default: 6)")
    parser.add_argument("--rounds", type=int, default=5, help="number of pairs (default: 5)")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    checkouts = {"this": ROOT, "other": args.other.resolve()}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [json.loads(line)["text"] for line in itertools.islice(lines(seed=1), 300)]
        _sentencepiece(folder, [text for text in texts if isinstance(text, str)], VOCABULARY)
        write_corpus(folder / "corpus.jsonl", args.megabytes)
        raw = (folder / "corpus.jsonl").read_bytes()
        frames = (raw[at : at + FRAME_BYTES] for at in range(0, len(raw), FRAME_BYTES))
        (folder / "corpus.jsonl.zst").write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, frames)))
        first = commands(folder, ROOT, "warm", 0)["preprocess jsonl"]
        timed([*first, "--output-prefix", "data"], folder, ROOT)
        for turn in range(args.rounds):
            for who in sorted(checkouts, reverse=turn % 2 == 0):
                for what, words in commands(folder, checkouts[who], who, turn).items():
                    found.setdefault(what, {}).setdefault(who, []).append(timed(words, folder, checkouts[who]))
            sys.stderr.write(f"{turn + 1} of {args.rounds}\n")
        for kind in ("plain", "zst"):
            for end in ("bin", "idx"):
                ours, theirs = (folder / f"{who}-{kind}_text_document.{end}" for who in checkouts)
                if ours.read_bytes() != theirs.read_bytes():
                    raise RuntimeError(f"{ours.name} and {theirs.name} differ")
    table = []
    for what, times in found.items():
        turns = list(zip(times["this"], times["other"], strict=True))
        ratios = [[ours[n] / theirs[n] for ours, theirs in turns] for n in (0, 1)]
        table.append(
            {
                "what": what,
                "this_cpu_s": round(statistics.median(cpu for _, cpu in times["this"]), 3),
                "other_cpu_s": round(statistics.median(cpu for _, cpu in times["other"]), 3),
                "cpu_ratio_median": round(statistics.median(ratios[1]), 3),
                "cpu_ratio_min": round(min(ratios[1]), 3),
                "cpu_ratio_max": round(max(ratios[1]), 3),
                "wall_ratio_median": round(statistics.median(ratios[0]), 3),
            }
        )
    report("input_checks", {"megabytes": args.megabytes, "rounds": args.rounds}, table, args.json)


if __name__ == "__main__":
    main()
