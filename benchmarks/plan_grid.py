"""Checks that the choice of spare-plan is as good as the best of a grid of simulated choices.

    python benchmarks/plan_grid.py [--groups N ...] [--resume FILE]

Staged and shared data, without and with re-join. The grid: redundancies 3 to 20 (r = N for shared data) times planned
restarts after a share of the groups; saves at the simulator's own optimum. The planner's choice runs with the planner's
save interval. 'off' is how much longer it takes than the best of the grid (negative: it beats the grid).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import mean_ratio, options, outcomes
from spare_megatron.planning import cluster_figures as tuner_cluster
from spare_megatron.planning.choose import RedundancyPlan, choose
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case

REDUNDANCIES = (3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20)
RESTART_SHARES = (None, 0.15, 0.25, 0.3, 0.35, 0.4, 0.5)
"""Shares of the groups after whose loss a restart is planned."""
PIECES = 16


def plan_for(groups: int, data: str, rejoin_s: float | None, steps: int) -> RedundancyPlan:
    """spare-plan's choice for the published cluster at this N."""
    return choose(
        tuner_cluster.ClusterFigures(
            gpus=groups * 600,
            gpus_per_group=600,
            mtbf_s=300.0,
            restart_s=3600.0,
            save_s=60.0,
            compute_s=64.0,
            reduce_s=groups / 100,
            weibull_shape=0.78,
            pieces_per_shard=PIECES,
            rejoin_s=rejoin_s,
            data=data,  # type: ignore[arg-type]
            steps=steps,
        )
    )


def grid(groups: int, data: str, rejoin_s: float | None, steps: int) -> list[Case]:
    """The cases of all choices of the grid."""
    cluster = Cluster(groups, reduce_s=groups / 100, rejoin_s=rejoin_s)
    shares = (None,) if rejoin_s is not None else RESTART_SHARES
    found = []
    for r in (groups,) if data == "shared" else REDUNDANCIES:
        for share in shares:
            after = None if share is None else round(share * groups)
            found.append(Case(cluster, Policy("microbatch", r, PIECES, steps=steps, restart_after=after)))
    return found


def main() -> None:
    parser = options(__doc__, trials=2)
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 600, 1000])
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    config: dict[str, object] = {}
    for groups in args.groups:
        for data, rejoin_s in (("staged", None), ("shared", None), ("staged", 600.0)):
            began = time.perf_counter()
            chosen = plan_for(groups, data, rejoin_s, args.steps).chosen
            plan_s = time.perf_counter() - began
            assert chosen.outcome is not None
            cases = grid(groups, data, rejoin_s, args.steps)
            own = Policy(
                "microbatch",
                chosen.redundancy,
                PIECES,
                steps=args.steps,
                restart_after=chosen.outcome.restart_after,
                save_interval_s=max(61.0, chosen.outcome.interval_s),
            )
            found = outcomes(args, [*cases, replace(cases[0], policy=own)])
            if found is None:
                return
            config = found[1]
            *ratios, ours = (mean_ratio(trials) for trials in found[0])
            best = min(range(len(cases)), key=lambda n: ratios[n] if ratios[n] == ratios[n] else float("inf"))
            rows.append(
                {
                    "groups": groups,
                    "data": data,
                    "rejoin_s": rejoin_s or "-",
                    "chosen_r": chosen.redundancy,
                    "chosen_restart_after": chosen.outcome.restart_after or "-",
                    "theory": chosen.outcome.ratio,
                    "simulated": ours,
                    "best_r": cases[best].policy.redundancy,
                    "best_restart_after": cases[best].policy.restart_after or "-",
                    "best_of_grid": ratios[best],
                    "off_percent": 100 * (ours / ratios[best] - 1),
                    "plan_s": plan_s,
                }
            )
    report("plan_grid", config, rows, args.json)


if __name__ == "__main__":
    main()
