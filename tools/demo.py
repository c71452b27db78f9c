"""Runs the demo: trains on real text with real processes, SIGKILLs a group during the reduction,
which comes back while the others train, and compares the result with a run without the kill.

    python tools/demo.py [--steps 40] [--kill-step 10] [--output runs/demo] [--json FILE]

The text is the machine's own Python standard library, on which a tokenizer is trained. The data
are kept, so that the second start is quick; the two runs are made anew each time. README's table
of the demo is benchmarks/results/demo.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import sentencepiece
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import write

ROOT = Path(__file__).resolve().parents[1]
TEXT_BYTES_MAX = 6_000_000
TOKENIZER_BYTES_MAX = 1_500_000
VOCABULARY = 2048
GROUPS, KILLED_GROUP = 4, 2
MODEL = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--max-position-embeddings", "128", "--pipeline-model-parallel-size", "2"),
    *("--micro-batch-size", "2", "--global-batch-size", "32", "--eval-iters", "0"),
    *("--lr", "2e-3", "--lr-decay-style", "cosine", "--min-lr", "2e-4", "--lr-warmup-iters", "5"),
    *("--weight-decay", "0.1", "--clip-grad", "1.0", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--tokenizer-type", "SentencePieceTokenizer", "--split", "100,0,0", "--log-interval", "5"),
)
console = Console(highlight=False)


def main() -> int:
    """Run the demo; returns 0 when the failure was masked without a lost step and both runs have equal weights."""
    options = _options()
    output = Path(options.output).resolve()
    text = _prepare(output / "data")
    flags = (*MODEL, "--tokenizer-model", str(text["tokenizer"]), "--data-path", str(text["prefix"]))
    flags += ("--train-iters", str(options.steps), "--save-interval", str(options.steps), "--spare-redundancy", "2")
    console.rule(f"1. {GROUPS} groups of 2 pipeline stages; group {KILLED_GROUP} is killed in step {options.kill_step}")
    inject = f"sigkill:group={KILLED_GROUP},step={options.kill_step},at=reduce"
    failing = _train(output / "with-failure", (*flags, "--save", str(output / "with-failure" / "save")), inject)
    console.rule("2. The same job without the failure")
    failure_free = _train(
        output / "without-failure", (*flags, "--save", str(output / "without-failure" / "save")), None
    )
    console.rule("3. The results")
    return _judge(failing, failure_free, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="number of steps of each run")
    parser.add_argument("--kill-step", type=int, default=10, help="step in which the group is killed")
    parser.add_argument("--output", default=str(ROOT / "runs" / "demo"), help="directory of data and runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args()


def _prepare(directory: Path) -> dict[str, Path]:
    """Make text, tokenizer and data files of the standard library, unless they exist; returns their paths."""
    paths = {
        "text": directory / "stdlib.jsonl",
        "tokenizer": directory / f"stdlib-{VOCABULARY}.model",
        "prefix": directory / "stdlib_text_document",
    }
    if paths["prefix"].with_suffix(".idx").exists():
        return paths
    console.print("Preparing data: the Python standard library's sources (once) ...")
    directory.mkdir(parents=True, exist_ok=True)
    documents = _standard_library()
    paths["text"].write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    started_s = time.monotonic()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_lines(documents)),
        model_prefix=str(paths["tokenizer"].with_suffix("")),
        vocab_size=VOCABULARY,
        character_coverage=1.0,
        byte_fallback=True,
        minloglevel=2,
    )
    console.print(f"  tokenizer of {VOCABULARY} tokens trained in {time.monotonic() - started_s:.0f} s")
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(paths["text"])]
    command += ["--output-prefix", str(directory / "stdlib"), "--tokenizer-type", "SentencePieceTokenizer"]
    command += ["--tokenizer-model", str(paths["tokenizer"]), "--append-eod", "--workers", "2"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return paths


def _standard_library() -> list[str]:
    """The sources of the standard library's modules, without tests, in a fixed order."""
    top = Path(sysconfig.get_paths()["stdlib"])
    documents: list[str] = []
    size = 0
    for path in sorted(top.rglob("*.py")):
        inside = path.relative_to(top).parts
        if {"test", "tests", "site-packages", "lib2to3", "idlelib"} & set(inside):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        documents.append(text)
        size += len(text)
        if size > TEXT_BYTES_MAX:
            break
    return documents


def _lines(documents: list[str]) -> list[str]:
    lines: list[str] = []
    size = 0
    for text in documents[::5]:
        lines += [line for line in text.splitlines() if line.strip()]
        size += len(text)
        if size > TOKENIZER_BYTES_MAX:
            break
    return lines


def _train(run_dir: Path, flags: tuple[str, ...], inject: str | None) -> dict[str, Any]:
    """Run one job with spare-launch; returns its summary and its metrics."""
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS)]
    command += ["--run-dir", str(run_dir), *(["--inject", inject] if inject else []), "pretrain_gpt.py", *flags]
    started_s = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"demo: spare-launch ended with exit code {code}; see {run_dir}/logs")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    return {"summary": summary, "lines": lines, "seconds": time.monotonic() - started_s, "save": run_dir / "save"}


