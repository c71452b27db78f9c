"""Compares the published closed form and this project's formulas with simulated losses of the real placement.

    python benchmarks/theory_table.py [--groups N ...] [--orders n] [--plans SECONDS] [--workers n]

Endured: groups are lost in random order until a shard has no host. Work: the protocol machine's own plan after each
loss, the most loaded group's pieces; its ratio to the bound ceil(N K / (N - k)) of the same orders is compared, which
takes out most of the noise of how long an order lasts. Only redundancies with an independent placement are listed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.placement import Placement, build_placement
from spare_megatron.planning import depth, endured, published
from spare_megatron.protocol.assign import Assignment, assign, first_assignment

SEED = 60_301
PIECES = {"shard": 1, "microbatch": 16}
EVEN_R = 5


def simulated_endured(placement: Placement, orders: int) -> tuple[float, float]:
    """The mean number of losses endured, and its standard error in %."""
    rng = np.random.default_rng((SEED, placement.num_groups, placement.redundancy))
    hosts = placement.hosts()
    fatal = [rng.permutation(placement.num_groups)[hosts].max(axis=1).min() for _ in range(orders)]
    return float(np.mean(fatal)), float(np.std(fatal) / orders**0.5 / np.mean(fatal) * 100)


def simulated_work(placement: Placement, granularity: str, budget_s: float) -> tuple[float, float, int]:
    """(work over bound, its standard error in %, orders): at least 8 orders, then as many as fit the time."""
    rng = np.random.default_rng((SEED, placement.num_groups, placement.redundancy))
    pieces, sums = PIECES[granularity], []
    start = time.perf_counter()
    while len(sums) < 8 or time.perf_counter() - start < budget_s:
        order = rng.permutation(placement.num_groups)
        plan: object = first_assignment(placement, pieces, granularity)
        taken = bound = 0.0
        lost = 0
        while isinstance(plan, Assignment):
            taken += plan.load_max / pieces
            bound += published.load_bound(placement.num_groups, lost, pieces)
            lost += 1
            plan = assign(placement, np.sort(order[lost:]).tolist(), pieces, granularity, plan)
        sums.append((taken, bound))
    pairs = np.array(sums)
    ratio = float(pairs[:, 0].sum() / pairs[:, 1].sum())
    scatter = (pairs[:, 0] - ratio * pairs[:, 1]).std() / pairs[:, 1].mean() / len(pairs) ** 0.5
    return ratio, float(scatter / ratio * 100), len(pairs)


def row(num_groups: int, redundancy: int, orders: int, budget_s: float) -> dict[str, object] | None:
    """The row for N and r; None where there is no independent placement."""
    placement = build_placement(num_groups, redundancy)
    if placement.max_overlap > 1:
        return None
    # Orders scatter by about 1 / r of their mean: few hosts need more of them for the same error.
    mean, error = simulated_endured(placement, round(orders * max(1.0, (EVEN_R / redundancy) ** 2)))
    lifetimes = endured.endured(num_groups, placement.offsets)
    closed = published.endurable_failures(num_groups, redundancy)
    found: dict[str, object] = {
        "groups": num_groups,
        "r": redundancy,
        "endured": round(mean, 2),
        "error_percent": round(error, 2),
        "published_off_percent": round((closed / mean - 1) * 100, 2),
        "ours_off_percent": round((lifetimes.mean / mean - 1) * 100, 2),
        "method": lifetimes.method,
    }
    for granularity, pieces in PIECES.items():
        loads = depth.work(num_groups, placement.offsets, pieces, lifetimes)
        found[f"{granularity}_work"] = round(loads.mean, 4)
        if budget_s <= 0:
            continue
        ratio, scatter, count = simulated_work(placement, granularity, budget_s)
        states = np.arange(len(loads.after))
        bound = np.average(depth.bounds(num_groups, states, pieces), weights=lifetimes.survival[states])
        found[f"{granularity}_off_percent"] = round((loads.mean / bound / ratio - 1) * 100, 2)
        found[f"{granularity}_error_percent"] = round(scatter, 2)
        found[f"{granularity}_orders"] = count
    return found


def worst_of(rows: list[dict[str, object]]) -> dict[str, float]:
    """The largest value of every column that is a distance from the simulation."""
    names = [name for name in rows[0] if name.endswith("off_percent")] if rows else []
    return {name: max(abs(float(str(row[name]))) for row in rows) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 200, 600, 1000, 4000])
    parser.add_argument("--redundancy", type=int, nargs="+", default=list(range(2, 21)))
    parser.add_argument("--orders", type=int, default=4000, help="number of orders of losses for 'endured'")
    parser.add_argument(
        "--plans", type=float, default=0.0, help="seconds of planning per cell and granularity (0: none)"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/theory_table.json)")
    args = parser.parse_args()
    cells = [(num_groups, redundancy) for num_groups in args.groups for redundancy in args.redundancy]
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(row, *cell, args.orders, args.plans) for cell in cells]
        rows = [found for each in waiting if (found := each.result()) is not None]
    config: dict[str, object] = {f"worst_{name}": worst for name, worst in worst_of(rows).items()}
    config |= {
        "seed": SEED,
        "orders": args.orders,
        "plan_seconds": args.plans,
        "pieces_per_shard": PIECES["microbatch"],
    }
    print(f"written to {report('theory_table', config, rows, args.json)}")


if __name__ == "__main__":
    main()
