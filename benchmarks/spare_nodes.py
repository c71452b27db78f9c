"""What nodes that are repaired cost a job, with 0 to 8 spare ones: the share of the groups' time that is lost.

    python benchmarks/spare_nodes.py [--trials K] [--steps n]

Each figure is spare-plan's own. Beside it, for 16 groups of 128 GPUs, is what spare-simulate finds with steps, plans
and commits by the real controller. One interruption in 50,675 GPU hours (Llama 3); 70% take a node of 8 GPUs out for a
day on average; a group starts in 5 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.cli import plan, simulate

GPU_HOURS = 50_675
JOBS = ((4, 32), (16, 128), (4, 512), (32, 512))
SIMULATED = (16, 128)


def answer(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> dict[str, Any]:
    """The JSON that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def planned(groups: int, size: int) -> list[dict[str, float]]:
    """spare-plan's rows, one for each number of spare nodes."""
    words = ["--gpus", str(groups * size), "--gpus-per-group", str(size), "--gpus-per-node", "8"]
    words += ["--mtbf-s", str(3600 * GPU_HOURS / (groups * size)), "--redundancy", "2", "--standby-groups", "0"]
    words += ["--restart-s", "600", "--save-s", "60", "--compute-s", "64", "--reduce-s", "2", "--steps", "10000"]
    rows: list[dict[str, float]] = answer(plan.main, words)["spare_nodes"]
    return rows


def simulated(groups: int, size: int, spares: int, salvage: bool, args: argparse.Namespace) -> float:
    """spare-simulate's share of the groups' time."""
    words = ["--num-groups", str(groups), "--nodes-per-group", str(size // 8), "--spare-nodes", str(spares)]
    words += ["--mtbf-s", str(3600 * GPU_HOURS / (groups * size)), "--weibull-shape", "1", "--rejoin-s", "300"]
    words += ["--steps", str(args.steps), "--jitter", "0", "--redundancy", str(groups), "--trials", str(args.trials)]
    return float(answer(simulate.main, [*words, *([] if salvage else ["--no-salvage"])])["groups_away"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8, help="of spare-simulate")
    parser.add_argument("--steps", type=int, default=40_000, help="of spare-simulate, a minute each")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for groups, size in JOBS:
        for row in planned(groups, size):
            spares = int(row["spare_nodes"])
            found: list[float | None] = [None, None]
            if (groups, size) == SIMULATED and spares in (0, 2):
                found = [100 * simulated(groups, size, spares, salvage, args) for salvage in (True, False)]
            rows.append(
                {
                    "groups": groups,
                    "gpus_per_group": size,
                    "spare_nodes": spares,
                    "lost_percent": 100 * row["lost"],
                    "without_salvage_percent": 100 * row["lost_without_salvage"],
                    "simulated_lost_percent": found[0],
                    "simulated_without_salvage_percent": found[1],
                }
            )
    report("spare_nodes", {"trials": args.trials, "steps": args.steps, "gpu_hours": GPU_HOURS}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