def _judge(failing: dict[str, Any], failure_free: dict[str, Any], options: argparse.Namespace) -> int:
    """The table, the file that was asked for, and the exit code."""
    summary, lines = failing["summary"], failing["lines"]
    recovery = next((line["recovery"] for line in lines if line["recovery"]), None)
    gaps = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, failure_free["lines"], strict=True)]
    digests = [_digest(run["save"]) for run in (failing, failure_free)]
    table = Table(title="A job of which one group was killed during the gradient reduction", show_header=False)
    for name, value in (
        ("steps committed", f"{summary['steps_committed']} of {lines[-1]['step']}"),
        ("failures masked", str(summary["failures_masked"])),
        ("steps lost", str(summary["steps_lost"])),
        ("stall", f"{recovery['total_s']:.2f} s, {_parts(recovery)}" if recovery else "none"),
        ("the killed group", _back_in_words(lines)),
        ("loss, first to last step", f"{lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}"),
        ("loss of the run without failure", f"{failure_free['lines'][-1]['loss']:.3f}"),
        ("largest relative difference of a step's loss", f"{max(gaps):.1e}"),
        ("weights", "bit for bit equal" if digests[0] == digests[1] else "NOT EQUAL"),
        ("digest of the weights, with the failure", digests[0]),
        ("digest of the weights, without", digests[1]),
        ("time of both runs", f"{failing['seconds']:.0f} s and {failure_free['seconds']:.0f} s"),
    ):
        table.add_row(name, value)
    console.print(table)
    if options.json:
        row = _row(failing, failure_free, recovery or {}, max(gaps), digests)
        config = {"groups": GROUPS, "killed_group": KILLED_GROUP, "model": shlex.join(MODEL)}
        write(options.json, "demo", shlex.join(["./scripts/demo.sh", *sys.argv[1:]]), config, [row])
    console.print(
        f"Records: {Path(options.output).resolve()}/with-failure (report.html, journal.jsonl, metrics.jsonl, "
        "summary.json, logs/)"
    )
    good = summary["failures_masked"] == 1 and summary["steps_lost"] == 0 and lines[-1]["loss"] < lines[0]["loss"]
    if not good or digests[0] != digests[1]:
        console.print("[red]The failure was not masked without a trace: the runs differ, or a step was lost.[/red]")
        return 1
    console.print("The failure cost a moment, but no work: every step was committed exactly once.")
    return 0


def _row(
    failing: dict[str, Any], failure_free: dict[str, Any], recovery: dict[str, Any], gap: float, digests: list[str]
) -> dict[str, object]:
    summary, lines = failing["summary"], failing["lines"]
    back = _back(lines)
    return {
        "steps": lines[-1]["step"],
        **{name: summary[name] for name in ("steps_committed", "failures_masked", "steps_lost")},
        **{name: value for name, value in recovery.items() if name.endswith("_s")},
        "loss_first": lines[0]["loss"],
        "loss_last": lines[-1]["loss"],
        "loss_last_without_failure": failure_free["lines"][-1]["loss"],
        "loss_relative_difference_max": gap,
        "digest": digests[0],
        "digest_without_failure": digests[1],
        "live_groups_last": lines[-1]["live_groups"],
        "step_back": back[0] if back else None,
        "back_s": round(back[1], 1) if back else None,
        "run_s": round(failing["seconds"], 1),
        "run_without_failure_s": round(failure_free["seconds"], 1),
    }


def _back(lines: list[dict[str, Any]]) -> tuple[int, float] | None:
    """The first step after the loss that all groups trained, and the time from the step of the loss to it; None where
    there is none."""
    lost = next((n for n, line in enumerate(lines) if line["live_groups"] < GROUPS), len(lines))
    whole = next((n for n in range(lost, len(lines)) if lines[n]["live_groups"] == GROUPS), None)
    return None if whole is None else (lines[whole]["step"], sum(line["step_time_s"] for line in lines[lost:whole]))


def _back_in_words(lines: list[dict[str, Any]]) -> str:
    back, groups = _back(lines), f"{lines[-1]['live_groups']} of {GROUPS} groups at the end"
    return (
        f"was not back in time: {groups}"
        if back is None
        else f"back in step {back[0]}, {back[1]:.0f} s later; {groups}"
    )


def _parts(recovery: dict[str, Any]) -> str:
    names = ("detect", "agree", "rebuild", "patch", "reduce")
    return ", ".join(f"{name} {recovery[f'{name}_s'] * 1000:.0f} ms" for name in names)


def _digest(save: Path) -> str:
    command = [sys.executable, "-m", "spare_megatron.cli.checkpoint", "digest", str(save)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()[0]


if __name__ == "__main__":
    sys.exit(main())
