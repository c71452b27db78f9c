"""Measures what relief is worth: a group at half speed, and groups whose pace is drawn anew in each step.

    python benchmarks/relieved_group.py [--rounds 2] [--piece-s 0.12] [--stages 2]

Stages sleep instead of computing, so that two cores are not what is measured; everything else is real: processes, the
programs and their exchanges, the control plane, the ring (tests/process/sleeping_pipeline.py). 4 groups with 16 pieces
each; in pairs of jobs one has ``--spare-relief``.

*Half speed*: from step 4 on the pieces of group 2 take twice as long. ``ideal`` is a failure-free step of the same job,
with the 64 pieces shared out by speed. *Jitter*: the pace of each group in each step is drawn with a standard deviation
of 20 %; ``predicted`` is what the simulator's model of relief (simulator/balance.py) makes of the same paces, over what
they take without it, and ``measured`` the same of the two jobs. *Failure-free*: nobody is slow, and pieces take a sixth
as long; what a step takes longer with relief, a median of medians, is what its words cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.placement import build_placement
from spare_megatron.simulator.balance import Completion
from tests.process.harness import launch
from tests.process.sleeping_pipeline import drawn

GROUPS, PIECES, STEPS, SLOW_FROM = 4, 16, 16, 4
JITTER = 0.2
FAILURE_FREE_STEPS, FAILURE_FREE_JOBS = 40, 5


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--piece-s", type=float, default=0.12, help="of a piece on one stage, forward and backward")
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    rows = [_failure_free(options)]
    print(rows[0], flush=True)
    for redundancy in (GROUPS, 2):
        for kind in ("alone", "relieved"):
            jobs = [_steps(kind, redundancy, options, "slow=2x:group=2,step=4") for _ in range(options.rounds)]
            rows.append(_half_speed(kind, redundancy, jobs, options.piece_s))
            print(rows[-1], flush=True)
    for redundancy in (GROUPS, 2):
        found = {
            kind: [_steps(kind, redundancy, options, "", JITTER) for _ in range(options.rounds)]
            for kind in ("alone", "relieved")
        }
        rows.append(_jittered(redundancy, found, options.piece_s, options.stages))
        print(rows[-1], flush=True)
    report("relieved_group", vars(options), rows)


def _failure_free(options: argparse.Namespace) -> dict[str, object]:
    """What relief costs a step in which nobody is slow, in jobs one after the other."""
    short = argparse.Namespace(stages=options.stages, piece_s=options.piece_s / 6)
    took: dict[str, list[float]] = {"alone": [], "relieved": []}
    for _ in range(FAILURE_FREE_JOBS):
        for kind, medians in took.items():
            medians.append(statistics.median(_steps(kind, GROUPS, short, "", steps=FAILURE_FREE_STEPS)[1:]))
    alone_s, relieved_s = (statistics.median(medians) for medians in took.values())
    return {
        "what": "calm",
        "redundancy": GROUPS,
        "kind": "relieved beside alone",
        "alone_s": round(alone_s, 5),
        "relieved_s": round(relieved_s, 5),
        "added_ms": round((relieved_s - alone_s) * 1000, 2),
    }


def _steps(
    kind: str, redundancy: int, options: argparse.Namespace, inject: str, jitter: float = 0.0, steps: int = STEPS
) -> list[float]:
    """The length of each step of one job, in seconds."""
    words = ("--steps", str(steps), "--pieces", str(PIECES), "--piece-s", str(options.piece_s), "--joins", "--stages")
    words += ("--redundancy", str(redundancy), "--jitter", str(jitter), "--heartbeat-s", "4")
    words += ("--ahead", str(options.stages + 1)) if kind == "relieved" else ()
    with tempfile.TemporaryDirectory() as scratch:
        job = launch(Path(scratch), *words, groups=GROUPS, group_size=options.stages, inject=[inject] if inject else [])
        return [line["step_time_s"] for line in job.finish(timeout_s=240.0)]


def _half_speed(kind: str, redundancy: int, jobs: list[list[float]], piece_s: float) -> dict[str, object]:
    failure_free_s = statistics.median(step for job in jobs for step in job[1 : SLOW_FROM - 1])
    ideal_s = failure_free_s + (GROUPS * PIECES / (GROUPS - 0.5) - PIECES) * piece_s
    first_s = statistics.median(job[SLOW_FROM - 1] for job in jobs)
    later = [step for job in jobs for step in job[SLOW_FROM + 1 :]]
    return {
        "what": "one group at half speed",
        "redundancy": redundancy,
        "kind": kind,
        "calm_s": round(failure_free_s, 4),
        "ideal_s": round(ideal_s, 4),
        "first step over ideal": round(first_s / ideal_s, 4),
        "third step on over ideal": round(statistics.median(later) / ideal_s, 4),
        "slowest over ideal": round(max(later) / ideal_s, 4),
    }


def _jittered(redundancy: int, found: dict[str, list[list[float]]], piece_s: float, stages: int) -> dict[str, object]:
    placement, pieces = build_placement(GROUPS, redundancy), np.zeros((redundancy, GROUPS), dtype=np.int64)
    pieces[0] = PIECES
    alive = np.ones(GROUPS, dtype=np.bool_)
    alone, relieved = [], []
    for step in range(2, STEPS + 1):
        paces = np.array([piece_s * drawn(JITTER, group, step) for group in range(GROUPS)])
        alone.append(float(paces.max()) * (PIECES + stages - 1))
        relieved.append(
            Completion(paces * PIECES, paces, alive, pieces, placement, 0.0).time_s() + (stages - 1) * paces.max()
        )
    measured = {kind: statistics.fmean(step for job in jobs for step in job[1:]) for kind, jobs in found.items()}
    return {
        "what": "jitter of 20 % drawn in each step",
        "redundancy": redundancy,
        "kind": "relieved over alone",
        "alone_s": round(measured["alone"], 4),
        "relieved_s": round(measured["relieved"], 4),
        "measured": round(measured["relieved"] / measured["alone"], 4),
        "predicted": round(statistics.fmean(relieved) / statistics.fmean(alone), 4),
    }


if __name__ == "__main__":
    main()
