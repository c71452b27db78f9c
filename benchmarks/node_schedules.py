"""Plays random schedules of nodes that break, are repaired, are lent and leave, and compares the weights after each
step with those of a run without any.

    python benchmarks/node_schedules.py [--schedules K] [--seed S] [--slurm] [--out FILE]

By default a schedule is played in one process: the real controller, the launcher's places of groups and its looks at
nodes, toy models; after it, as many groups train as there are nodes for. With --slurm it is a job of real processes
that spare-slurm runs on the virtual nodes of tests/slurm: three groups of two nodes, and a seventh node that is lent;
nodes die and processes die, Slurm gives back none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import RESULTS, command, report, write
from benchmarks._simulated_nodes import NodeJob
from benchmarks._slurm_nodes import NODES, played
from tests.slurm.cluster import Cluster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.schedules)
    name, config = "node_schedules_slurm" if args.slurm else "node_schedules", {"schedules": args.schedules}
    path, rows = args.out or RESULTS / f"{name}.json", list[dict[str, object]]()
    if args.slurm:
        with (
            tempfile.TemporaryDirectory(prefix="spare-slurm-") as folder,
            Cluster(Path(folder) / "c", NODES) as cluster,
        ):
            for seed in seeds:
                cluster.until_idle()
                rows.append({"seed": seed, **played(cluster, Path(folder) / str(seed), seed)})
                cluster.clear()
                write(path, name, command(), config, rows)
                print(rows[-1], flush=True)
    else:
        rows = [{"seed": seed, **NodeJob(seed).play()} for seed in seeds]
    report(name, config, rows, path)
    wrong = [row for row in rows if row["live_at_end"] != row["live_possible"] or row["steps_with_other_weights"]]
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
