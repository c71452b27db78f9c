"""Time to train over redundancy and standby groups, with and without adoption of shards that have lost their last host,
by the simulator, which has the real controller; beside it what spare-plan predicts, and the pair that it chooses.

    python benchmarks/adoption_grid.py [--groups N ...] [--redundancy r ...] [--standbys s ...] [--adopt-s S]
                                       [--steps n] [--trials n] [--trials-of-two n] [--workers n] [--resume FILE]

The published cluster (600 GPUs a group, a loss every 300 s); pieces of 1/16 shard; a lost group could take the state
after ``rejoin_s``, which then takes ``transfer_s`` and each result ``result_s``; saves every ``save_interval_s``; means
over the seeds, of which cells with two hosts a shard have more, because a few wipe-outs make their times. Standbys are
groups beyond N: a row's ``time_to_train`` leaves out what they cost.

``choices`` have, for each price of an idle GPU (0: a standby costs nothing, 1: as much as a group that trains), the
pair that spare-plan chooses among as many standbys as the grid has, simulated, and how much more it costs, in percent,
than the best of the grid: time to train times 1 + price * s / N. The goal is 2 at most. In some the redundancy is given
(``GIVEN``), as where groups have no room for more data; then the best of the grid with this redundancy counts.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import mean_ratio, options, outcomes
from spare_megatron.planning.choose import candidate, ratio_of
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.planning.standby_choice import choose_pair
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.policy_trial import TrialResult
from spare_megatron.simulator.trials import Case

PIECES, MTBF_S, SHAPE, RESTART_S, SAVE_S, COMPUTE_S = 16, 300.0, 0.78, 3600.0, 60.0, 64.0
REJOIN_S, TRANSFER_S, RESULT_S, SAVE_INTERVAL_S = 600.0, 300.0, 20.0, 3600.0
PRICES = (0.0, 1.0)
"""What an idle GPU costs, as a share of one that trains."""
GIVEN = (None, 2, 3)
"""Redundancies that are given; None: it is chosen too."""

Cell = tuple[int, int, int, float | None]
"""Groups, redundancy, standby groups, seconds of an adoption."""


def case(cell: Cell, steps: int, jitter: float) -> Case:
    """What is simulated for one cell."""
    groups, redundancy, standbys, adopt_s = cell
    cluster = Cluster(
        groups, reduce_s=groups / 100, rejoin_s=REJOIN_S, transfer_s=TRANSFER_S, result_s=RESULT_S, jitter=jitter
    )
    policy = Policy(
        "microbatch",
        redundancy,
        PIECES,
        steps=steps,
        save_interval_s=SAVE_INTERVAL_S,
        standby_groups=standbys,
        adopt_s=adopt_s,
    )
    return Case(cluster, policy)


def figures(
    groups: int, standbys: int, adopt_s: float | None, price: float, steps: int, jitter: float
) -> ClusterFigures:
    """The same cluster for spare-plan."""
    return ClusterFigures(
        *(groups * 600, 600, MTBF_S, RESTART_S, SAVE_S, COMPUTE_S, groups / 100),
        weibull_shape=SHAPE,
        pieces_per_shard=PIECES,
        rejoin_s=REJOIN_S,
        transfer_s=TRANSFER_S,
        result_s=RESULT_S,
        standby_groups=standbys,
        standby_price=price,
        adopt_s=adopt_s,
        save_interval_s=SAVE_INTERVAL_S,
        jitter=jitter,
        steps=steps,
    )


def row(cell: Cell, trials: list[TrialResult], predicted: float) -> dict[str, object]:
    """One row of the results."""
    groups, redundancy, standbys, adopt_s = cell
    ratio = mean_ratio(trials)
    return {
        "groups": groups,
        "redundancy": redundancy,
        "standbys": standbys,
        "adopt_s": adopt_s,
        "time_to_train": round(ratio, 4),
        "predicted": round(predicted, 4),
        "off_percent": round(100 * (predicted / ratio - 1), 2),
        "wipe_outs": round(fmean(trial.tally.wipe_outs for trial in trials), 1),
        "soft_wipe_outs": round(fmean(trial.tally.soft_wipe_outs for trial in trials), 1),
        "failures": round(fmean(trial.tally.failures for trial in trials)),
    }


def errors(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The mean error of the prediction and the largest in size, signed, for each r with and without adoption."""
    found: list[dict[str, object]] = []
    for redundancy, adopts in sorted({(int(str(one["redundancy"])), one["adopt_s"] is not None) for one in rows}):
        those = [one for one in rows if (one["redundancy"], one["adopt_s"] is not None) == (redundancy, adopts)]
        off = [float(str(one["off_percent"])) for one in those]
        found.append(
            {
                "redundancy": redundancy,
                "adoption": adopts,
                "cells": len(off),
                "mean_off_percent": round(fmean(off), 2),
                "largest_off_percent": max(off, key=abs),
                "wipe_outs": round(sum(float(str(one["wipe_outs"])) for one in those), 1),
            }
        )
    return found


