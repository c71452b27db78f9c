"""Compares the time of a step with that of plain megatron-core data parallelism with the same ranks, model and batch.

    python benchmarks/step_overhead.py [--rounds 10] [--steps 4] [--starts 1] [--level avx2]
    python benchmarks/step_overhead.py --goodput [--rounds 10] [--steps 8] [--starts 1]
    python benchmarks/step_overhead.py --reduce exact exact32 bf16 [--rounds 10] [--seq-length 256] [--case PP2]
    python benchmarks/step_overhead.py --overlap [--link-mbit 0 2000]
    python benchmarks/step_overhead.py --schedules [--rounds 10]
    python benchmarks/step_overhead.py --state-copies 2 [--rounds 10]
    python benchmarks/step_overhead.py --rows [--rounds 10]

All sides (ours with exact sums of pieces of one microbatch and of four, plain, plain with one gloo device for all
process groups, ours with fp32 sums, and these once more: what two equal jobs differ by is the error of the others'
ratios) are alive at once and take turns of a few steps (``_turns.py``). A step of ours is from commit to commit, as
metrics.jsonl has it; a step of a plain side is its wall time on rank 0. ``ratio`` is the median over the rounds of a
side's mean step over that of the side it is held against; ``cpu_ratio`` compares the CPU time of all processes of a
side for a step, the launcher's and the coordinator's too. Two equal jobs may differ by a hundredth for as long as they
live, so with --starts the rounds are divided among so many starts of all jobs, in another order each: ``cpu_ratio`` is
of all starts together, ``cpu_ratio_least`` and ``cpu_ratio_most`` are those of single ones. The comparisons below start
their jobs once.

With --goodput all sides train the job of goodput.py, whose steps are a third as long; exact sums have the pieces of its
flags. What is fixed for a step, a piece or a second (votes, heartbeats, threads that wake) is a larger part there.
goodput.py runs its systems one after the other: this is what their rates without kills differ by where the machine does
not drift in between.

With --level neither our kernels nor torch and its libraries use newer instructions than those, on any side.

With --reduce all sides are ours, each mode against fp32. A mode costs the same for every piece, so its share
falls with the tokens of a piece (--seq-length).

With --overlap both sides are ours, one of them with --overlap-grad-reduce; what is hidden is the share of the time
between a step's last gradient and its sums that is gone. --link-mbit runs each pair again in a network namespace whose
loopback carries no more than so many Mbit/s (needs root): between cores of one machine the network costs CPU time
only, which overlapping cannot hide.

With --schedules all sides are ours: --spare-schedule tickets, and core a second time, against core.

With --state-copies all sides are ours, in bf16 with exact and with fp32 sums: so many copies of each part of the
optimizer's state (--spare-state-redundancy), and a whole state in each group a second time, against a whole state.

With --rows all sides are ours: with --spare-shapes 2, for which a rank of the home shape of three stages has two rows,
and without it a second time, against without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from _goodput_model import FLAGS, GROUPS
from _report import report
from _turns import ROOT, Side, take_turns
from limited_pretrain import LEVEL

from spare_megatron import kernels

PLAIN, PLAIN_ONE_DEVICE = "plain", "plain, one gloo device"
MORE_STEPS_THAN_ARE_RUN = "4000"
CASES_PP2 = ("--pipeline-model-parallel-size", "2")
CASES = {
    "PP2 x 2 groups, K=8": (2, 2, CASES_PP2, 8),
    "1 x 4 groups, K=8": (4, 1, (), 8),
}
COPIES_CASES = {"1 x 4 groups, K=8": (4, 1, (), 8), "PP2 x 3 groups, K=4": (3, 2, CASES_PP2, 4)}
ROWS_CASES = {"PP3 x 2 groups, K=8": (2, 3, ("--pipeline-model-parallel-size", "3", "--num-layers", "6"), 8)}
OVERLAP_CASES = {
    "1 x 2 groups, K=2": (2, 1, (), 2),
    "PP2 x 2 groups, K=4": (2, 2, CASES_PP2, 4),
}
SEQ_LENGTH = 256
ALONE = ("--overlap", "--reduce", "--schedules", "--state-copies", "--rows")
"""Flags of comparisons that start their jobs once."""
SCHEDULE_CASES = {
    "PP2 x 2 groups, K=8": (2, 2, CASES_PP2, 8),
    "PP4 x 2 groups, K=8": (2, 4, ("--pipeline-model-parallel-size", "4"), 8),
}
LIBRARIES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {},
}
"""Level -> environment that holds torch, MKL and oneDNN to it."""
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
    parser.add_argument("--rounds", type=int, default=10, help="number of turns of each side")
    parser.add_argument("--steps", type=int, default=4, help="number of steps of a turn")
    parser.add_argument("--starts", type=int, default=1, help="number of times that all jobs are started anew")
    parser.add_argument("--seq-length", type=int, default=SEQ_LENGTH, help="number of tokens of a piece")
    parser.add_argument("--case", default="", metavar="TEXT", help="run only cases whose name contains TEXT")
    parser.add_argument("--goodput", action="store_true", help="train the job of goodput.py")
    parser.add_argument("--level", choices=("avx2", "avx512"), help="use no newer instruction set")
    parser.add_argument("--reduce", nargs="+", choices=("exact", "exact32", "bf16"), help="modes to compare with fp32")
    parser.add_argument("--overlap", action="store_true", help="compare jobs with and without --overlap-grad-reduce")
    parser.add_argument("--schedules", action="store_true", help="compare the values of --spare-schedule")
    parser.add_argument("--state-copies", type=int, default=0, metavar="R", help="compare jobs with R copies of state")
    parser.add_argument("--rows", action="store_true", help="compare jobs whose ranks have one row and several")
    parser.add_argument("--link-mbit", type=int, nargs="*", default=[0], help="Mbit/s of the loopback; 0: no limit")
    options = parser.parse_args()
    other = [flag for flag in ALONE if getattr(options, flag.removeprefix("--").replace("-", "_"))]
    if other and options.starts != 1:
        parser.error(
            f"--starts {options.starts} divides the rounds against plain jobs only; leave --starts or {other[0]} out"
        )
    if options.goodput and other:
        parser.error(f"--goodput compares with plain jobs only; leave --goodput or {other[0]} out")
    if options.rounds % options.starts:
        parser.error(f"--rounds {options.rounds} is not a multiple of --starts {options.starts}")
    if options.level:
        os.environ |= {LEVEL: options.level, **LIBRARIES[options.level]}
    if options.overlap:
        _overlap(options)
    elif options.reduce:
        _modes(options)
    elif options.schedules:
        _schedules(options)
    elif options.state_copies:
        _state_copies(options)
    elif options.rows:
        _rows(options)
    else:
        _against_plain(options)


def _against_plain(options: argparse.Namespace) -> None:
    rows = []
    goodput = [("goodput's job, 1 x 4 groups, K=6", GROUPS, 1, FLAGS)]
    pieces = {"exact": ()} if options.goodput else {"exact": exact(1), "exact, C=4": exact(4)}
    for name, groups, size, flags in goodput if options.goodput else _chosen(CASES, options):
        rounds, cpu_s = list[dict](), list[dict[str, float]]()
        for start in range(options.starts):
            with _folder() as folder:
                sides = _all_sides(folder, groups, size, flags, pieces, start)
                rounds += take_turns(sides, options.rounds // options.starts, options.steps)
                cpu_s += _cpu_s(sides)
        pairs = [
            ("fp32", PLAIN),
            ("fp32", PLAIN_ONE_DEVICE),
            ("fp32 again", "fp32"),
            *((one, other) for one in pieces for other in (PLAIN, PLAIN_ONE_DEVICE, "fp32")),
        ]
        for one, other in pairs:
            rows.append({"case": name, "reduce": one, "against": other, **_ratio(one, other, rounds, cpu_s)})
    _report("step_overhead_goodput" if options.goodput else "step_overhead", options, rows)


def _all_sides(
    folder: Path, groups: int, size: int, flags: tuple[str, ...], pieces: Mapping[str, tuple[str, ...]], start: int
) -> dict[str, Side]:
    """Start the jobs, each time in another order; ``pieces``: the sides with exact sums, and their flags."""
    begin: dict[str, Callable[[Path], Side]] = {
        **{name: partial(ours, groups=groups, flags=(*flags, *more)) for name, more in pieces.items()},
        PLAIN: lambda at: _plain(at, groups, size, flags, "own"),
        PLAIN_ONE_DEVICE: lambda at: _plain(at, groups, size, flags, "one"),
        "fp32": lambda at: ours(at, groups, (*flags, "--spare-reduce", "fp32")),
        "fp32 again": lambda at: ours(at, groups, (*flags, "--spare-reduce", "fp32")),
    }
    order = random.Random(start).sample(list(begin), len(begin))
    return {side: begin[side](folder / str(number)) for number, side in enumerate(order)}


def _modes(options: argparse.Namespace) -> None:
    rows = []
    for name, groups, _, flags in _chosen(CASES, options):
        sides = {mode: (*flags, "--spare-reduce", mode) for mode in ("fp32", *options.reduce)}
        rows += _against_first(options, {"case": name}, "reduce", groups, sides)
    _report("step_modes", options, rows)


def _overlap(options: argparse.Namespace) -> None:
    rows = []
    for mbit in options.link_mbit:
        for name, groups, _, flags in _chosen(OVERLAP_CASES, options):
            with _link(mbit) as within, _folder() as folder:
                sides = {
                    "without": ours(folder / "without", groups, flags, within),
                    "overlap": ours(folder / "overlap", groups, (*flags, "--overlap-grad-reduce"), within),
                }
                rounds = take_turns(sides, options.rounds, options.steps)
            compared = {**_ratio("overlap", "without", rounds, _cpu_s(sides)), **_hidden(rounds)}
            rows.append({"case": name, "link_mbit": mbit or "", **compared})
    _report("step_overlap", options, rows)


def _schedules(options: argparse.Namespace) -> None:
    rows = []
    for name, groups, _, flags in _chosen(SCHEDULE_CASES, options):
        sides = {"core": flags, "tickets": (*flags, "--spare-schedule", "tickets"), "core again": flags}
        rows += _against_first(options, {"case": name}, "schedule", groups, sides)
    _report("step_schedules", options, rows)


def _state_copies(options: argparse.Namespace) -> None:
    rows, copies = [], str(options.state_copies)
    for name, groups, _, flags in _chosen(COPIES_CASES, options):
        for mode in ("exact", "fp32"):
            whole = (*flags, "--bf16", "--spare-reduce", mode)
            some = (*whole, "--spare-state-redundancy", copies)
            sides = {"whole": whole, f"{copies} copies": some, "whole again": whole}
            rows += _against_first(options, {"case": name, "reduce": mode}, "state", groups, sides)
    _report("step_state_copies", options, rows)


def _rows(options: argparse.Namespace) -> None:
    rows = []
    for name, groups, _, flags in _chosen(ROWS_CASES, options):
        one = (*flags, "--spare-max-group-restarts", "3")
        sides = {"one row": one, "several rows": (*one, "--spare-shapes", "2"), "one row again": one}
        rows += _against_first(options, {"case": name}, "rows", groups, sides)
    _report("step_rows", options, rows)


def _against_first(
    options: argparse.Namespace,
    case: Mapping[str, str],
    column: str,
    groups: int,
    sides: Mapping[str, tuple[str, ...]],
) -> list[dict]:
    """Jobs with these flags, in turn: a row for each but the first, against which it is compared; ``column`` has the
    row's side."""
    with _folder() as folder:
        started = {side: ours(folder / side.replace(" ", "-"), groups, flags) for side, flags in sides.items()}
        rounds = take_turns(started, options.rounds, options.steps)
    first, *others = sides
    return [{**case, column: one, "against": first, **_ratio(one, first, rounds, _cpu_s(started))} for one in others]


