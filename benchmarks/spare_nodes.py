"""What nodes that are repaired cost a job, with 0 to 8 spare ones: the share of the groups' time that is lost.

    python benchmarks/spare_nodes.py [--trials K] [--steps n]

Each figure is spare-plan's own: where all groups restart from checkpoints, where lost groups wait for their nodes,
where those that wait put theirs together (salvage), and where they also train with fewer pipeline stages, any number of
them, of a model of 96 layers (``finer_shapes_percent``). ``shapes_percent`` has only numbers that divide those of home.
``formula_percent`` is rate x GPUs of a group x repair time. Beside it, for 16 groups of 128 GPUs, is what
spare-simulate finds with steps, plans and commits by the real protocol machine. One interruption in 50,675 GPU hours
(Llama 3); 70% take a node of 8 GPUs out for a day on average; a group starts in 5 minutes. The job that restarts does
so in 10 minutes and waits 2 s for each save.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.cli import plan, simulate
from spare_megatron.config.rows import smaller
from spare_megatron.simulator.node_losses import NodeFigures, mean_lost_share, trials_for

GPU_HOURS = 50_675
GPUS_PER_NODE = 8
JOBS = ((4, 32, 4), (16, 128, 16), (4, 512, 16), (32, 512, 16))
"""Groups, GPUs and pipeline stages of each."""
LAYERS = 96
SIMULATED = (16, 128)
KEYS = {
    "lost_by_restarts": "restarts_percent",
    "lost_without_salvage": "without_salvage_percent",
    "lost": "lost_percent",
    "lost_with_shapes": "finer_shapes_percent",
}


def answer(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> dict[str, Any]:
    """The JSON that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def planned(groups: int, size: int, stages: int) -> dict[str, Any]:
    """spare-plan's rows, one for each number of spare nodes, and what it advises."""
    words = ["--gpus", str(groups * size), "--gpus-per-group", str(size), "--gpus-per-node", str(GPUS_PER_NODE)]
    words += ["--mtbf-s", str(3600 * GPU_HOURS / (groups * size)), "--redundancy", "2", "--standby-groups", "0"]
    words += ["--restart-s", "600", "--save-s", "2", "--compute-s", "64", "--reduce-s", "2", "--steps", "10000"]
    return answer(plan.main, [*words, *shapes_of(stages)])


def shapes_of(stages: int) -> list[str]:
    """The flags of a job whose groups may have any number of stages."""
    return ["--pipeline-model-parallel-size", str(stages), "--num-layers", str(LAYERS)]


def divided(groups: int, size: int, stages: int, spares: int) -> float:
    """The share where the stages of a group must divide those of home."""
    shapes = tuple(smaller(stages, "home's stages stay whole"))
    nodes = NodeFigures(groups, size // GPUS_PER_NODE, GPU_HOURS / GPUS_PER_NODE, stages=stages, shapes=shapes)
    return mean_lost_share(nodes, spares, True, trials_for(nodes))


def simulated(groups: int, size: int, spares: int, more: Sequence[str]) -> float:
    """spare-simulate's share of the groups' time."""
    words = ["--num-groups", str(groups), "--nodes-per-group", str(size // 8), "--spare-nodes", str(spares)]
    words += ["--mtbf-s", str(3600 * GPU_HOURS / (groups * size)), "--weibull-shape", "1", "--rejoin-s", "300"]
    words += ["--compute-s", "600", "--reduce-s", "2", "--jitter", "0", "--redundancy", str(groups), "--balance"]
    return float(answer(simulate.main, [*words, *more])["groups_away"])


def rows_of(job: tuple[int, int, int], trials: int, steps: int) -> list[dict[str, object]]:
    """All figures of one job."""
    groups, size, stages = job
    found = planned(groups, size, stages)
    rows: list[dict[str, object]] = []
    for row in found["spare_nodes"]:
        spares = int(row["spare_nodes"])
        ways = {"without_salvage": ["--no-salvage"], "lost": []}
        ways["finer_shapes"] = shapes_of(stages)
        by_steps: dict[str, float | None] = {f"simulated_{name}_percent": None for name in ways}
        if (groups, size) == SIMULATED and spares in (0, 2):
            for name, more in ways.items():
                words = [*more, "--trials", str(trials), "--steps", str(steps)]
                by_steps[f"simulated_{name}_percent"] = 100 * simulated(groups, size, spares, words)
        rows.append(
            {
                "groups": groups,
                "gpus_per_group": size,
                "stages": stages,
                "spare_nodes": spares,
                "advised": spares == found["spare_nodes_advised"],
                **{name: 100 * row[key] for key, name in KEYS.items()},
                "shapes_percent": 100 * divided(groups, size, stages, spares),
                "formula_percent": None if spares else 100 * 0.7 * 24 * size / GPU_HOURS,
                **by_steps,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2, help="of spare-simulate")
    parser.add_argument("--steps", type=int, default=4_400, help="of spare-simulate, 10 minutes each")
    args = parser.parse_args()
    with ProcessPoolExecutor(len(JOBS), multiprocessing.get_context("spawn")) as pool:
        found = pool.map(rows_of, JOBS, repeat(args.trials), repeat(args.steps))
        rows = [row for of_one in found for row in of_one]
    report("spare_nodes", {"trials": args.trials, "steps": args.steps, "gpu_hours": GPU_HOURS}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
