"""Measures what a killed group costs until the job is whole again, and its parts.

    python benchmarks/recovery.py [--kills 10] [--seed 1]

One Megatron job of 4 groups x PP2 loses a whole group to SIGKILL inside a step, again and again: the loss is masked,
spare-launch starts the group again, living groups bring it up to date, it joins and computes pieces; then the next one
is killed. Times are those of the signal, of the processes, of the journal's records, and what the ranks say of their
start in their logs. The pauses between restarts are 0, as each group is killed several times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from _report import report
from masked_failure import FLAGS, GROUPS, ROOT

from spare_megatron.controller.messages import CaughtUp, Hello, Ready, SendCommit, SendView, Vote
from spare_megatron.coordinator.journal import Record, read

BETWEEN = 5
"""Steps of the whole job between a return and the next kill."""
LIMIT_S = 300.0
"""How long a return may take."""
PARTS = (
    ("next commit", "the step in flight is committed by the others"),
    ("decision and check", "the coordinator is asked, the host is looked at"),
    ("imports and flags", "of a rank"),
    ("world", ""),
    ("model", ""),
    ("checkpoint", "asked for, none is loaded"),
    ("data and engine", ""),
    ("piece for nothing", "from Hello to Ready"),
    ("offer", "until the next commit or epoch"),
    ("transfer", "of the state"),
    ("catch-up and proof", "until a commit admits it"),
    ("first own pieces", "until they are committed: full strength"),
    ("whole again", "from the signal to full strength"),
)
STARTED = re.compile(r"this rank has started in [\d.]+ s: (.*)")


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = _job(Path(scratch), random.Random(options.seed), options.kills)
    rows = [_row(part, why, [one[part] for one in found]) for part, why in PARTS]
    steps = [one["steps"] for one in found]
    config = {"flags": " ".join(FLAGS), "kills": len(found), "seed": options.seed}
    report("recovery", {**config, "median_steps_until_whole": statistics.median(steps)}, rows)


def _row(part: str, why: str, values: list[float]) -> dict[str, object]:
    return {
        "part": part,
        "median_s": round(statistics.median(values), 3),
        "min_s": round(min(values), 3),
        "max_s": round(max(values), 3),
        "what": why,
    }


def _job(run_dir: Path, draw: random.Random, kills: int) -> list[dict[str, float]]:
    command = [
        sys.executable,
        "-m",
        "spare_megatron.cli.launch",
        "--num-groups",
        str(GROUPS),
        "--run-dir",
        str(run_dir),
    ]
    command += ["pretrain_gpt.py", *FLAGS, "--train-iters", "100000", "--spare-max-group-restarts", "1000"]
    command += ["--spare-group-restart-pause-s", "0"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    job, found = _Watched(run_dir, process), []
    try:
        for kill in range(kills):
            found.append(_kill(job, draw.randrange(GROUPS), draw))
            print(f"kill {kill + 1} of {kills}: whole again after {found[-1]['whole again']:.1f} s", flush=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60.0)
    finally:
        process.kill()
        process.wait()
    return found


class _Watched:
    """A running job, and its journal as far as it was read."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir, self.process = run_dir, process

    def records(self) -> list[Record]:
        """The journal by now."""
        path = self.run_dir / "journal.jsonl"
        return list(read(path)) if path.exists() else []

    def status(self) -> dict[str, Any]:
        """Of the coordinator."""
        path = self.run_dir / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {"live": {}, "step": 0}

    def ranks(self, group: int) -> list[dict[str, Any]]:
        """The processes of a group."""
        return [
            rank
            for rank in json.loads((self.run_dir / "processes.json").read_text())["ranks"]
            if rank["group"] == group
        ]

    def until(self, true: Callable[[], bool]) -> None:
        """Poll until ``true()``."""
        deadline_s = time.monotonic() + LIMIT_S
        while not true():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the job has ended ({self.process.poll()}), or does not go on; see {self.run_dir}")
            time.sleep(0.02)


def _kill(job: _Watched, group: int, draw: random.Random) -> dict[str, float]:
    """Kill ``group`` when the job has trained whole for some steps; returns the seconds of each part."""
    job.until(lambda: len(job.status()["live"]) == GROUPS)
    step = job.status()["step"]
    job.until(lambda: job.status()["step"] >= step + BETWEEN)
    time.sleep(draw.uniform(0, 0.4))
    member = (group, job.status()["live"][str(group)] + 1)
    seen = len(job.records())
    killed_s = time.time()
    for rank in job.ranks(group):
        os.kill(rank["pid"], signal.SIGKILL)
    job.until(lambda: any((rank["group"], rank["incarnation"]) == member for rank in job.ranks(group)))
    began_s = min(psutil.Process(rank["pid"]).create_time() for rank in job.ranks(group))
    job.until(lambda: job.status()["live"].get(str(group)) == member[1])
    step = job.status()["step"]
    job.until(lambda: job.status()["step"] >= step + 3)
    records = job.records()[seen:]
    log = next((job.run_dir / "logs" / f"group-{group}").glob(f"rank-0.incarnation-{member[1]}.log")).read_text()
    return _parts(records, member, killed_s, began_s, log)


def _parts(records: list[Record], me: tuple[int, int], killed_s: float, began_s: float, log: str) -> dict[str, float]:
    def first(true: Callable[[Record], bool]) -> Record:
        return next(record for record in records if true(record))

    def of_me(kind: type) -> Record:
        return first(lambda r: isinstance(r.event, kind) and (r.event.group, r.event.incarnation) == me)

    def viewed(true: Callable[[Any], bool]) -> Record:
        return first(
            lambda r: any(isinstance(a, SendView) and a.view.receiver == me and true(a.view) for a in r.actions)
        )

    def commit_after(at_s: float, own: bool) -> Record:
        return first(lambda r: r.time_unix_s >= at_s and _commits(r) and (not own or me[0] in _with_pieces(records, r)))

    masked = commit_after(killed_s, own=False)
    hello, ready, offered = of_me(Hello), of_me(Ready), viewed(lambda view: view.offer is not None)
    state, joined = of_me(CaughtUp), viewed(lambda view: view.is_member)
    own = commit_after(joined.time_unix_s, own=True)
    told = STARTED.search(log)
    assert told is not None, "the rank has said how it started"
    start = {part.rpartition(" ")[0]: float(part.rpartition(" ")[2]) for part in told[1].split(", ")}
    return {
        **start,
        "next commit": masked.time_unix_s - killed_s,
        "decision and check": began_s - killed_s,
        "piece for nothing": ready.time_unix_s - hello.time_unix_s,
        "offer": offered.time_unix_s - ready.time_unix_s,
        "transfer": state.time_unix_s - offered.time_unix_s,
        "catch-up and proof": joined.time_unix_s - state.time_unix_s,
        "first own pieces": own.time_unix_s - joined.time_unix_s,
        "whole again": own.time_unix_s - killed_s,
        "steps": own.event.result.step - masked.event.result.step,
    }


def _commits(record: Record) -> bool:
    return any(isinstance(action, SendCommit) for action in record.actions)


def _with_pieces(records: list[Record], committed: Record) -> set[int]:
    """The groups that voted pieces in the step that a record commits."""
    at = committed.event.result.step
    votes = (r.event for r in records if isinstance(r.event, Vote) and r.event.result.step == at)
    return {vote.group for vote in votes if vote.result.pieces}


if __name__ == "__main__":
    main()
