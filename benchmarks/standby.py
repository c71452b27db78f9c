"""Measures how long a job is short of a group that is killed: with a standby, with one and relief, without.

    python benchmarks/standby.py [--kills 4] [--models toy megatron] [--ways standby relieved nothing]
        [--piece-s 0.0625]

Each job loses a whole group to SIGKILL, again and again, when what waits for a place has come so far. Full strength is
the beginning of the first step in which every group computes; ``first_step_over_usual`` is the length of that step over
that of a step before the loss. *Relieved* is a job with a standby and ``--spare-relief``, in which a group that has
come gets pieces of the step that begins; otherwise of the next one. The toy's pieces sleep, so two cores are not what
is measured there; the Megatron job is a small GPT of PP2. Times are those of the signal and of the journal's records.
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
from benchmarks._returns import commits, reports, status, until_whole, views
from benchmarks.masked_failure import FLAGS
from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.messages import CaughtUp, Hello, Ready, SendCommit, Vote
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests.process.harness import RESTARTS, TOY, Job, launch
from tests.process.returning import records

GROUPS, SIZE, PIECES = 3, 2, 8
STANDBY = ("--spare-standby-groups", "1")
WAYS = {"standby": STANDBY, "relieved": STANDBY, "nothing": ()}
WAITING = {"standby": SIZE, "relieved": SIZE, "nothing": 0}
"""How many processes wait."""
RELIEF = {"toy": ("--joins", "--ahead", "2"), "megatron": ("--spare-schedule", "tickets", "--spare-relief")}
STEPS_BETWEEN = 5
PARTS = ("hello", "ready", "offer", "state", "member", "full")
"""What is waited for, each from the one before; the first from the signal."""


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["toy", "megatron"], choices=("toy", "megatron"))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--piece-s", type=float, default=0.0625, help="of the toy, on each of two ranks")
    options = parser.parse_args()
    rows = []
    for model, way in itertools.product(options.models, options.ways):
        with tempfile.TemporaryDirectory() as scratch:
            found = _job(Path(scratch), model, way, options)
        rows.append(_row(model, way, found))
        print(rows[-1], flush=True)
    report("standby", {**vars(options), "groups": GROUPS, "group_size": SIZE, "flags": " ".join(FLAGS)}, rows)


def _row(model: str, way: str, found: list[dict[str, float]]) -> dict[str, object]:
    whole = [one["whole_s"] for one in found]
    return {
        "model": model,
        "way": way,
        "kills": len(found),
        "full_strength_median_s": round(statistics.median(whole), 3),
        "min_s": round(min(whole), 3),
        "max_s": round(max(whole), 3),
        "steps_median": statistics.median(one["steps"] for one in found),
        "step_s": round(statistics.median(one["step_s"] for one in found), 3),
        "first_step_over_usual": round(statistics.median(one["over"] for one in found), 3),
        **{f"to_{part}_s": round(statistics.median(one[part] for one in found), 3) for part in PARTS},
    }


def _job(run_dir: Path, model: str, way: str, options: argparse.Namespace) -> list[dict[str, float]]:
    words = (RESTARTS, "1000", "--spare-group-restart-pause-s", "0", *WAYS[way])
    words += RELIEF[model] if way == "relieved" else ()
    environ = {"TORCHDYNAMO_DISABLE": "1"}
    if model == "toy":
        toy = ("--steps", "100000", "--pieces", str(PIECES), "--piece-s", str(options.piece_s), "--redundancy", "3")
        job = launch(run_dir, *toy, *words, groups=GROUPS, group_size=SIZE, script=TOY)
    else:
        flags = (*FLAGS, "--spare-redundancy", "3", "--global-batch-size", "12", "--train-iters", "100000")
        job = launch(run_dir, *flags, *words, groups=GROUPS, group_size=None, script="pretrain_gpt.py", environ=environ)
    found = []
    try:
        for kill in range(options.kills):
            _until_waiting(job, WAITING[way])
            found.append(_kill(job, kill % GROUPS))
            print(f"{model}, {way}: full strength after {found[-1]['whole_s']:.2f} s", flush=True)
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE)
    finally:
        job.end()
    return found


def _until_waiting(job: Job, count: int) -> None:
    """Until so many processes wait for a place."""
    run_dir = RunDirectory(job.run_dir)

    def wait() -> bool:
        listed = (glance(run_dir.processes) or {}).get("waiting", ())
        return sum(run_dir.waits(one["name"], one["pid"]) for one in listed) >= count

    job.wait_for("who waits for a place", wait, 300.0)


def _kill(job: Job, group: int) -> dict[str, float]:
    """Kill a group of a job that is whole; returns the seconds of each part."""
    until_whole(job, GROUPS, STEPS_BETWEEN)
    me = group, status(job)["live"][str(group)] + 1
    seen = len(records(job))
    killed_s = time.time()
    job.kill(*job.pids(group))
    until_whole(job, GROUPS, 2, me)
    return _parts(records(job), seen, me, killed_s)


def _parts(every: list[Record], seen: int, me: tuple[int, int], killed_s: float) -> dict[str, float]:
    after = every[seen:]

    def first(true: Callable[[Record], bool]) -> Record:
        return next(record for record in after if true(record))

    member_s = first(lambda r: any(view.is_member for view in views(r, me))).time_unix_s
    masked = first(lambda r: commits(r) and r.time_unix_s > killed_s)
    full, ended = _first_whole_step(after)
    before = [r.time_unix_s for r in every[:seen] if commits(r)][-STEPS_BETWEEN:]
    at_s = {
        "hello": first(lambda r: reports(r, Hello, me)).time_unix_s,
        "ready": first(lambda r: reports(r, Ready, me)).time_unix_s,
        "offer": first(lambda r: any(view.offer is not None for view in views(r, me))).time_unix_s,
        "state": first(lambda r: reports(r, CaughtUp, me)).time_unix_s,
        "member": member_s,
        "full": full.time_unix_s,
    }
    ends = [killed_s, *(at_s[part] for part in PARTS)]
    found: dict[str, Any] = {
        part: to_s - from_s for part, (from_s, to_s) in zip(PARTS, itertools.pairwise(ends), strict=True)
    }
    step_s = statistics.median(to_s - from_s for from_s, to_s in itertools.pairwise(before))
    return {
        **found,
        "whole_s": ends[-1] - killed_s,
        "steps": _step(full) - _step(masked),
        "step_s": step_s,
        "over": (ended.time_unix_s - full.time_unix_s) / step_s,
    }


def _first_whole_step(after: list[Record]) -> tuple[Record, Record]:
    """The records at which the first step begins and ends to which all groups give pieces, behind one to which some did
    not."""
    computed, short, begun = dict[tuple[int, int], set[int]](), False, after[0]
    for record in after:
        if isinstance(record.event, Vote) and record.event.result.pieces:
            computed.setdefault(record.event.result.at, set()).add(record.event.group)
        for action in record.actions:
            if isinstance(action, SendCommit):
                whole = len(computed[action.step, action.epoch]) == GROUPS
                if whole and short:
                    return begun, record
                short, begun = short or not whole, record
    raise AssertionError("the job did not come to full strength")


def _step(record: Record) -> int:
    return next(action.step for action in record.actions if isinstance(action, SendCommit))


if __name__ == "__main__":
    main()
