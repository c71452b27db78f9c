"""Explains line by line what exact sums cost more than fp32 sums: CPU milliseconds of a rank and step, and the least
that the bytes of each line take at this machine's speed.

    python benchmarks/step_lines.py [--rounds 8] [--steps 4]

Jobs with fp32 sums and with exact sums of pieces of one microbatch and of four take turns (``_turns.py``), all of four
groups of one rank, held to AVX2; each part of a step is timed in each rank (``_timed_pretrain.py``). Figures are
medians over ranks and steps. The floor is the bytes that exact sums read and write more, as they are derived below, at
the speed of a copy or, where nothing is written, of a sum, both of 28 MB and measured before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _report import report
from _timed_pretrain import LINES, PARTS
from _turns import Side, take_turns
from limited_pretrain import LEVEL
from step_overhead import CASES, LIBRARIES, exact, jobs, model

CASE = "1 x 4 groups, K=8"
GROUPS = CASES[CASE][0]
PARAMETERS = 3_487_232
"""Of the model."""
MODES = {"fp32": ("--spare-reduce", "fp32"), "exact": exact(1), "exact4": exact(4)}
ROUND = (GROUPS - 1) / GROUPS
MORE_BYTES: dict[str, tuple[float, bool]] = {
    # Nothing is zeroed, and what is added first in a step does not read the sums. Else two pieces move 2 * 4 + 16
    # bytes, and the microbatches of a piece of four 0, 12, 12 and 4 + 4 + 16: as fp32 sums, which move 12 each.
    "add pieces": (-8, False),
    "zero": (-4, True),
    "check result": (4, False),
    "digest weights": (4, False),
    # An element of 8 bytes, not 4, goes round the ring until its sum is complete, and is read from one place and
    # written to another by who sends it, and by who receives it; then it has 4. It is read twice and written once to
    # add it up, in the last step with 4 bytes.
    "ring": (4 * 2 * 2 * ROUND + (12 * (GROUPS - 2) + 8) / GROUPS, True),
}
"""Line -> bytes that exact sums move more per parameter and step than fp32 sums, and whether some are written."""
TOGETHER = "lines together"
SHOWN = ("add pieces", *PARTS, TOGETHER, "whole rank")


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="number of turns of each side")
    parser.add_argument("--steps", type=int, default=4, help="number of steps of a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {LEVEL: "avx2", **LIBRARIES["avx2"]}
    speeds = [_speeds()]
    lines = _lines(options)
    copied, read = (max(of_both) for of_both in zip(*speeds, _speeds(), strict=True))
    floor = _floor(copied, read)
    rows = [
        {
            "line": line,
            **{f"{mode}_ms": round(lines[mode][line], 2) for mode in MODES},
            "floor_ms": round(floor.get(line, 0.0), 2),
        }
        for line in SHOWN
    ]
    config = {"instructions": "avx2", "model": " ".join(model()), "case": CASE, "parameters": PARAMETERS}
    config |= {"rounds": options.rounds, "steps": options.steps}
    config |= {"copy_gb_s": round(copied, 1), "read_gb_s": round(read, 1)}
    report("step_lines", config, rows)


def _lines(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Mode -> part -> median of milliseconds of a rank and step, in the turns that count."""
    _, groups, _, flags = next(job for job in jobs(CASES) if job[0] == CASE)
    with tempfile.TemporaryDirectory(prefix="spare-") as name:
        folders = {mode: Path(name) / str(number) for number, mode in enumerate(MODES)}
        sides = {mode: _side(folder, groups, (*flags, *MODES[mode])) for mode, folder in folders.items()}
        rounds = take_turns(sides, options.rounds, options.steps)
        counted = {mode: {line["step"] for turn in rounds for line in turn[mode]} for mode in MODES}
        return {mode: _medians(list(_written(folders[mode], counted[mode]))) for mode in MODES}


def _side(folder: Path, groups: int, flags: tuple[str, ...]) -> Side:
    (folder / "lines").mkdir(parents=True)
    os.environ[LINES] = str(folder / "lines")
    command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(groups), "--run-dir"]
    command += [str(folder / "run"), "benchmarks/_timed_pretrain.py", *flags, "--spare-heartbeat-timeout-s", "600"]
    return Side([command], folder / "run" / "metrics.jsonl")


def _written(folder: Path, steps: set[int]) -> Iterator[dict[str, float]]:
    for record in sorted((folder / "lines").glob("*.jsonl")):
        whole = record.read_text().rpartition("\n")[0]
        for line in map(json.loads, whole.splitlines()):
            if line["step"] in steps:
                yield line["parts"]


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return _added(
        {line: statistics.median(step.get(line, 0.0) for step in steps) for line in SHOWN if line != TOGETHER}
    )


def _added(lines: dict[str, float]) -> dict[str, float]:
    """``lines`` with their sum."""
    parts = (ms for line, ms in lines.items() if line != "whole rank")
    return {**lines, TOGETHER: sum(parts)}


def _floor(copied: float, read: float) -> dict[str, float]:
    """Line -> milliseconds that its bytes take."""
    speeds = {True: copied, False: read}
    floor = {line: PARAMETERS * size / speeds[written] / 1e6 for line, (size, written) in MORE_BYTES.items()}
    return _added(floor)


def _speeds() -> tuple[float, float]:
    """GB/s that a copy reads and writes, and that a sum reads."""
    source = torch.ones(PARAMETERS, dtype=torch.int64)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _fastest_s(lambda: target.copy_(source)) / 1e9, source.nbytes / _fastest_s(
        source.sum
    ) / 1e9


def _fastest_s(work: Callable[[], object]) -> float:
    spent = []
    for _ in range(30):
        began_s = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began_s)
    return min(spent)


if __name__ == "__main__":
    main()
