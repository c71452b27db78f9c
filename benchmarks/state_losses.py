"""How long jobs last whose groups keep copies of parts of the optimizer's state: the formula beside two simulations.

    python benchmarks/state_losses.py [--chains n]

``by_formula`` is the simulated mean time to a wipe-out, of losses one by one with hosts that the protocol names
(``simulator/state_losses.py``), over that of the formula. ``all_different`` is it over that of the formula in which all
parts have different hosts. Times are in units of the mean time between two losses of one group.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.planning.state_copies import host_sets, seconds_to_wipe_out
from spare_megatron.simulator.state_losses import simulated_wipe_out_s

JOBS = ((4, 2, 1e-3), (5, 2, 1e-3), (8, 2, 1e-3), (16, 2, 1e-3), (8, 3, 1e-3), (16, 3, 1e-3))
"""Groups, copies, and the time of copying."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=2_000, help="of losses, for each job; they take some minutes")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for groups, copies, copying in JOBS:
        found = simulated_wipe_out_s(groups, copies, 1.0, copying, args.chains, seed=0)
        rows.append(
            {
                "groups": groups,
                "copies": copies,
                "copying": copying,
                "host_sets": host_sets(groups, copies),
                "simulated": found,
                "by_formula": found / seconds_to_wipe_out(groups, copies, 1.0, copying),
                "all_different": found / seconds_to_wipe_out(groups, copies, 1.0, copying, sets=groups),
            }
        )
    report("state_losses", {"chains": args.chains}, rows)


if __name__ == "__main__":
    main()
