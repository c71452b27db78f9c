"""Time to train over redundancy and standby groups, with and without adoption of shards that have lost their last host,
by the simulator, which has the real controller.

    python benchmarks/adoption_grid.py [--groups N ...] [--redundancy r ...] [--standbys s ...] [--adopt-s S]
                                       [--steps n] [--seeds n] [--workers n]

The published cluster (600 GPUs a group, a loss every 300 s); pieces of 1/16 shard; a lost group could take the state
after ``rejoin_s``, which then takes ``transfer_s`` and each result ``result_s``; saves every ``save_interval_s``; means
over the seeds. Standbys are groups beyond N: their price is not in the time.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.sim.cluster import Cluster, Policy
from spare_megatron.sim.trials import Case, run_many

PIECES = 16
REJOIN_S, TRANSFER_S, RESULT_S, SAVE_INTERVAL_S = 600.0, 300.0, 20.0, 3600.0


def row(
    groups: int, redundancy: int, standbys: int, adopt_s: float | None, args: argparse.Namespace
) -> dict[str, object]:
    """One cell of the grid."""
    cluster = Cluster(
        groups, reduce_s=groups / 100, rejoin_s=REJOIN_S, transfer_s=TRANSFER_S, result_s=RESULT_S, jitter=args.jitter
    )
    policy = Policy(
        "microbatch",
        redundancy,
        PIECES,
        steps=args.steps,
        save_interval_s=SAVE_INTERVAL_S,
        standby_groups=standbys,
        adopt_s=adopt_s,
    )
    trials = run_many([(Case(cluster, policy), seed) for seed in range(args.seeds)], args.workers)
    ratios = [trial.ratio for trial in trials if trial.ratio is not None]
    return {
        "groups": groups,
        "redundancy": redundancy,
        "standbys": standbys,
        "adopt_s": adopt_s,
        "time_to_train": round(fmean(ratios), 4) if len(ratios) == len(trials) else None,
        "wipe_outs": round(fmean(trial.tally.wipe_outs for trial in trials), 1),
        "soft_wipe_outs": round(fmean(trial.tally.soft_wipe_outs for trial in trials), 1),
        "failures": round(fmean(trial.tally.failures for trial in trials)),
    }


def main() -> None:
    """Print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 600, 1000])
    parser.add_argument("--redundancy", type=int, nargs="+", default=[2, 3, 5, 9])
    parser.add_argument("--standbys", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--adopt-s", type=float, default=120.0, help="seconds in which a shard is opened")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    cells = product(args.groups, args.redundancy, args.standbys, (None, args.adopt_s))
    rows = [row(*cell, args) for cell in cells]
    config = {**vars(args), "rejoin_s": REJOIN_S, "transfer_s": TRANSFER_S, "result_s": RESULT_S}
    report("adoption_grid", {**config, "save_interval_s": SAVE_INTERVAL_S}, rows, None)


if __name__ == "__main__":
    main()
