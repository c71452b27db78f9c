"""Simulates what a slow rebuild of communicators after a loss costs: 0.1 s to 30 s, every policy, N = 1000.

    python benchmarks/rebuild_sweep.py [--groups N] [--plot PNG] [--resume FILE]

NCCL communicators of a thousand ranks take seconds to form. In the published simulation a masked failure costs
replication no time; here each one costs the rebuild.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import mean_ratio, options, outcomes
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case

REBUILD_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def cases(groups: int, steps: int) -> dict[str, Case]:
    """Label -> the case, at the first of ``REBUILD_S``."""
    cluster = Cluster(groups, reduce_s=groups / 100, rebuild_s=REBUILD_S[0])
    back = replace(cluster, rejoin_s=600.0)
    return {
        "replication r=3": Case(cluster, Policy("replication", 3, steps=steps)),
        "SPARe r=9": Case(cluster, Policy("spare", 9, steps=steps)),
        "microbatch r=7": Case(cluster, Policy("microbatch", 7, 16, steps=steps)),
        "shared data, planned restart": Case(
            cluster, Policy("microbatch", groups, 16, steps=steps, restart_after=groups // 4)
        ),
        "re-join r=6": Case(back, Policy("microbatch", 6, 16, steps=steps)),
    }


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Draw the ratio over the rebuild time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.5, 4))
    for row in rows:
        axis.semilogx(REBUILD_S, [row[f"at_{each:g}_s"] for each in REBUILD_S], marker=".", label=str(row["policy"]))
    axis.set_xlabel("rebuild, s")
    axis.set_ylabel("time to train / failure-free")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    args = parser.parse_args()
    labels = cases(args.groups, args.steps)
    table = [
        replace(case, cluster=replace(case.cluster, rebuild_s=each)) for case in labels.values() for each in REBUILD_S
    ]
    found = outcomes(args, table)
    if found is None:
        return
    rows: list[dict[str, object]] = []
    for number, (label, case) in enumerate(labels.items()):
        row: dict[str, object] = {"policy": label}
        free_s = args.steps * (case.cluster.compute_s + case.cluster.reduce_s)
        for n, each in enumerate(REBUILD_S):
            trials = found[0][number * len(REBUILD_S) + n]
            charged = fmean(one.tally.masked for one in trials) * each if case.policy.name == "replication" else 0.0
            row[f"at_{each:g}_s"] = mean_ratio(trials) + charged / free_s
        first, last = (float(str(row[f"at_{REBUILD_S[end]:g}_s"])) for end in (0, -1))
        row["cost_at_30_s_percent"] = 100 * (last / first - 1)
        rows.append(row)
    report("rebuild_sweep", {"groups": args.groups, **found[1]}, rows, args.json)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
