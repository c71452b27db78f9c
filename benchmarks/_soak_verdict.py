"""Judges a soaked job by what it left: its journal, the weights of every step, its checkpoint, its processes and files.

Each check returns sentences that say what is not as it should be; none where all is well.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._soak_samples import Growth
from benchmarks._soaked_job import Soak
from spare_megatron.checkpoint.folder import PARTIAL, iteration_name, iterations, last_good, step_of
from spare_megatron.coordinator import journal
from spare_megatron.protocol.invariants import check
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Decision, Lost, SendFenced
from tests.process.harness import Job
from tests.process.returning import voted

SHOWN = 5
"""So many of many equal faults are named."""
FAILURE_FREE_S = 3600.0
TORCH_CACHE = f"torchinductor_{getpass.getuser()}"
"""A folder for whatever torch compiles, which it makes when it is imported; nothing is compiled here."""
MOST_GROWTH = {"descriptors": 0.2, "threads": 0.1, "rss_mib": 1.0}
"""For each return of a group, of one process."""
RETURNS = 10
"""Fewer say nothing about growth: what a process holds goes up and down by a few with the groups that learn."""


def judge(soak: Soak, growths: list[Growth], announce: Callable[[str], None]) -> list[str]:
    """Everything that is wrong with a soaked job that has ended; runs the failure-free job."""
    path = soak.run_dir / "journal.jsonl"
    found = [*_left_behind(soak), *_grown(growths), *_job_attempts(soak)]
    try:
        journal.verify(path)
        found += _replayed(path, soak.strikes.hurt | soak.strikes.ends)
    except (AssertionError, journal.JournalError) as error:
        return [*found, f"the journal is wrong: {error}"]
    ours = voted(soak.job)
    steps = max(ours)
    announce(f"the failure-free run of {steps} steps")
    failure_free = soak.model.failure_free(soak.run_dir / "calm", steps)
    failure_free.finish(timeout_s=FAILURE_FREE_S)
    return [*found, *_weights(ours, voted(failure_free)), *_checkpoints(soak, failure_free, steps)]


def _replayed(path: Path, hurt: set[tuple[int, int]]) -> Iterator[str]:
    """Replays all parts: invariants, the order of commits, and that nobody is lost whom no fault had struck."""
    twice: list[str] = []
    innocent: list[str] = []

    def observe(record: journal.Record, before: State, decision: Decision, after: State) -> None:
        check(before, record.event, after, decision)
        gone = [(one.group, one.incarnation, one.cause) for one in getattr(record.event, "losses", ())]
        fences = [a for a in decision.actions if isinstance(a, SendFenced) and a.group not in before.drained]
        gone += [(a.group, a.incarnation, a.reason) for a in fences]
        for group, incarnation, why in gone:
            if (group, incarnation) not in hurt and (isinstance(record.event, Lost) or incarnation >= 0):
                innocent.append(f"record {record.n}: group {group}, incarnation {incarnation}: {why}")
        if after.job_attempt == before.job_attempt and after.committed[0] not in (
            before.committed[0],
            before.committed[0] + 1,
        ):
            twice.append(f"record {record.n}: step {after.committed[0]} follows {before.committed[0]}")

    journal.replay(path, observe)
    yield from _some("steps were not committed one after the other", twice)
    yield from _some("groups were lost that no fault had struck", innocent)


def _job_attempts(soak: Soak) -> Iterator[str]:
    summary: dict[str, Any] = json.loads((soak.run_dir / "summary.json").read_text())
    if summary["lives"] != 1:
        yield f"the job had {summary['lives']} attempts: a wipe-out, although unhurt groups hosted all shards"
    if summary["outcome"] != "left":
        yield f"the job ended as {summary['outcome']}: {summary['reason']}"


def _weights(ours: dict[int, set[str]], failure_free: dict[int, set[str]]) -> Iterator[str]:
    """Every group had the weights of the failure-free run, after every step."""
    missing = [str(step) for step in range(1, max(ours) + 1) if step not in ours]
    yield from _some("the weights of steps were never voted", missing)
    unlike = [str(step) for step, digests in sorted(ours.items()) if digests != failure_free.get(step)]
    yield from _some("weights differ from those of the failure-free run after steps", unlike)


def _checkpoints(soak: Soak, failure_free: Job, steps: int) -> Iterator[str]:
    """The last checkpoint is that of the last step, and the failure-free run's: weights and optimizer state."""
    ours, passed = last_good(soak.run_dir / "save")
    other, _ = last_good(failure_free.run_dir / "save")
    for damage in passed:
        yield f"checkpoint {damage.directory} is damaged: {damage.reason}"
    if ours is None or other is None or {step_of(ours), step_of(other)} != {steps}:
        yield f"the last checkpoints are {ours} and {other}, not those of step {steps}"
        return
    yield from _some("the last checkpoint differs from the failure-free run's", soak.model.differences(ours, other))


def _left_behind(soak: Soak) -> Iterator[str]:
    """No process, no listening port, no temporary file is left."""
    yield from _some("processes are left", soak.samples.left())
    if soak.weather is None:  # else they were in a network of the job's own, which is gone with them
        yield from _some("ports are left", soak.samples.left_ports())
    files = [path for path in soak.scratch.rglob("*") if path.name != TORCH_CACHE or any(path.iterdir())]
    yield from _some("temporary files are left", sorted(map(str, files)))
    save = soak.run_dir / "save"
    published = {save / iteration_name(step) for step in iterations(save)}  # torch_dist has a file of such a name
    scratch = [path for path in soak.run_dir.rglob(".*") if not {soak.scratch, *published} & set(path.parents)]
    yield from _some("unfinished files are left", sorted(map(str, scratch)))
    yield from _some("unpublished checkpoints are left", sorted(map(str, (save / PARTIAL).glob("*"))))


def _grown(growths: list[Growth]) -> Iterator[str]:
    for one in growths:
        limit = MOST_GROWTH.get(one.held)
        if limit is not None and one.returns >= RETURNS and one.per_return is not None and one.per_return > limit:
            yield f"{one.kind}: {one.per_return:.2f} {one.held} more with each return of a group"


def _some(what: str, found: list[str]) -> Iterator[str]:
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        yield f"{what}: {'; '.join(found[:SHOWN])}{more}"
