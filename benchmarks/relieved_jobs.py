"""Time to train of simulated jobs whose slow groups are relieved: by the protocol machine's own decisions, and by the
model.

    python benchmarks/relieved_jobs.py [--groups 200 600 1000] [--steps 200] [--trials 2] [--workers n] [--resume FILE]

The published cluster with a jitter of 5 %, pieces of 1/64 shard on six hosts, saves that do not block; a lost group is
back after 600 s, with the state. ``relief``: ``spare-simulate --relief``; ``model``: ``--balance``; ``alone``: neither.
Of the jobs with ``stragglers`` three groups are twice as slow in every step, the others are as without; those with a
``jitter`` of 0 are the same without any, where what the model finds is the floor: the earliest moment at which all can
be done, by those that host it. Means over the seeds; ``cpu_s_per_step`` is that of one process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import options
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case, run_one

WAYS: dict[str, dict[str, bool]] = {"alone": {}, "model": {"balance": True}, "relief": {"relief": True}}


def main() -> None:
    """Print the table, write the JSON."""
    parser = options(__doc__, steps=200, trials=2)
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 600, 1000])
    args = parser.parse_args()
    rows = []
    for groups in args.groups:
        for way, flags in WAYS.items():
            for jitter, stragglers in ((0.05, 0), (0.05, 3), (0.0, 0)):
                cluster = Cluster(groups, reduce_s=groups / 100, rejoin_s=600.0, jitter=jitter, stragglers=stragglers)
                policy = Policy("microbatch", 6, 64, steps=args.steps, async_save=True, **flags)
                began_s, ratios = time.process_time(), list[float]()
                for seed in range(args.seed, args.seed + args.trials):
                    ratio = run_one(Case(cluster, policy), seed).ratio
                    assert ratio is not None, "jobs of so many steps are not wiped out for good"
                    ratios.append(ratio)
                spent_s = time.process_time() - began_s
                rows.append(
                    {
                        "groups": groups,
                        "way": way,
                        "jitter": jitter,
                        "stragglers": stragglers,
                        "time_to_train": round(fmean(ratios), 4),
                        "trials": [round(ratio, 4) for ratio in ratios],
                        "cpu_s_per_step": round(spent_s / args.steps / args.trials, 4),
                    }
                )
                print(rows[-1], flush=True)
    report("relieved_jobs", {"steps": args.steps, "trials": args.trials, "seed": args.seed}, rows, args.json)


if __name__ == "__main__":
    main()
