"""Measures what groups cost that are slow in all steps, with relief alone and with shares by speed, in played steps.

    python benchmarks/lasting_slowness.py [--steps 20] [--json FILE]

Each step draws the paces of N groups (seed 0) and is played with the functions that decide in a job, as in
``relief_model.py``. In ``failure_free_pieces`` nobody is slow. Else three groups, drawn once, take twice as long for a
piece: ``cost_relieved`` is by how much longer the steps are than the failure-free ones, where every group begins with
its own shard and the slow ones are relieved in each step; ``cost_by_speed`` where the steady-state assignment is drawn
for their slowness (protocol.speeds) and relief has only the rest. ``ideal_cost`` is that of pieces which can be divided
at will.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks.relief_model import played_s
from spare_megatron.placement import build_placement
from spare_megatron.protocol.assign import WipeOut, assign, first_assignment
from spare_megatron.protocol.assign_types import USUAL

REDUNDANCY, PIECES, JITTER, SLOW = 6, 64, 0.05, 3


def compared(groups: int, steps: int) -> dict[str, float]:
    """The means of some steps."""
    draws, where = np.random.default_rng(0), build_placement(groups, REDUNDANCY)
    who = draws.choice(groups, SLOW, replace=False).tolist()
    first = first_assignment(where, PIECES, "microbatch")
    by_speed = assign(where, range(groups), PIECES, "microbatch", first, dict.fromkeys(who, 2 * USUAL))
    assert not isinstance(by_speed, WipeOut)
    failure_free, relieved, shared = list[float](), list[float](), list[float]()
    for _ in range(steps):
        per_piece = np.maximum(1 + JITTER * draws.standard_normal(groups), 0.3)
        failure_free.append(played_s(per_piece, where, first))
        per_piece[who] *= 2
        relieved.append(played_s(per_piece, where, first))
        shared.append(played_s(per_piece, where, by_speed))
    return {
        "calm_pieces": fmean(failure_free),
        "cost_relieved": fmean(relieved) / fmean(failure_free) - 1,
        "cost_by_speed": fmean(shared) / fmean(failure_free) - 1,
        "ideal_cost": groups / (groups - SLOW / 2) - 1,
    }


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [{"groups": groups, **compared(groups, args.steps)} for groups in (200, 600, 1000)]
    known = {"redundancy": REDUNDANCY, "pieces": PIECES, "jitter": JITTER, "slow": SLOW}
    report("lasting_slowness", {"steps": args.steps, "seed": 0, **known}, rows, args.json)


if __name__ == "__main__":
    main()
