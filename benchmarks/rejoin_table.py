"""Compares the theory of jobs whose lost groups come back with the simulator, which has the real controller.

    python benchmarks/rejoin_table.py [--groups N ...] [--steps n] [--seeds n] [--workers n] [--simulated FILE]

The published cluster; pieces of 1/16 shard; saves at the theory's own interval; means over the seeds. A return takes
T from the loss until the group could take the state (``rejoin_s``), then the state takes ``transfer_s`` and each result
``result_s``; 0 and 0: it has them at once. With ``--simulated`` nothing is simulated: the theory is compared with the
simulated figures of an earlier results file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.planning.choose import candidate
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case, run_many

RETURNS = ((600.0, 0.0, 0.0), (3600.0, 0.0, 0.0), (600.0, 300.0, 20.0))
"""(rejoin_s, transfer_s, result_s)."""
REDUNDANCIES = (5, 7, 10)
PIECES = 16


def row(
    num_groups: int, redundancy: int, back: tuple[float, float, float], args: argparse.Namespace
) -> dict[str, object]:
    rejoin_s, transfer_s, result_s = back
    figures = ClusterFigures(
        gpus=num_groups * 600,
        gpus_per_group=600,
        mtbf_s=300.0,
        restart_s=3600.0,
        save_s=60.0,
        compute_s=64.0,
        reduce_s=num_groups / 100,
        weibull_shape=0.78,
        pieces_per_shard=PIECES,
        rejoin_s=rejoin_s,
        transfer_s=transfer_s,
        result_s=result_s,
        steps=args.steps,
    )
    found = candidate(figures, redundancy).outcome
    assert found is not None
    made = {
        "groups": num_groups,
        "r": redundancy,
        "rejoin_s": rejoin_s,
        "transfer_s": transfer_s,
        "result_s": result_s,
        "theory": round(found.ratio, 4),
    }
    earlier = () if args.simulated is None else json.loads(args.simulated.read_text())["results"]
    same = [one for one in earlier if all(one[key] == made[key] for key in tuple(made)[:5])]
    seen = same[0] if same else simulated(num_groups, redundancy, back, found.interval_s, args)
    made |= {key: seen[key] for key in ("simulated", "trials")}
    made["off_percent"] = round((found.ratio / float(str(seen["simulated"])) - 1) * 100, 2)
    made |= {key: seen[key] for key in ("joins", "learners_lost", "wipe_outs")}
    print(made, flush=True)
    return made


def simulated(
    num_groups: int, redundancy: int, back: tuple[float, float, float], interval_s: float, args: argparse.Namespace
) -> dict[str, object]:
    """The simulated figures of one row."""
    rejoin_s, transfer_s, result_s = back
    cluster = Cluster(
        num_groups, reduce_s=num_groups / 100, rejoin_s=rejoin_s, transfer_s=transfer_s, result_s=result_s
    )
    policy = Policy("microbatch", redundancy, PIECES, steps=args.steps, save_interval_s=interval_s)
    trials = run_many([(Case(cluster, policy), seed) for seed in range(args.seeds)], args.workers)
    ratios = [trial.ratio for trial in trials if trial.ratio is not None]
    assert len(ratios) == len(trials)
    return {
        "simulated": round(fmean(ratios), 4),
        "trials": [round(ratio, 4) for ratio in ratios],
        "joins": round(fmean(trial.tally.joins for trial in trials), 1),
        "learners_lost": round(fmean(trial.tally.learners_lost for trial in trials), 1),
        "wipe_outs": round(fmean(trial.tally.wipe_outs for trial in trials), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--simulated", type=Path, metavar="FILE", help="take the simulated figures from this file")
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/rejoin_table.json)")
    args = parser.parse_args()
    rows = [row(n, r, back, args) for n in args.groups for back in RETURNS for r in REDUNDANCIES]
    worst = max(abs(float(str(one["off_percent"]))) for one in rows)
    config: dict[str, object] = {
        "worst_off_percent": worst,
        "steps": args.steps,
        "seeds": args.seeds,
        "pieces_per_shard": PIECES,
    }
    if args.simulated is not None:
        earlier = json.loads(args.simulated.read_text())
        config["simulated_utc"] = earlier["config"].get("simulated_utc", earlier["date_utc"])
    print(f"written to {report('rejoin_table', config, rows, args.json)}")


if __name__ == "__main__":
    main()
