"""Measures what a killed group costs until the job is whole again, and its parts.

    python benchmarks/recovery.py [--kills 10] [--seed 1] [--state-copies 4 2]

One Megatron job of 4 groups x PP2 loses a whole group to SIGKILL inside a step, again and again: the loss is masked,
spare-launch starts the group again, living groups bring it up to date, it joins and computes pieces; then the next one
is killed. Times are those of the signal, of the processes, of the journal's records, and what the ranks report of their
start in their logs. The pauses between restarts are 0, as each group is killed several times.

``--state-copies`` takes several numbers of copies of the optimizer's state (4: every group keeps all). Their jobs run
in turns, two kills each. Where a group keeps only a part it becomes a member first (``offer``) and then gets what it
lacks (``transfer``); ``level`` is the time from full strength until shards have moved, so that all keep as many, and
the config has how long steps take meanwhile, over those before the kill.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._returns import LIMIT_S, commits, reports, status, until_started, until_whole, views
from benchmarks.masked_failure import FLAGS, GROUPS
from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.messages import CaughtUp, Hello, Ready, View, Vote
from spare_megatron.runtime.steady_clock import process_age_s
from tests.process.harness import RESTARTS, Job, launch
from tests.process.returning import records

KILLS_PER_JOB = 2
"""Where jobs take turns."""
BETWEEN = 5
"""Steps of the whole job between a return and the next kill."""
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
LEVEL = ("level", "until state shards have moved to it")
STARTED = re.compile(r"this rank has started in [\d.]+ s: (.*)")


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state-copies", type=int, nargs="+", default=[GROUPS], help="copies of each state shard")
    parser.add_argument("--json", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    alone, numbers = options.state_copies == [GROUPS], list(options.state_copies)
    per_job = options.kills if alone else min(KILLS_PER_JOB, options.kills)
    found: dict[int, list[dict[str, float]]] = {copies: [] for copies in options.state_copies}
    draws = {copies: random.Random(options.seed) for copies in found}
    while len(found[numbers[0]]) < options.kills:
        for copies in numbers:
            with tempfile.TemporaryDirectory() as scratch:
                found[copies] += _job(Path(scratch), draws[copies], per_job, copies)
        numbers.reverse()
    rows = []
    for copies, kills in found.items():
        known = {} if alone else {"state_copies": copies}
        parts = PARTS if copies == GROUPS else (*PARTS, LEVEL)
        rows += [{**known, **_row(part, why, [one[part] for one in kills])} for part, why in parts]
    steps = [one["steps"] for kills in found.values() for one in kills]
    config = {"flags": " ".join(FLAGS), "kills": len(found[numbers[0]]), "seed": options.seed}
    config["median_steps_until_whole"] = statistics.median(steps)
    moving = [one["moving_by_before"] for kills in found.values() for one in kills if "moving_by_before" in one]
    if moving:
        config["median_step_while_shards_move_by_before"] = round(statistics.median(moving), 3)
    report("recovery" if alone else "recovery_state", config, rows, options.json)


def _row(part: str, why: str, values: list[float]) -> dict[str, object]:
    return {
        "part": part,
        "median_s": round(statistics.median(values), 3),
        "min_s": round(min(values), 3),
        "max_s": round(max(values), 3),
        "what": why,
    }


def _job(run_dir: Path, draw: random.Random, kills: int, copies: int) -> list[dict[str, float]]:
    words = (*FLAGS, "--train-iters", "100000", RESTARTS, "1000", "--spare-group-restart-pause-s", "0")
    words += ("--spare-state-redundancy", f"{copies}") if copies < GROUPS else ()
    environ = {"TORCHDYNAMO_DISABLE": "1"}
    job = launch(run_dir, *words, groups=GROUPS, group_size=None, script="pretrain_gpt.py", environ=environ)
    found = []
    try:
        for kill in range(kills):
            found.append(_kill(job, draw.randrange(GROUPS), draw, copies))
            print(f"kill {kill + 1} of {kills}: whole again after {found[-1]['whole again']:.1f} s", flush=True)
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE)
    finally:
        job.end()
    return found


def _kill(job: Job, group: int, draw: random.Random, copies: int) -> dict[str, float]:
    """Kill ``group`` when the job has trained whole for some steps; returns the seconds of each part."""
    until_whole(job, GROUPS, BETWEEN)
    time.sleep(draw.uniform(0, 0.4))
    member = group, status(job)["live"][str(group)] + 1
    seen = len(records(job))
    killed_s = time.time()
    job.kill(*job.pids(group))
    until_started(job, member)
    began_s = time.time() - max(map(process_age_s, job.pids(group)))
    until_whole(job, GROUPS, 3, member)
    if copies < GROUPS:
        job.wait_for("level copies", lambda: _kept(status(job)["state_copies"]["hosts"].values()) == {copies}, LIMIT_S)
    log = next((job.run_dir / "logs" / f"group-{group}").glob(f"rank-0.incarnation-{member[1]}.log")).read_text()
    there = records(job)
    found = _parts(there[seen:], member, killed_s, began_s, log, copies)
    if copies < GROUPS:
        found["moving_by_before"] = _steps_while_moving(there, killed_s, found)
    return found


def _steps_while_moving(there: list[Record], killed_s: float, found: Mapping[str, float]) -> float:
    """The mean time of a step while shards move to the group that is back, over the median before the kill."""
    made = [record.time_unix_s for record in there if commits(record)]
    before = [late - early for early, late in itertools.pairwise([at_s for at_s in made if at_s < killed_s][-BETWEEN:])]
    began_s = killed_s + found["whole again"]
    moving = [at_s for at_s in made if began_s <= at_s <= began_s + found["level"]]
    return (moving[-1] - moving[0]) / (len(moving) - 1) / statistics.median(before)


def _kept(hosts: Iterable[Iterable[int]]) -> set[int]:
    """How many shards groups keep, of the groups that count for each shard."""
    counts = Counter(itertools.chain.from_iterable(hosts))
    return {counts[group] for group in range(GROUPS)}


def _is_level(view: View, copies: int) -> bool:
    of_shards: dict[int, list[int]] = {}
    for host in view.state_hosts:
        if host.counts:
            of_shards.setdefault(host.shard, []).append(host.group)
    return _kept(of_shards.values()) == {copies}


def _parts(
    after: list[Record], me: tuple[int, int], killed_s: float, began_s: float, log: str, copies: int
) -> dict[str, float]:
    def first(true: Callable[[Record], bool]) -> Record:
        return next(record for record in after if true(record))

    def of_me(kind: type) -> Record:
        return first(lambda r: reports(r, kind, me))

    def viewed(true: Callable[[View], bool]) -> Record:
        return first(lambda r: any(map(true, views(r, me))))

    def commit_after(at_s: float, own: bool) -> Record:
        return first(lambda r: r.time_unix_s >= at_s and commits(r) and (not own or me[0] in _with_pieces(after, r)))

    masked = commit_after(killed_s, own=False)
    hello, ready, state, joined = of_me(Hello), of_me(Ready), of_me(CaughtUp), viewed(lambda view: view.is_member)
    divided = copies < GROUPS
    offered = joined if divided else viewed(lambda view: view.offer is not None)
    holds_s = max(joined.time_unix_s, state.time_unix_s)
    own = commit_after(holds_s, own=True)
    level = viewed(lambda view: view.is_member and _is_level(view, copies)) if divided else own
    reported = STARTED.search(log)
    assert reported is not None, "the rank has reported how it started"
    start = {part.rpartition(" ")[0]: float(part.rpartition(" ")[2]) for part in reported[1].split(", ")}
    return {
        **start,
        "next commit": masked.time_unix_s - killed_s,
        "decision and check": began_s - killed_s,
        "piece for nothing": ready.time_unix_s - hello.time_unix_s,
        "offer": offered.time_unix_s - ready.time_unix_s,
        "transfer": state.time_unix_s - offered.time_unix_s,
        "catch-up and proof": holds_s - state.time_unix_s,
        "first own pieces": own.time_unix_s - holds_s,
        "whole again": own.time_unix_s - killed_s,
        "level": level.time_unix_s - own.time_unix_s,
        "steps": own.event.result.step - masked.event.result.step,
    }


def _with_pieces(after: list[Record], committed: Record) -> set[int]:
    """The groups that voted pieces in the step that a record commits."""
    at = committed.event.result.step
    votes = (r.event for r in after if isinstance(r.event, Vote) and r.event.result.step == at)
    return {vote.group for vote in votes if vote.result.pieces}


if __name__ == "__main__":
    main()
