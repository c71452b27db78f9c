"""Measures what a patch costs a pipeline: it joins the one that runs, or it is a pipeline of its own.

    python benchmarks/joined_patch.py [--rounds 5] [--piece-s 0.12] [--stages 2 4]

Stages sleep instead of computing, so that two cores are not what is measured; everything else is real: processes, the
programs and their exchanges, the control plane, the ring (tests/process/sleeping_pipeline.py). Of 4 groups with 16
pieces each one is killed when its first stage begins piece 1, 8 or 14 of a step. The survivors have the rest of their
own pieces to compute then, and a third of the lost ones: ``ideal_s`` is that work, with one filling of the pipeline.
``late_s`` is what the step was committed later, counted from the coordinator's first evidence. Each pair of jobs has
one with pauses at once, as megatron-core's schedules need them (``drains``), and one whose pipelines take in tickets
(``joins``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from tests.process.harness import launch

GROUPS, PIECES, STEPS, STRUCK = 4, 16, 6, 4
POINTS = (1, 8, 14)


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--piece-s", type=float, default=0.12, help="of a piece on one stage, forward and backward")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    rows = []
    for stages in options.stages:
        for point in POINTS:
            found: dict[str, list[dict[str, Any]]] = {"drains": [], "joins": []}
            for number in range(options.rounds):
                for kind in found:
                    found[kind].append(_kill(kind, stages, point, options.piece_s))
                print(f"PP{stages} x {GROUPS}, piece {point}: round {number + 1} of {options.rounds}", flush=True)
            rows += [_row(kind, stages, point, kills, options.piece_s) for kind, kills in found.items()]
    report("joined_patch", vars(options), rows)


def _kill(kind: str, stages: int, point: int, piece_s: float) -> dict[str, Any]:
    """One job that loses a group; the recovery of the step."""
    words = ("--steps", str(STEPS), "--pieces", str(PIECES), "--piece-s", str(piece_s), "--redundancy", str(GROUPS))
    words += ("--stages", *(["--joins"] if kind == "joins" else []))
    inject = [f"sigkill:group=2,step={STRUCK},at=forward,n={point}"]
    with tempfile.TemporaryDirectory() as scratch:
        lines = launch(Path(scratch), *words, groups=GROUPS, group_size=stages, inject=inject).finish(timeout_s=180.0)
    [recovery] = [line["recovery"] for line in lines if line["recovery"]]
    return dict(recovery)


def _row(kind: str, stages: int, point: int, kills: list[dict[str, Any]], piece_s: float) -> dict[str, object]:
    shares = -(-PIECES // (GROUPS - 1))
    ideal_s = (PIECES - point + shares + stages - 1) * piece_s
    late_s = [kill["total_s"] - ideal_s for kill in kills]
    return {
        "shape": f"PP{stages} x {GROUPS}",
        "killed at piece": point,
        "patch": kind,
        "kills": len(kills),
        "ideal_s": round(ideal_s, 4),
        "median_s": round(statistics.median(kill["total_s"] for kill in kills), 4),
        "late_s": round(statistics.median(late_s), 4),
        "late_max_s": round(max(late_s), 4),
        "pieces_joined": statistics.median(kill["pieces_joined"] for kill in kills),
    }


if __name__ == "__main__":
    main()
