"""What a step costs here against plain megatron-core data parallelism with the same ranks, model and batch.

    python benchmarks/step_overhead.py [--rounds 2] [--steps 16]
    python benchmarks/step_overhead.py --reduce exact exact32 bf16 [--rounds 2] [--seq-length 256] [--case PP2]
    python benchmarks/step_overhead.py --overlap [--link-mbit 0 2000] [--rounds 2] [--steps 16]

Both sides run in turn (ours with exact sums, plain, ours with fp32 sums, exact, ...), so that a machine whose speed
drifts drifts for both. A step of ours is from commit to commit, as metrics.jsonl has it; a step of the plain side is
its wall time on rank 0. The first steps of a run are left out. The result is the median step of ours over that of the
plain side, round by round.

With --reduce both sides are ours, each mode in turn with fp32. A mode costs the same for every piece, so its share
falls with the tokens of a piece (--seq-length).

With --overlap both sides are ours, one of them with --overlap-grad-reduce; what is hidden is the share of the time
between a step's last gradient and its sums that is gone. --link-mbit runs each pair again in a network namespace whose
loopback carries no more than so many Mbit/s (needs root): between cores of one machine the network costs CPU time
only, which overlapping cannot hide.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _report import report

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 4
CASES = {
    "PP2 x 2 groups, K=8": (2, 2, ("--pipeline-model-parallel-size", "2"), 8),
    "1 x 4 groups, K=8": (4, 1, (), 8),
}
OVERLAP_CASES = {
    "1 x 2 groups, K=2": (2, 1, (), 2),
    "PP2 x 2 groups, K=4": (2, 2, ("--pipeline-model-parallel-size", "2"), 4),
}
SEQ_LENGTH = 256
NAMESPACE = "spare-step-overhead"
MODEL = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--split", "100,0,0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
    *("--log-interval", "1000"),
)


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=SEQ_LENGTH, help="tokens of a piece")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose name has it")
    parser.add_argument("--reduce", nargs="+", choices=("exact", "exact32", "bf16"), help="modes against fp32")
    parser.add_argument("--overlap", action="store_true", help="with overlap against without it")
    parser.add_argument("--link-mbit", type=int, nargs="*", default=[0], help="0: the machine's own loopback")
    options = parser.parse_args()
    if options.overlap:
        _overlap(options)
    elif options.reduce:
        _modes(options)
    else:
        _against_plain(options)


def _against_plain(options: argparse.Namespace) -> None:
    rows = []
    for name, (groups, size, layout, pieces) in _chosen(CASES, options):
        batch = ("--global-batch-size", str(groups * pieces), "--train-iters", str(options.steps))
        flags = (*model(options.seq_length), *layout, *batch)
        rounds = [
            {
                "exact": _median(run_ours(groups, (*flags, "--spare-reduce", "exact")), "step_time_s"),
                "plain": _plain(groups, size, flags),
                "fp32": _median(run_ours(groups, (*flags, "--spare-reduce", "fp32")), "step_time_s"),
            }
            for _ in range(options.rounds)
        ]
        for mode in ("exact", "fp32"):
            pairs = [(one[mode], one["plain"]) for one in rounds]
            rows.append({"case": name, "reduce": mode, **_ratio("ours_s", "plain_s", pairs)})
    report("step_overhead", _config(options), rows)


def _modes(options: argparse.Namespace) -> None:
    rows = []
    for name, (groups, _, layout, pieces) in _chosen(CASES, options):
        batch = ("--global-batch-size", str(groups * pieces), "--train-iters", str(options.steps))
        flags = (*model(options.seq_length), *layout, *batch, "--spare-reduce")
        modes = ("fp32", *options.reduce)
        rounds = [
            {mode: _median(run_ours(groups, (*flags, mode)), "step_time_s") for mode in modes}
            for _ in range(options.rounds)
        ]
        for mode in options.reduce:
            pairs = [(one[mode], one["fp32"]) for one in rounds]
            rows.append({"case": name, "reduce": mode, **_ratio("step_s", "fp32_step_s", pairs)})
    report("step_modes", _config(options), rows)


def model(seq_length: int = SEQ_LENGTH) -> tuple[str, ...]:
    """Its flags; a piece has one sample of so many tokens."""
    return (*MODEL, "--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length))


def _chosen(cases: dict[str, tuple], options: argparse.Namespace) -> list[tuple[str, tuple]]:
    return [(name, case) for name, case in cases.items() if options.case in name]


def _config(options: argparse.Namespace) -> dict[str, object]:
    return {"model": " ".join(model(options.seq_length)), "rounds": options.rounds, "steps": options.steps}


def _ratio(one: str, other: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Medians of both sides over the rounds, and of their ratio in each round."""
    ratios = [first / second for first, second in pairs]
    return {
        one: round(statistics.median(first for first, _ in pairs), 4),
        other: round(statistics.median(second for _, second in pairs), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def _overlap(options: argparse.Namespace) -> None:
    rows = []
    for mbit in options.link_mbit:
        for name, (groups, _, layout, pieces) in _chosen(OVERLAP_CASES, options):
            batch = ("--global-batch-size", str(groups * pieces), "--train-iters", str(options.steps))
            flags = (*model(options.seq_length), *layout, *batch)
            with _link(mbit) as within:
                pairs = [
                    (run_ours(groups, flags, within), run_ours(groups, (*flags, "--overlap-grad-reduce"), within))
                    for _ in range(options.rounds)
                ]
            rows.append({"case": name, "link_mbit": mbit or "", **_compared(pairs)})
    report("step_overlap", _config(options), rows)


def _compared(pairs: list[tuple[list[dict], list[dict]]]) -> dict[str, object]:
    def middle(side: int, what: str) -> float:
        return statistics.median(_median(pair[side], what) for pair in pairs)

    steps = [(_median(overlapped, "step_time_s"), _median(without, "step_time_s")) for without, overlapped in pairs]
    hidden = [1 - _median(overlapped, "reduce_s") / _median(without, "reduce_s") for without, overlapped in pairs]
    return {
        **_ratio("step_overlap_s", "step_s", steps),
        "reduce_s": round(middle(0, "reduce_s"), 4),
        "reduce_overlap_s": round(middle(1, "reduce_s"), 4),
        "hidden_share": round(statistics.median(hidden), 3),
        "hidden_min": round(min(hidden), 3),
        "hidden_max": round(max(hidden), 3),
        "buckets_early": middle(1, "buckets_early"),
    }


@contextlib.contextmanager
def _link(mbit: int) -> Iterator[tuple[str, ...]]:
    """The words that run a command in a namespace with such a loopback; none for the machine's own."""
    if not mbit:
        yield ()
        return
    within = ("ip", "netns", "exec", NAMESPACE)
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    try:
        subprocess.run([*within, "ip", "link", "set", "lo", "up"], check=True)
        limit = ["rate", f"{mbit}mbit", "burst", "1mb", "latency", "50ms"]
        subprocess.run([*within, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limit], check=True)
        yield within
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)


def _median(lines: list[dict], what: str) -> float:
    return statistics.median(line[what] for line in lines)


def _environment() -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")


def run_ours(groups: int, flags: tuple[str, ...], within: tuple[str, ...] = ()) -> list[dict]:
    """The lines of metrics.jsonl after the first steps."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [*within, sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(groups)]
        command += ["--run-dir", scratch, "pretrain_gpt.py", *flags]
        subprocess.run(command, cwd=ROOT, env=_environment(), check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(scratch) / "metrics.jsonl").read_text().splitlines()]
    return lines[WARM_UP_STEPS:]


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
