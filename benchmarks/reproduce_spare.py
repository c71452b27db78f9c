"""The published table of SPARe (arXiv 2603.00357: N = 200/600/1000 groups, 10,000 steps, three trials) beside ours.

    python benchmarks/reproduce_spare.py [--all-redundancies] [--sensitivity] [--plot FILE.png] [--json FILE]

Every row runs the same controller on the same failures and jitter. Without ``--all-redundancies`` only the best
published redundancies run, with it r = 2..20 for SPARe and microbatch and 2..5 for replication. ``--sensitivity`` adds
one row per assumption changed at N = 200.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.sim.cluster import Cluster, Policy
from spare_megatron.sim.trials import Case, run_many

PUBLISHED = {
    ("replication", 200): (6.07, 0.6174),
    ("replication", 600): (4.27, 0.7989),
    ("replication", 1000): (3.88, 0.8441),
    ("spare", 200): (2.92, 0.8700),
    ("spare", 600): (2.49, 0.9390),
    ("spare", 1000): (2.34, 0.9654),
}
BEST = {200: 9, 600: 8, 1000: 9}
RESTART_AFTER = {200: 80, 600: 180, 1000: 250}
REPAIR_S = 600.0


def cases(steps: int, every: bool) -> Iterator[tuple[str, Case]]:
    """(label, case) of every row."""
    for groups in (200, 600, 1000):
        cluster = Cluster(groups, reduce_s=groups / 100)
        for r in range(2, 6) if every else (3,):
            yield "replication", Case(cluster, Policy("replication", r, steps=steps))
        for r in range(2, 21) if every else (BEST[groups],):
            yield "spare", Case(cluster, Policy("spare", r, steps=steps))
        for r in range(2, 21) if every else (7,):
            yield "microbatch", Case(cluster, Policy("microbatch", r, 16, steps=steps))
        shared = Policy("microbatch", groups, 16, steps=steps, restart_after=RESTART_AFTER[groups])
        yield "microbatch, shared data, planned restart", Case(cluster, shared)
        back = replace(cluster, rejoin_s=REPAIR_S)
        returning = Policy("microbatch", 6, 64, steps=steps)
        yield "microbatch, re-join", Case(back, returning)
        yield "microbatch, re-join, no jitter", Case(replace(back, jitter=0.0), returning)


def sensitivity(steps: int) -> Iterator[tuple[str, Case]]:
    """One assumption changed at a time, N = 200."""
    base = Cluster(200, reduce_s=2.0)
    for label, cluster in {
        "one system-wide clock": replace(base, clocks="system"),
        "no jitter": replace(base, jitter=0.0),
        "exponential failures": replace(base, weibull_shape=1.0),
        "rebuild 30 s": replace(base, rebuild_s=30.0),
        "restart in 30 min": replace(base, restart_s=1800.0),
    }.items():
        for policy in (Policy("replication", 3, steps=steps), Policy("spare", 9, steps=steps)):
            yield f"{policy.name}: {label}", Case(cluster, policy)
    consecutive = Policy("spare", 9, placement="consecutive", steps=steps)
    yield "spare: consecutive offsets", Case(base, consecutive)


def row(label: str, case: Case, outcomes: list[Any]) -> dict[str, object]:
    """One line of the table."""
    groups, policy = case.cluster.num_groups, case.policy
    ratios = [outcome.ratio for outcome in outcomes]
    mean = fmean(ratios) if None not in ratios else float("nan")
    is_best = policy.redundancy == (3 if policy.name == "replication" else BEST[groups])
    published = PUBLISHED.get((label, groups)) if is_best else None
    available = fmean(outcome.availability for outcome in outcomes)
    return {
        "policy": label,
        "groups": groups,
        "redundancy": policy.redundancy,
        "pieces": policy.pieces_per_shard if policy.name == "microbatch" else 1,
        "ratio": mean,
        "ratio_sd": stdev(ratios) if len(ratios) > 1 and None not in ratios else 0.0,
        "published_ratio": published[0] if published else "",
        "off_percent": 100 * (mean / published[0] - 1) if published else "",
        "availability_percent": 100 * available,
        "published_availability_percent": 100 * published[1] if published else "",
        "mean_work": fmean(outcome.mean_work for outcome in outcomes),
        "wipe_outs": fmean(outcome.tally.wipe_outs for outcome in outcomes),
        "patched_share": sum(o.tally.patched for o in outcomes) / max(1, sum(o.tally.failures for o in outcomes)),
    }


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Ratio, availability and mean work over r."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(11, 8), sharex=True)
    for column, groups in enumerate((200, 600, 1000)):
        for line, figure_name in enumerate(("ratio", "availability_percent", "mean_work")):
            for policy in ("replication", "spare", "microbatch"):
                of_policy = [one for one in rows if (one["policy"], one["groups"]) == (policy, groups)]
                xs = [one["redundancy"] for one in of_policy]
                axes[line][column].plot(xs, [one[figure_name] for one in of_policy], marker=".", label=policy)
            axes[line][column].set_ylabel(figure_name.replace("_", " "))
        axes[0][column].set_title(f"N = {groups}")
        axes[2][column].set_xlabel("redundancy")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--all-redundancies", action="store_true", help="r = 2..20, as published")
    parser.add_argument("--sensitivity", action="store_true", help="one assumption changed at a time")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="over r; with --all-redundancies")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = list(cases(args.steps, args.all_redundancies))
    if args.sensitivity:
        table += sensitivity(args.steps)
    began = time.perf_counter()
    outcomes = run_many([(case, args.seed + n) for _, case in table for n in range(args.trials)])
    rows = []
    for number, (label, case) in enumerate(table):
        rows.append(row(label, case, outcomes[number * args.trials : (number + 1) * args.trials]))
    config = {
        "steps": args.steps,
        "trials": args.trials,
        "seeds": f"{args.seed}..{args.seed + args.trials - 1}",
        "wall_s": round(time.perf_counter() - began, 1),
    }
    report("reproduce_spare", config, rows, args.json)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