def _worst(choices: list[dict[str, object]]) -> float:
    return max(float(str(one["off_percent"])) for one in choices)


def main() -> None:
    """Print one table, write one JSON."""
    parser = options(__doc__, steps=600, trials=2)
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 600, 1000])
    parser.add_argument("--redundancy", type=int, nargs="+", default=[2, 3, 4, 5, 7, 9, 17])
    parser.add_argument("--standbys", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--adopt-s", type=float, default=120.0, help="seconds in which a shard is opened")
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--trials-of-two", type=int, default=8, help="of cells with two hosts a shard")
    args = parser.parse_args()
    ways = tuple(product(args.groups, (None, args.adopt_s)))
    cells: list[Cell] = [(n, r, s, adopt_s) for n, adopt_s in ways for r in args.redundancy for s in args.standbys]
    chosen: dict[tuple[int, float | None, float, int | None], Cell] = {}
    for (groups, adopt_s), price, given in product(ways, PRICES, GIVEN):
        cluster = figures(groups, 0, adopt_s, price, args.steps, args.jitter)
        pair = choose_pair(cluster, given, max(args.standbys))
        choice = (groups, pair.plan.chosen.redundancy, pair.cluster.standby_groups, adopt_s)
        chosen[groups, adopt_s, price, given] = choice
    every = list(dict.fromkeys([*cells, *chosen.values()]))
    counts = [args.trials_of_two if cell[1] == 2 else args.trials for cell in every]
    found = outcomes(args, [case(cell, args.steps, args.jitter) for cell in every], counts)
    if found is None:
        return
    rows: dict[Cell, dict[str, object]] = {}
    for cell, trials in zip(every, found[0], strict=True):
        predicted = candidate(figures(cell[0], cell[2], cell[3], 1.0, args.steps, args.jitter), cell[1])
        rows[cell] = row(cell, trials, ratio_of(predicted))

    def cost(cell: Cell, price: float) -> float:
        return float(str(rows[cell]["time_to_train"])) * (1 + price * cell[2] / cell[0])

    choices: list[dict[str, object]] = []
    for (groups, adopt_s, price, given), choice in chosen.items():
        those = [cell for cell in cells if (cell[0], cell[3]) == (groups, adopt_s) and given in (None, cell[1])]
        best = min(those, key=lambda cell: cost(cell, price))
        choices.append(
            {
                "groups": groups,
                "adopt_s": adopt_s,
                "price": price,
                "given": given,
                "redundancy": choice[1],
                "standbys": choice[2],
                "cost": round(cost(choice, price), 4),
                "best_redundancy": best[1],
                "best_standbys": best[2],
                "best_cost": round(cost(best, price), 4),
                "off_percent": round(100 * (cost(choice, price) / cost(best, price) - 1), 2),
            }
        )
    config = {
        **found[1],
        **{
            key: getattr(args, key)
            for key in ("groups", "redundancy", "standbys", "adopt_s", "jitter", "trials_of_two")
        },
        "rejoin_s": REJOIN_S,
        "transfer_s": TRANSFER_S,
        "result_s": RESULT_S,
        "save_interval_s": SAVE_INTERVAL_S,
        "choice_off_percent_max": _worst([one for one in choices if one["given"] is None]),
        "given_off_percent_max": _worst([one for one in choices if one["given"] is not None]),
        "choices": choices,
        "errors": errors(list(rows.values())),
    }
    for one in choices:
        print(one)
    report("adoption_grid", config, list(rows.values()), args.json)


if __name__ == "__main__":
    main()
