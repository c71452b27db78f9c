"""Compares the simulator's model of relief (simulator/balance.py) with the decisions that a job makes
(protocol.rebalance).

    python benchmarks/relief_model.py [--steps 20] [--json FILE]

Each step draws the paces of N groups (seed 0), some of which are twice as slow. It is played with the functions that
decide in a job: when the first group has nothing left to begin, ``wanted`` says who is asked for how much, and
``shared_out`` who takes what was given; a second time when the next group runs out. ``model_off_percent`` is how much
longer the model's step is than the played one (mean of the steps); ``gain`` is the played step over the one without
relief.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.placement import Placement, build_placement
from spare_megatron.protocol import rebalance
from spare_megatron.protocol.assign import Assignment, first_assignment
from spare_megatron.protocol.relief import ROUNDS
from spare_megatron.simulator.balance import Completion

CASES = [
    (groups, redundancy, pieces, jitter, slow)
    for groups, redundancy, pieces in ((4, 2, 16), (8, 3, 16), (50, 2, 64), (50, 4, 64), (200, 6, 64))
    for jitter, slow in ((0.05, 0), (0.2, 0), (0.05, max(1, groups // 60)))
]


def played_s(per_piece: NDArray[np.float64], where: Placement, standing: Assignment) -> float:
    """How long the step takes with the decisions of a job, where every group begins with its share of ``standing``."""
    groups, pieces = standing.owner.shape
    table = where.hosts().tolist()
    plans = {group: list(standing.pieces_of(group)) for group in range(groups)}
    free_s, now_s = np.zeros(groups), 0.0

    def hosts(piece: int) -> list[int]:
        return table[piece // pieces]

    for _ in range(ROUNDS):
        now_s = float(min(free_s[g] + len(plans[g]) * per_piece[g] for g in plans))
        for group, plan in plans.items():
            begun = min(len(plan), int(np.ceil(max(0.0, now_s - free_s[group]) / per_piece[group] - 1e-9)))
            free_s[group] = max(free_s[group] + begun * per_piece[group], now_s)
            del plan[:begun]
        paces = {group: (len(plan), float(per_piece[group])) for group, plan in plans.items()}

        def movable(group: int) -> list[int]:
            return rebalance.first_given([plans[group]], pieces)

        asked = rebalance.wanted(paces, movable, hosts)
        given = {group: movable(group)[:count] for group, count in asked.items()}
        if not given:
            break
        for group, some in given.items():
            plans[group] = [piece for piece in plans[group] if piece not in some]
        for group, more in rebalance.shared_out(given, paces, hosts).items():
            plans[group] += more
    return float(max(free_s[g] + len(plans[g]) * per_piece[g] for g in plans))


def compared(groups: int, redundancy: int, pieces: int, jitter: float, slow: int, steps: int) -> dict[str, float]:
    """The means of some steps."""
    draws, where = np.random.default_rng(0), build_placement(groups, redundancy)
    standing = first_assignment(where, pieces, "microbatch")
    alone, model, played = list[float](), list[float](), list[float]()
    for _ in range(steps):
        per_piece = np.maximum(1 + jitter * draws.standard_normal(groups), 0.3)
        per_piece[draws.choice(groups, slow, replace=False)] *= 2
        alone.append(float(per_piece.max()) * pieces)
        everybody = np.ones(groups, dtype=np.bool_)
        model.append(Completion(pieces * per_piece, per_piece, everybody, standing.units, where, 0.0).time_s())
        played.append(played_s(per_piece, where, standing))
    return {
        "gain": fmean(played) / fmean(alone),
        "model_off_percent": 100 * (fmean(model) / fmean(played) - 1),
        "played_pieces": fmean(played),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for groups, redundancy, pieces, jitter, slow in CASES:
        known = {"groups": groups, "redundancy": redundancy, "pieces": pieces, "jitter": jitter, "slow": slow}
        rows.append({**known, **compared(groups, redundancy, pieces, jitter, slow, args.steps)})
    report("relief_model", {"steps": args.steps, "seed": 0}, rows, args.json)


if __name__ == "__main__":
    main()