def jobs(cases: Mapping[str, tuple], seq_length: int = SEQ_LENGTH) -> Iterator[tuple]:
    """(name, groups, ranks of a group, flags) of every case; a piece has one sample of ``seq_length`` tokens."""
    for name, (groups, size, layout, pieces) in cases.items():
        batch = ("--global-batch-size", str(groups * pieces), "--train-iters", MORE_STEPS_THAN_ARE_RUN)
        yield name, groups, size, (*model(seq_length), *layout, *batch)


def model(seq_length: int = SEQ_LENGTH) -> tuple[str, ...]:
    """The flags of the model."""
    return (*MODEL, "--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length))


def ours(
    run_dir: Path, groups: int, flags: tuple[str, ...], within: tuple[str, ...] = (), checkout: Path = ROOT
) -> Side:
    """A job of this framework, with time-outs so long that none ends while the other sides have their turns."""
    command = [*within, sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(groups)]
    script = "benchmarks/limited_pretrain.py" if LEVEL in os.environ else "pretrain_gpt.py"
    command += ["--run-dir", str(run_dir), script, *flags, "--spare-heartbeat-timeout-s", "600"]
    return Side([command], run_dir / "metrics.jsonl", checkout)


def exact(piece: int) -> tuple[str, ...]:
    """The flags of exact sums of pieces of ``piece`` microbatches."""
    return "--spare-reduce", "exact", "--spare-piece-microbatches", str(piece)


def _plain(folder: Path, groups: int, size: int, flags: tuple[str, ...], devices: str) -> Side:
    """A plain megatron-core job of the same ranks, with ``groups`` data-parallel ranks; ``devices`` of gloo as
    plain_ddp.py takes them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder.mkdir()
    record = folder / "seconds.jsonl"
    one_world = [*flags, "--spare-inner-data-parallel", str(groups)]
    ranks = groups * size
    commands = [
        [sys.executable, "benchmarks/plain_ddp.py", str(record), str(rank), str(ranks), str(port), devices, *one_world]
        for rank in range(ranks)
    ]
    return Side(commands, record)


def _chosen(cases: Mapping[str, tuple], options: argparse.Namespace) -> list[tuple]:
    return [job for job in jobs(cases, options.seq_length) if options.case in job[0]]


def _report(benchmark: str, options: argparse.Namespace, rows: list[dict]) -> None:
    """Write the report; another sequence length than the default has a file of its own."""
    name = benchmark if options.seq_length == SEQ_LENGTH else f"{benchmark}_{options.seq_length}"
    name += f"_{options.level}" if options.level else ""
    config = {
        "instructions": options.level or kernels.implementation(),
        "model": " ".join(FLAGS if options.goodput else model(options.seq_length)),
        "rounds": options.rounds,
        "steps": options.steps,
        "starts": options.starts,
    }
    report(name, config, rows)


def _cpu_s(sides: Mapping[str, Side]) -> list[dict[str, float]]:
    """The CPU seconds of a step of jobs that were started once."""
    return [{name: side.cpu_s() for name, side in sides.items()}]


def _ratio(one: str, other: str, rounds: list[dict], cpu_s: list[dict[str, float]]) -> dict[str, float]:
    """Ratios of one side over the other, from each round's means and from the CPU time of a step in each start, and the
    seconds of both's steps."""
    pairs = [(mean(lines[one], "step_time_s"), mean(lines[other], "step_time_s")) for lines in rounds]
    ratios = sorted(first / second for first, second in pairs)
    quarter = len(ratios) // 4
    of_starts = [used[one] / used[other] for used in cpu_s]
    spread = {"cpu_ratio_least": round(min(of_starts), 4), "cpu_ratio_most": round(max(of_starts), 4)}
    return {
        "step_s": round(statistics.median(first for first, _ in pairs), 4),
        "against_s": round(statistics.median(second for _, second in pairs), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quarter": round(ratios[quarter], 4),
        "ratio_three_quarters": round(ratios[-1 - quarter], 4),
        "cpu_ratio": round(sum(used[one] for used in cpu_s) / sum(used[other] for used in cpu_s), 4),
        **(spread if len(cpu_s) > 1 else {}),
    }


def _hidden(rounds: list[dict]) -> dict[str, float]:
    waits = [(mean(lines["without"], "reduce_s"), mean(lines["overlap"], "reduce_s")) for lines in rounds]
    hidden = [1 - overlapped / without for without, overlapped in waits]
    early = [line["buckets_early"] for lines in rounds for line in lines["overlap"]]
    return {
        "reduce_s": round(statistics.median(without for without, _ in waits), 4),
        "reduce_overlap_s": round(statistics.median(overlapped for _, overlapped in waits), 4),
        "hidden_share": round(statistics.median(hidden), 3),
        "hidden_min": round(min(hidden), 3),
        "hidden_max": round(max(hidden), 3),
        "buckets_early": statistics.median(early),
    }


def mean(lines: list[dict], what: str) -> float:
    """The mean of figure ``what`` over the lines of a turn."""
    return statistics.mean(line[what] for line in lines)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spare-") as name:
        yield Path(name)


@contextlib.contextmanager
def _link(mbit: int) -> Iterator[tuple[str, ...]]:
    """The words that run a command in a network namespace with such a loopback; none for the machine's own."""
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


if __name__ == "__main__":
    main()
