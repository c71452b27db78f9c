"""Measures what the survivors' steps cost while a lost group comes back.

    python benchmarks/return_cost.py [--rounds 3] [--piece-s 0.2] [--state-mib 1]

Pieces that sleep stand for a device's computing, so that two cores are not what is measured; everything else is real:
processes, the ring, the control plane, the copies, the transfer. Each round kills one of four groups twice. The second
restart waits, so that there are steps of three groups in which nothing comes back; then steps in which the group's
processes start, and steps in which it is brought up to date. The transfer is held to a rate at which the state takes
one and a half steps. A result of the toy is half of its state, so each takes three quarters of the step in which the
next one comes, and the group that comes back needs some six steps in all.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._returns import commits, reports, status, until_started, until_whole, views
from spare_megatron.config.exits import ExitCode
from spare_megatron.protocol.messages import CaughtUp, Ready, Vote
from tests.process.harness import RESTARTS, Job, launch
from tests.process.returning import records

GROUPS, SIZE, PIECES, PAUSE_S = 4, 2, 2, 15.0
TRANSFER_STEPS = 1.5
LAYERS = 8


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, GROUPS))
    parser.add_argument("--piece-s", type=float, default=0.2)
    parser.add_argument(
        "--state-mib",
        type=float,
        default=1.0,
        help="weights and momenta of a rank; much more, and the toy computes for longer than its pieces sleep",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rounds = _job(Path(scratch), options)
    rows = [_row(kind, [one[kind] for one in rounds], rounds) for kind in ("alone", "starts", "learns", "whole")]
    own = [one["own"] for one in rounds]
    report("return_cost", {**vars(options), "steps_from_the_transfers_end_to_own_pieces": own}, rows)


def _row(kind: str, times: list[list[float]], rounds: list[dict[str, Any]]) -> dict[str, object]:
    if not all(times):
        raise SystemExit(f"a round has no step in the kind '{kind}'; use a shorter --piece-s than what the steps had")
    ratios = [statistics.median(one[kind]) / statistics.median(one["alone"]) for one in rounds]
    every = [seconds for one in times for seconds in one]
    return {
        "steps": {
            "alone": "of 3 groups, nothing comes back",
            "starts": "of 3 groups, processes start",
            "learns": "of 3 groups, from the offer to the admission",
            "whole": "of 4 groups",
        }[kind],
        "number": len(every),
        "median_s": round(statistics.median(every), 4),
        "max_s": round(max(every), 4),
        "ratio_to_alone": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def _job(run_dir: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    width = int((options.state_mib * 2**20 / 8 / LAYERS) ** 0.5)
    step_s = 3 * options.piece_s
    rate = options.state_mib * 2**20 / 2 / (TRANSFER_STEPS * step_s)  # two donors
    words = ("--steps", "100000", "--pieces", str(PIECES), "--piece-s", str(options.piece_s), "--width", str(width))
    words += ("--redundancy", str(GROUPS), "--layers", str(LAYERS), "--transfer-rate-bytes-s", str(rate))
    words += (RESTARTS, "1000", "--spare-group-restart-pause-s", str(PAUSE_S))
    job = launch(run_dir, *words, groups=GROUPS, group_size=SIZE)
    rounds = []
    try:
        for group in range(1, 1 + options.rounds):
            _kill(job, group)
            rounds.append(_measure(job, group, _kill(job, group)))
            print(f"round {group} of {options.rounds}", flush=True)
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE)
    finally:
        job.end()
    return rounds


def _kill(job: Job, group: int) -> float:
    """Kill a group of a job that is whole, and wait until it is again; returns when its new processes began."""
    until_whole(job, GROUPS, 5)
    member = group, status(job)["live"][str(group)] + 1
    job.kill(*job.pids(group))
    until_started(job, member)
    began_s = time.time()
    until_whole(job, GROUPS, 10, member)
    return began_s


def _measure(job: Job, group: int, began_s: float) -> dict[str, Any]:
    """The seconds of the steps around the newest return of a group."""
    every = records(job)
    me = (group, status(job)["live"][str(group)])
    ended = [(r.time_unix_s, r.event.result.step) for r in every if isinstance(r.event, Vote) and commits(r)]
    times = {step: at_s - before_s for (before_s, _), (at_s, step) in itertools.pairwise(ended)}
    ends = {step: at_s for at_s, step in ended}

    def first(true: Callable[[Any], bool]) -> float:
        return next(record.time_unix_s for record in every if true(record))

    ready_s, state_s = first(lambda r: reports(r, Ready, me)), first(lambda r: reports(r, CaughtUp, me))
    offered_s = first(lambda r: any(view.offer is not None for view in views(r, me)))
    joined_s = first(lambda r: any(view.is_member for view in views(r, me)))
    votes = (r for r in every if reports(r, Vote, me) and r.event.result.pieces)
    own = next(r.event.result.step for r in votes)
    had = max(step for at_s, step in ended if at_s <= state_s)
    lost_s = max(r.time_unix_s for r in every if r.time_unix_s < began_s and _loses(r, group))

    def between(from_s: float, to_s: float) -> list[float]:
        """Of the steps that began and ended in this time."""
        return [seconds for step, seconds in times.items() if from_s <= ends[step] - seconds and ends[step] <= to_s]

    def beside(from_s: float, to_s: float) -> list[float]:
        """Of the steps that had a part of this time, which may be shorter than one."""
        return [seconds for step, seconds in times.items() if ends[step] > from_s and ends[step] - seconds < to_s]

    masked_s = min(at_s for at_s, _ in ended if at_s > lost_s)
    return {
        "alone": between(masked_s, began_s - 1.0),
        "starts": beside(began_s, ready_s),
        "learns": between(offered_s, joined_s),
        "whole": between(ends[own], ends[own] + 8.0),
        "own": own - had,
    }


def _loses(record: Any, group: int) -> bool:
    return any(loss.group == group for loss in getattr(record.event, "losses", ()))


if __name__ == "__main__":
    main()
