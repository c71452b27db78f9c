"""Compares the commit round, the step and the masked kill of this checkout with another checkout's, by paired ratios.

    python benchmarks/against_checkout.py ../other-checkout [--turns 20] [--step-turns 12] [--kill-rounds 4]

Both checkouts run their own code with this one's Python. The commit round (4 groups of 2 ranks without a model, as in
``control_plane.py``) and the step (of ``step_overhead.py``'s model, 2 groups x PP2 and 4 groups of one rank, fp32 and
exact sums) run in turns: both jobs are alive, one runs for some steps while every process of the other is stopped, and
the order alternates, so that drift of the machine affects both alike. Two jobs of equal code differ by what their
processes are like (addresses, hash seeds), so the jobs are started again ``--starts`` times. A masked kill is that of
``masked_failure.py``: CPU time of a whole job of 4 groups x PP2 in which three groups are killed, start included, and
the time from the signal to the commit. On a shared machine the ratio that counts is that of CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from _report import report
from _turns import ROOT, Side, take_turns
from step_overhead import MORE_STEPS_THAN_ARE_RUN, mean, model, ours

Pair = tuple[dict[str, float], dict[str, float]]
ROUND_STEPS, STEP_STEPS = 400, 6
STEP_CASES = {
    "2 groups x PP2": (2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16")),
    "4 groups": (4, ("--global-batch-size", "32")),
}
STEP_MODES = {"fp32": ("--spare-reduce", "fp32"), "exact": ("--spare-reduce", "exact")}
ROUND = """
import sys
from pathlib import Path
from tests.process.control_job import ControlJob
job = ControlJob(Path(sys.argv[1]), 4, 2, "--steps 1000000 --piece-s 0.002 --pieces 2 " + sys.argv[2])
job.under = ("env",)  # new processes in every checkout
job.start()
job.coordinator.wait()
"""
PATIENT = "--heartbeat-timeout-s 50 --progress-timeout-s 300"
"""Of a job whose turn may be a while off."""
KILL = """
import json, random, resource, statistics, sys
sys.path.insert(0, "benchmarks")
import masked_failure
found = masked_failure._job(random.Random({seed}), 3)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
kills = {{name: statistics.median(one[name] for one in found) for name in found[0]}}
print(json.dumps({{**kills, "job_cpu_s": used.ru_utime + used.ru_stime}}))
"""


def run(checkout: Path, code: str) -> dict[str, float]:
    """Run a program in a checkout; returns the JSON of its last line."""
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"in {checkout}: {done.stderr[-2000:]}")
    plain: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return plain


def pairs(other: Path, codes: list[str]) -> list[Pair]:
    """The results (this, other) of each program; which checkout runs first alternates."""
    found = []
    for turn, code in enumerate(codes):
        order = (ROOT, other) if turn % 2 else (other, ROOT)
        results = {checkout: run(checkout, code) for checkout in order}
        found.append((results[ROOT], results[other]))
        sys.stderr.write(f"{turn + 1} of {len(codes)}\n")
    return found


def turned(other: Path, start: Callable[[Path, Path], Side], turns: int, steps: int) -> list[Pair]:
    """The figures of each turn (this, other) of two jobs; ``start`` has a folder and a checkout."""
    with tempfile.TemporaryDirectory(prefix="spare-") as name:
        sides = {who: start(Path(name) / who, checkout) for who, checkout in (("this", ROOT), ("other", other))}
        rounds = take_turns(sides, turns, steps)
    figures = {
        who: [
            {"cpu_ms": 1e3 * cpu_s, "step_ms": 1e3 * mean(lines[who], "step_time_s")}
            for lines, cpu_s in zip(rounds, side.turns_cpu_s, strict=True)
        ]
        for who, side in sides.items()
    }
    return list(zip(figures["this"], figures["other"], strict=True))


def commit_round(folder: Path, checkout: Path) -> Side:
    """A job of 4 groups of 2 ranks without a model."""
    folder.mkdir()
    return Side([[sys.executable, "-c", ROUND, str(folder), PATIENT]], folder / "run" / "metrics.jsonl", checkout)


def cases() -> Iterator[tuple[str, Callable[[Path, Path], Side], int]]:
    """(what is compared, how a side is started, steps of a turn)."""
    yield "commit round", commit_round, ROUND_STEPS
    for case, (groups, flags) in STEP_CASES.items():
        for mode, more in STEP_MODES.items():
            words = (*model(), *flags, *more, "--train-iters", MORE_STEPS_THAN_ARE_RUN)
            yield f"step, {case}, {mode}", partial(_step, groups=groups, flags=words), STEP_STEPS


def _step(folder: Path, checkout: Path, groups: int, flags: tuple[str, ...]) -> Side:
    return ours(folder, groups, flags, checkout=checkout)


def rows(what: str, found: list[Pair], names: tuple[str, ...]) -> list[dict[str, object]]:
    """One row of the table for each figure."""
    table: list[dict[str, object]] = []
    for name in names:
        ratios = sorted(this[name] / max(other[name], 1e-9) for this, other in found)
        quarter = len(ratios) // 4
        table.append(
            {
                "what": what,
                "figure": name,
                "this_median": round(statistics.median(this[name] for this, _ in found), 5),
                "other_median": round(statistics.median(other[name] for _, other in found), 5),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_quarter": round(ratios[quarter], 3),
                "ratio_three_quarters": round(ratios[-1 - quarter], 3),
            }
        )
    return table


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, with its kernels built")
    parser.add_argument("--turns", type=int, default=20, help="number of turns of a commit round (default: 20)")
    parser.add_argument("--step-turns", type=int, default=12, help="number of turns of each step (default: 12)")
    parser.add_argument("--starts", type=int, default=2, help="number of times that the jobs are started (default: 2)")
    parser.add_argument(
        "--kill-rounds", type=int, default=4, help="number of pairs of jobs with three kills (default: 4)"
    )
    parser.add_argument("--case", default="", metavar="TEXT", help="of these, only what has TEXT in its name")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    options = parser.parse_args()
    other = options.other.resolve()
    table: list[dict[str, object]] = []
    for what, start, steps in cases():
        turns = options.turns if steps == ROUND_STEPS else options.step_turns
        if options.case in what and turns:
            found = [pair for _ in range(options.starts) for pair in turned(other, start, turns, steps)]
            table += rows(what, found, tuple(found[0][0]))
            sys.stderr.write(f"{table[-2]}\n{table[-1]}\n")
    kills = pairs(other, [KILL.format(seed=seed) for seed in range(options.kill_rounds)])
    if kills:
        table += rows("masked kill", kills, ("job_cpu_s", "total_s", "agree_s", "rebuild_s", "reduce_s"))
    names = {"this": ROOT, "other": other}
    heads = {
        name: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=path, capture_output=True, text=True
        ).stdout.strip()
        for name, path in names.items()
    }
    report(
        "against_checkout",
        {**heads, **{name: getattr(options, name) for name in ("turns", "step_turns", "starts", "kill_rounds")}},
        table,
        options.json,
    )


if __name__ == "__main__":
    main()
