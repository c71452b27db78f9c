"""Measures what the survivors' steps cost while a lost group comes back.

    python benchmarks/return_cost.py [--rounds 3] [--piece-s 0.2] [--state-mib 64]

Pieces that sleep stand for a device's computing, so that two cores are not what is measured; everything else is real:
processes, the ring, the control plane, the copies, the transfer. Each round kills one of four groups twice. The second
restart waits, so that there are steps of three groups in which nothing comes back; then steps in which the group's
processes start, and steps in which it is brought up to date. The transfer is held to a rate at which the state takes
about five steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import report

from spare_megatron.controller.messages import CaughtUp, Ready, SendCommit, SendView, Vote
from spare_megatron.coordinator.journal import read

ROOT = Path(__file__).resolve().parents[1]
GROUPS, SIZE, PIECES, PAUSE_S = 4, 2, 2, 15.0
TRANSFER_STEPS = 5
LAYERS = 8
LIMIT_S = 240.0


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, GROUPS))
    parser.add_argument("--piece-s", type=float, default=0.2)
    parser.add_argument("--state-mib", type=float, default=64.0, help="weights and momenta of a rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rounds = _job(Path(scratch), options)
    rows = [_row(kind, [one[kind] for one in rounds], rounds) for kind in ("alone", "starts", "learns", "whole")]
    own = [one["own"] for one in rounds]
    report("return_cost", {**vars(options), "steps_from_the_transfers_end_to_own_pieces": own}, rows)


def _row(kind: str, times: list[list[float]], rounds: list[dict[str, Any]]) -> dict[str, object]:
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
    command = [
        sys.executable,
        "-m",
        "spare_megatron.cli.launch",
        "--num-groups",
        str(GROUPS),
        "--group-size",
        str(SIZE),
    ]
    command += ["--run-dir", str(run_dir), "tests/process/toy_train.py", "--steps", "100000", "--pieces", str(PIECES)]
    command += ["--piece-s", str(options.piece_s), "--redundancy", str(GROUPS), "--width", str(width)]
    command += ["--layers", str(LAYERS), "--transfer-rate-bytes-s", str(rate), "--spare-max-group-restarts", "1000"]
    command += ["--spare-group-restart-pause-s", str(PAUSE_S)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    job, rounds = _Watched(run_dir, process), []
    try:
        for group in range(1, 1 + options.rounds):
            _kill(job, group)
            began = _kill(job, group)
            rounds.append(_measure(job, group, began))
            print(f"round {group} of {options.rounds}", flush=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60.0)
    finally:
        process.kill()
        process.wait()
    return rounds


class _Watched:
    """A running job."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir, self.process = run_dir, process

    def file(self, name: str) -> dict[str, Any]:
        """The object in a file of the run directory."""
        path = self.run_dir / name
        return dict(json.loads(path.read_text())) if path.exists() else {"live": {}, "step": 0, "ranks": []}

    def until(self, true: Callable[[], bool]) -> None:
        """Poll until ``true()``."""
        deadline_s = time.monotonic() + LIMIT_S
        while not true():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the job has ended ({self.process.poll()}), or does not go on; see {self.run_dir}")
            time.sleep(0.05)

    def whole(self, steps: int) -> None:
        """Until all groups have trained together for some steps."""
        self.until(lambda: len(self.file("status.json")["live"]) == GROUPS)
        step = self.file("status.json")["step"]
        self.until(lambda: self.file("status.json")["step"] >= step + steps)


def _kill(job: _Watched, group: int) -> float:
    """Kill a group of a job that is whole, and wait until it is again; returns when its new processes began."""
    job.whole(5)
    incarnation = job.file("status.json")["live"][str(group)]
    for rank in job.file("processes.json")["ranks"]:
        if rank["group"] == group:
            os.kill(rank["pid"], signal.SIGKILL)

    def started() -> bool:
        ranks = job.file("processes.json")["ranks"]
        return any((rank["group"], rank["incarnation"]) == (group, incarnation + 1) for rank in ranks)

    job.until(started)
    began_s = time.time()
    job.until(lambda: job.file("status.json")["live"].get(str(group)) == incarnation + 1)
    job.whole(10)
    return began_s


def _measure(job: _Watched, group: int, began_s: float) -> dict[str, Any]:
    """The seconds of the steps around the newest return of a group."""
    records = list(read(job.run_dir / "journal.jsonl"))
    me = (group, job.file("status.json")["live"][str(group)])
    commits = [(r.time_unix_s, r.event.result.step) for r in records if isinstance(r.event, Vote) and _commits(r)]
    times = {step: at_s - before_s for (before_s, _), (at_s, step) in itertools.pairwise(commits)}
    ends = {step: at_s for at_s, step in commits}

    def first(true: Callable[[Any], bool]) -> float:
        return next(record.time_unix_s for record in records if true(record))

    def said(kind: type) -> Callable[[Any], bool]:
        return lambda r: isinstance(r.event, kind) and (r.event.group, r.event.incarnation) == me

    ready_s, state_s = first(said(Ready)), first(said(CaughtUp))
    offered_s = first(lambda r: any(_is_view(a, me) and a.view.offer is not None for a in r.actions))
    joined_s = first(lambda r: any(_is_view(a, me) and a.view.is_member for a in r.actions))
    votes = (r for r in records if said(Vote)(r) and r.event.result.pieces)
    own = next(r.event.result.step for r in votes)
    had = max(step for at_s, step in commits if at_s <= state_s)
    lost_s = max(r.time_unix_s for r in records if r.time_unix_s < began_s and _loses(r, group))

    def between(from_s: float, to_s: float) -> list[float]:
        """Of the steps that began and ended in this time."""
        return [seconds for step, seconds in times.items() if from_s <= ends[step] - seconds and ends[step] <= to_s]

    masked_s = min(at_s for at_s, _ in commits if at_s > lost_s)
    return {
        "alone": between(masked_s, began_s - 1.0),
        "starts": between(began_s, ready_s),
        "learns": between(offered_s, joined_s),
        "whole": between(ends[own], ends[own] + 8.0),
        "own": own - had,
    }


def _commits(record: Any) -> bool:
    return any(isinstance(action, SendCommit) for action in record.actions)


def _is_view(action: Any, me: tuple[int, int]) -> bool:
    return isinstance(action, SendView) and action.view.receiver == me


def _loses(record: Any, group: int) -> bool:
    return any(loss.group == group for loss in getattr(record.event, "losses", ()))


if __name__ == "__main__":
    main()
