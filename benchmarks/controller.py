"""Measures how long the protocol machine plans after a failure: steady-state assignment, patch, every group's
list of pieces.

    python benchmarks/controller.py [--json FILE]

Groups fail one after the other, at random, until 40% are lost; each failure is planned from the plan before it. A
failure that would be a wipe-out is counted and undone, so that the sequence goes on. How far survivors are in their
step is drawn for each failure. Times are the CPU time of the one thread that plans, which never waits; the wall time
also contains what else ran on the machine. Goal: 5 ms median at 1000 groups.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.placement import Placement, build_placement
from spare_megatron.protocol.assign import Assignment, WipeOut, assign, first_assignment, patch

PIECES_PER_SHARD = 16
REDUNDANCY = 8
LOST_SHARE = 0.4
SEQUENCES = {200: 10, 1000: 3, 4000: 1}
SEED = 20_260


def measure(placement: Placement, granularity: str, sequences: int) -> dict[str, object]:
    """One row: all failures of all sequences."""
    rng = np.random.default_rng(SEED)
    seconds: list[tuple[float, float, float, float]] = []
    moves: list[int] = []
    wipe_outs = above = 0
    for _ in range(sequences):
        live = list(range(placement.num_groups))
        plan = first_assignment(placement, PIECES_PER_SHARD, granularity)
        plan.pieces_of(0)
        while len(live) > (1 - LOST_SHARE) * placement.num_groups:
            dead = live[int(rng.integers(len(live)))]
            survivors = [group for group in live if group != dead]
            progress = rng.random()
            remaining = ((1 - progress) * plan.loads).astype(np.int64)
            remaining[dead] = 0
            found, spent = plan_failure(placement, plan, dead, survivors, remaining, granularity)
            if found is None:
                wipe_outs += 1
                continue
            plan, live = found, survivors
            seconds.append(spent)
            moves.append(plan.moves)
            unit = PIECES_PER_SHARD if granularity == "shard" else 1
            bound = -(-placement.num_groups * PIECES_PER_SHARD // (unit * len(live))) * unit
            above += plan.load_max > bound
    steps = np.array(seconds) * 1e3
    total = steps[:, :3].sum(axis=1)
    return {
        "groups": placement.num_groups,
        "granularity": granularity,
        "failures": len(seconds),
        "plan_median_ms": float(np.median(total)),
        "plan_p99_ms": float(np.quantile(total, 0.99)),
        "wall_median_ms": float(np.median(steps[:, 3])),
        "assign_median_ms": float(np.median(steps[:, 0])),
        "assign_p99_ms": float(np.quantile(steps[:, 0], 0.99)),
        "patch_median_ms": float(np.median(steps[:, 1])),
        "patch_p99_ms": float(np.quantile(steps[:, 1], 0.99)),
        "lists_median_ms": float(np.median(steps[:, 2])),
        "moves_median": int(np.median(moves)),
        "above_bound": above,
        "wipe_outs_put_back": wipe_outs,
    }


def plan_failure(
    placement: Placement,
    plan: Assignment,
    dead: int,
    survivors: list[int],
    remaining: NDArray[np.int64],
    granularity: str,
) -> tuple[Assignment | None, tuple[float, float, float, float]]:
    """(new plan or None for a wipe-out, CPU seconds of assignment, patch and piece lists, wall seconds of all)."""
    wall, start = time.perf_counter(), time.thread_time()
    found = assign(placement, survivors, PIECES_PER_SHARD, granularity, plan)
    assigned = time.thread_time()
    if isinstance(found, WipeOut):
        return None, (0.0, 0.0, 0.0, 0.0)
    patch(
        placement,
        survivors,
        [],
        plan.pieces_of(dead),
        remaining=remaining,
        pieces_per_shard=PIECES_PER_SHARD,
        granularity=granularity,
    )
    patched = time.thread_time()
    for group in survivors:
        found.pieces_of(group)
    listed = time.thread_time()
    return found, (assigned - start, patched - assigned, listed - patched, time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/controller.json)")
    parser.add_argument("--groups", type=int, nargs="+", default=sorted(SEQUENCES), help="numbers of groups to measure")
    arguments = parser.parse_args()
    rows = []
    for num_groups in arguments.groups:
        placement = build_placement(num_groups, REDUNDANCY)
        for granularity in ("microbatch", "shard"):
            gc.collect()
            rows.append(measure(placement, granularity, SEQUENCES.get(num_groups, 1)))
    config = {
        "pieces_per_shard": PIECES_PER_SHARD,
        "redundancy": REDUNDANCY,
        "placement": "independent",
        "lost_share": LOST_SHARE,
        "seed": SEED,
    }
    path = report("controller", config, rows, arguments.json)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
