"""Measures how long the simulator takes for 10,000 steps at N = 1000 and 10,000 groups, and which functions take it.

    python benchmarks/simulator.py [--groups 1000 10000] [--steps 10000] [--json FILE]

CPU time of one process. Goals: 5 s at 1000 groups, 30 s where slow groups are relieved, 10 minutes at 10,000; memory
below 1 GiB. Relief (``--balance``, pieces of 1/64, a jitter of 5 %) is timed at up to 1000 groups.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case, run_one

PARTS = ("assign", "patch", "all_voted", "lose", "admit", "speeds", "due")
"""Functions whose cumulative share is reported."""


def cases(groups: int, steps: int) -> dict[str, Case]:
    """Label -> the case that is timed."""
    cluster = Cluster(groups, reduce_s=groups / 100)
    back = Cluster(groups, reduce_s=groups / 100, rejoin_s=600.0)
    uneven = Cluster(groups, reduce_s=groups / 100, rejoin_s=600.0, jitter=0.05)
    relieved = Policy("microbatch", 6, 64, steps=steps, balance=True)
    return {
        "replication": Case(cluster, Policy("replication", 3, steps=steps)),
        "spare": Case(cluster, Policy("spare", 9, steps=steps)),
        "microbatch": Case(cluster, Policy("microbatch", 7, 16, steps=steps)),
        "microbatch, re-join": Case(back, Policy("microbatch", 6, 16, steps=steps)),
        **({"microbatch, re-join, relief": Case(uneven, relieved)} if groups <= 1000 else {}),
    }


def shares(case: Case) -> str:
    """Cumulative shares of ``PARTS`` in a profiled run of a tenth of the steps."""
    short = Policy(**{**vars(case.policy), "steps": max(1, case.policy.steps // 10)})
    profile = cProfile.Profile()
    profile.runcall(run_one, Case(case.cluster, short), 0)
    stats = pstats.Stats(profile)
    spent = dict.fromkeys(PARTS, 0.0)
    for (path, _, name), figures in stats.stats.items():  # type: ignore[attr-defined]
        if name in spent and "spare_megatron" in path:
            spent[name] += figures[3]
    total = stats.total_tt  # type: ignore[attr-defined]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in spent.items() if value > 0.02 * total)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for groups in args.groups:
        for label, case in cases(groups, args.steps).items():
            began = time.process_time()
            outcome = run_one(case, 0)
            rows.append(
                {
                    "groups": groups,
                    "policy": label,
                    "cpu_s": time.process_time() - began,
                    "failures": outcome.tally.failures,
                    "controller_events": outcome.events,
                    "ratio": outcome.ratio if outcome.ratio is not None else float("nan"),
                    "memory_max_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                    "time_goes_into": shares(case),
                }
            )
    report("simulator", {"steps": args.steps, "seed": 0}, rows, args.json)


if __name__ == "__main__":
    main()
