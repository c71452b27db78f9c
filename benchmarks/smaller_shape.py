"""Measures what it costs that a group comes back in a smaller shape, beside a return in its home shape.

    python benchmarks/smaller_shape.py [--cycles 10] [--seed 1]

One Megatron job of 3 groups x PP2 with exact sums and --spare-shapes auto goes through cycles of four changes, while
the health check of group 2 says for how many ranks its host is fit:

- group 2 is killed and comes back in its home shape;
- its host is fit for one rank only: it is killed and comes back with one pipeline stage;
- group 1 is killed while group 2 has one stage, and comes back: each rank of it is in one row of group 2's rank;
- the host is fit again: group 2 leaves with a commit and comes back in its home shape.

``next_commit_s`` is from the signal to the commit of the step in flight by the others; ``rebuild_s`` is what the
slowest rank needs until its rings stand without the lost group, ``formed_s`` both the agreement and that, as
metrics.jsonl has them; ``first_own_s`` is from the signal (in the last change, from the moment when the host is fit) to
the first commit of a step with pieces of the group that came back, ``away_s`` from its last commit before to that one.
The pauses between restarts are 0.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._returns import commits, status, until_whole, views
from benchmarks.masked_failure import FLAGS
from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.messages import Vote
from tests.process.harness import RESTARTS, Job, launch
from tests.process.returning import records

GROUPS, BETWEEN = 3, 4
WORDS = (
    *(*FLAGS, "--global-batch-size", "12", "--spare-redundancy", "3", "--train-iters", "100000"),
    *("--spare-reduce", "exact", "--spare-piece-microbatches", "1", "--spare-group-restart-pause-s", "0"),
    *("--spare-shapes", "auto", "--save-interval", "100000", RESTARTS, "1000"),
)
CHANGES = ("home", "smaller", "home beside a smaller one", "way home")
PARTS = ("next_commit_s", "rebuild_s", "formed_s", "first_own_s", "away_s")


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = _job(Path(scratch), random.Random(options.seed), options.cycles)
    rows = [_row(change, part, [one[part] for one in found[change]]) for change in CHANGES for part in PARTS]
    config = {"flags": " ".join(WORDS), "groups": GROUPS, "cycles": options.cycles, "seed": options.seed}
    report("smaller_shape", config, [row for row in rows if row is not None])


def _row(change: str, part: str, values: list[float | None]) -> dict[str, object] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    median, least, most = (round(of(known), 3) for of in (statistics.median, min, max))
    return {"change": change, "part": part, "median": median, "min": least, "max": most, "times": len(known)}


def _job(scratch: Path, draw: random.Random, cycles: int) -> dict[str, list[dict[str, float | None]]]:
    fit = scratch / "fit"
    fit.touch()
    check = f'[ -e {fit} ] || [ "$SPARE_GROUP" != 2 ] || [ "$SPARE_GROUP_SIZE" = 1 ]'
    words = (*WORDS, "--spare-health-check", check, "--save", str(scratch / "save"))
    environ = {"TORCHDYNAMO_DISABLE": "1"}
    job = launch(scratch / "run", *words, groups=GROUPS, group_size=None, script="pretrain_gpt.py", environ=environ)
    found: dict[str, list[dict[str, float | None]]] = {change: [] for change in CHANGES}
    try:
        for cycle in range(cycles):
            found["home"].append(_kill(job, 2, draw))
            fit.unlink()
            found["smaller"].append(_kill(job, 2, draw))
            found["home beside a smaller one"].append(_kill(job, 1, draw))
            found["way home"].append(_go_home(job, 2, fit))
            times = ", ".join(f"{change} {found[change][-1]['first_own_s']:.1f} s" for change in CHANGES)
            print(f"cycle {cycle + 1} of {cycles}: {times}", flush=True)
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE)
    finally:
        job.end()
    return found


def _kill(job: Job, group: int, draw: random.Random) -> dict[str, float | None]:
    until_whole(job, GROUPS, BETWEEN)
    time.sleep(draw.uniform(0, 0.4))
    member = group, status(job)["live"][str(group)] + 1
    began_s = time.time()
    job.kill(*job.pids(group))
    until_whole(job, GROUPS, 3, member)
    return _parts(job, member, began_s)


def _go_home(job: Job, group: int, fit: Path) -> dict[str, float | None]:
    until_whole(job, GROUPS, BETWEEN)
    member = group, status(job)["live"][str(group)] + 1
    began_s = time.time()
    fit.touch()
    until_whole(job, GROUPS, 3, member)
    return {**_parts(job, member, began_s), "next_commit_s": None}


def _parts(job: Job, member: tuple[int, int], began_s: float) -> dict[str, float | None]:
    """The times of a change in which ``member`` = (group, incarnation) came back."""
    group = member[0]
    every = records(job)
    steps = [record for record in every if commits(record)]
    joined_s = next(r.time_unix_s for r in every if any(view.is_member for view in views(r, member)))
    mine = _steps_with_pieces(every, group)
    own_s = next(r.time_unix_s for r in steps if r.time_unix_s >= joined_s and r.event.result.step in mine)
    last_s = max(r.time_unix_s for r in steps if r.time_unix_s < joined_s and r.event.result.step in mine)
    after = [line for line in job.metrics if line["time_unix_s"] >= began_s]
    lost = next((one["recovery"] for one in after if group in (one["recovery"] or {}).get("lost_groups", ())), {})
    return {
        "next_commit_s": next(r.time_unix_s for r in steps if r.time_unix_s >= began_s) - began_s,
        "rebuild_s": lost.get("rebuild_s"),
        "formed_s": lost.get("formed_s"),
        "first_own_s": own_s - began_s,
        "away_s": own_s - last_s,
    }


def _steps_with_pieces(every: list[Record], group: int) -> set[int]:
    """The steps in which a group has voted pieces."""
    votes = (record.event for record in every if isinstance(record.event, Vote))
    return {vote.result.step for vote in votes if vote.group == group and vote.result.pieces}


if __name__ == "__main__":
    main()
