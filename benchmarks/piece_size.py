"""Simulates what pieces of C microbatches cost and save: C = 1, 2, 4, 8 of 64 microbatches, and the choices of C.

    python benchmarks/piece_size.py [--groups N ...] [--costs S ...] [--resume FILE]

A cost S is what exact sums add to the computing of a microbatch at C = 1, as a share of it; S / C at C. Losses:
'rejoin': groups come back after 600 s; 'stay': they stay lost until a planned restart after a share of them; 'rare':
groups of 8 GPUs, 49,152 GPU hours per loss (Llama 3), and they stay lost. 'auto': what ``planning.piece_size`` chooses
with these figures; 'default': with S and the number of microbatches alone. 'off': how much longer it takes than the
best. 'at': time to train; 'step time': what the tuner expects, without saves and restarts; both over the failure-free.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import mean_ratio, options, outcomes
from spare_megatron.planning.cluster_figures import LLAMA3_MTBF_GPU_HOURS, ClusterFigures
from spare_megatron.planning.piece_size import step_time, with_figures, without_figures
from spare_megatron.planning.reduction_cost import CPU_SHARES, exact_share
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case

MICROBATCHES = 64
SIZES = (1, 2, 4, 8)
COSTS = (CPU_SHARES["exact"], 4 * exact_share("h100", "exact", 4, way="fused"))
"""Measured on a CPU with 256 tokens; modelled for an H100 with 4096 tokens and fused accumulation."""
REDUNDANCY = 7
REJOIN_S = 600.0
RESTART_SHARES = {200: 0.4, 1000: 0.25}
GPUS_OF_A_GROUP = 8
LOSSES = ("rejoin", "stay", "rare")


def cluster_of(groups: int, losses: str) -> tuple[Cluster, int | None]:
    """The cluster, and the losses after which a restart is planned."""
    if losses == "rare":
        mtbf_s = LLAMA3_MTBF_GPU_HOURS * 3600 / (groups * GPUS_OF_A_GROUP)
        return Cluster(groups, mtbf_s=mtbf_s, weibull_shape=1.0, reduce_s=groups / 100), None
    rejoin_s = REJOIN_S if losses == "rejoin" else None
    after = round(RESTART_SHARES.get(groups, 0.3) * groups) if losses == "stay" else None
    return Cluster(groups, reduce_s=groups / 100, rejoin_s=rejoin_s), after


def case_of(groups: int, losses: str, cost: float, size: int, steps: int) -> Case:
    """The case of pieces of C = ``size`` microbatches."""
    cluster, after = cluster_of(groups, losses)
    policy = Policy(
        redundancy=REDUNDANCY,
        pieces_per_shard=MICROBATCHES // size,
        exact_share=cost / size,
        steps=steps,
        restart_after=after,
    )
    return Case(cluster, policy)


def figures_of(groups: int, losses: str, steps: int) -> tuple[ClusterFigures, int | None]:
    """The same cluster as the tuner has it."""
    cluster, after = cluster_of(groups, losses)
    found = ClusterFigures(
        gpus=groups * GPUS_OF_A_GROUP,
        gpus_per_group=GPUS_OF_A_GROUP,
        mtbf_s=cluster.mtbf_s,
        restart_s=cluster.restart_s,
        save_s=cluster.save_s,
        compute_s=cluster.compute_s,
        reduce_s=cluster.reduce_s,
        weibull_shape=cluster.weibull_shape,
        rejoin_s=cluster.rejoin_s,
        steps=steps,
    )
    return found, after


def main() -> None:
    parser = options(__doc__, trials=2)
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--costs", type=float, nargs="+", default=COSTS)
    args = parser.parse_args()
    kinds = [(groups, losses, cost) for groups in args.groups for losses in LOSSES for cost in args.costs]
    found = outcomes(args, [case_of(*kind, size, args.steps) for kind in kinds for size in SIZES])
    if found is None:
        return
    rows: list[dict[str, object]] = []
    for number, (groups, losses, cost) in enumerate(kinds):
        trials = found[0][number * len(SIZES) : (number + 1) * len(SIZES)]
        ratios = dict(zip(SIZES, map(mean_ratio, trials), strict=True))
        cluster, after = figures_of(groups, losses, args.steps)

        def share(size: int, cost: float = cost) -> float:
            return cost / size

        auto = with_figures(cluster, REDUNDANCY, [MICROBATCHES], share, after).microbatches
        default = without_figures([MICROBATCHES], share).microbatches
        best = min(ratios.values())
        rows.append(
            {
                "groups": groups,
                "losses": losses,
                "cost": round(cost, 4),
                **{f"at_{size}": ratio for size, ratio in ratios.items()},
                **{
                    f"step_time_at_{size}": step_time(cluster, REDUNDANCY, MICROBATCHES // size, cost / size, after)
                    for size in SIZES
                },
                "auto": auto,
                "auto_off_percent": 100 * (ratios[auto] / best - 1),
                "default": default,
                "default_off_percent": 100 * (ratios[default] / best - 1),
            }
        )
    report("piece_size", {"microbatches": MICROBATCHES, "redundancy": REDUNDANCY, **found[1]}, rows, args.json)


if __name__ == "__main__":
    main()
