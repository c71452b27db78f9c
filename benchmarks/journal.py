"""Measures the journal of a long job: its bytes on the disk, a restart from it, and the replay of all of it.

    python benchmarks/journal.py [--hours 24] [--json FILE]

The real machine decides, the real journal writes and compresses, the coordinator's observers watch; only time is made
up and nothing waits. 1000 groups vote in a random order in each step of 64 s; every five minutes a group dies in the
middle of a step, and comes back two steps later, so that there are two epochs, of 1000 views each, for every death. The
job ends just before a snapshot is due, which is the worst moment for a restart. Goals: restart in 2 s, 300 MB.

``restart_s`` is the median of three, with the files in the page cache; ``verify_s`` is the replay of all parts with
every action compared, the states of all snapshots too. Times of append and decision are CPU time of the one thread, for
all records of a step together.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.coordinator import journal
from spare_megatron.coordinator.job_tuning import JobTuning
from spare_megatron.coordinator.journal import SNAPSHOT_BYTES, Journal, Record, Replayed, resume, verify
from spare_megatron.coordinator.journal_parts import beside
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.placement import build_placement
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.messages import (
    AllHere,
    Applied,
    Decision,
    Event,
    Hello,
    JobSpec,
    Loss,
    Lost,
    Opened,
    ReductionResult,
    Vote,
)

GROUPS = 1000
PIECES_PER_SHARD = 16
REDUNDANCY = 8
STEP_S = 64.0
DEATH_EVERY_S = 300.0
BACK_AFTER_STEPS = 2
SEED = 20_261


class Observers:
    """What the coordinator makes of the records, and a snapshot carries."""

    def __init__(self) -> None:
        self.book, self.tuning = MetricsBook(), JobTuning(started_s=0.0)

    def observe(self, record: Record, before: State, decision: Decision, after: State) -> None:
        """As the coordinator does after each record."""
        self.book.observe(record.time_unix_s, before, record.event, decision, after)
        self.tuning.observe(record.time_unix_s, before, record.event, after)
        self.book.report(after.committed[0], {"lm loss": 2.0})
        self.book.ready()

    def memo(self) -> dict[str, Any]:
        """For a snapshot."""
        return {"book": self.book.memo(), "tuning": self.tuning.memo()}

    def recall(self, memo: Mapping[str, Any]) -> None:
        """From a snapshot."""
        self.book.recall(memo["book"])
        self.tuning.recall(memo["tuning"])


class Coordinator:
    """Decides and writes, as the real one does; ``now_s`` is made up."""

    def __init__(self, path: Path) -> None:
        self.state, self.seen, self.now_s = initial_state(), Observers(), 1.7e9
        self.journal = Journal(path, Replayed(), lambda: self.now_s)
        self.records = self.bytes = 0
        self.decide_s = self.append_s = self.longest_s = 0.0
        self.vote_bytes, self.view_bytes = list[int](), list[int]()

    def decide(self, event: Event) -> None:
        """One event."""
        before, began = self.state, time.thread_time()
        after, decision = step(before, event)
        len(decision.actions)
        decided, there = time.thread_time(), self.journal._end
        record = self.journal.append(event, decision)
        self.state = after
        appended = time.thread_time()
        size = self.journal._end.offset_bytes - there.offset_bytes
        self.seen.observe(record, before, decision, after)
        observed = time.thread_time()
        self.journal.keep(after, self.seen.memo)
        kept = time.thread_time() - observed
        self.records, self.bytes = record.n, self.bytes + size
        self.decide_s += decided - began
        self.append_s += appended - decided + kept
        self.longest_s = max(self.longest_s, appended - decided, kept)
        if isinstance(event, Vote) and not decision.actions:
            self.vote_bytes.append(size)
        elif len(decision.actions) >= GROUPS // 2:
            self.view_bytes.append(size)


def votes(state: State, rng: np.random.Generator) -> Iterator[Vote]:
    """The ok votes of all groups for their plans, in a random order."""
    at = state.step_in_flight
    result, weights = (rng.bytes(16).hex() for _ in range(2))
    groups = list(state.live)
    for index in rng.permutation(len(groups)).tolist():
        group = groups[index]
        pieces = tuple(piece for segment in state.segments_of(group) for piece in segment)
        yield Vote(group, state.live[group], ReductionResult(at, state.epoch, True, pieces, result, weights))


def train(one: Coordinator, hours: float) -> tuple[int, int]:
    """A job of so many hours, and then until a snapshot is almost due; returns the numbers of steps and deaths."""
    journal.NAME_SEEN_S = 0.0  # time is made up
    rng, placement = np.random.default_rng(SEED), build_placement(GROUPS, REDUNDANCY)
    spec = JobSpec(GROUPS, PIECES_PER_SHARD, placement.offsets, "microbatch", 0, 10**9, 1, "f" * 64)
    one.decide(Opened(spec, 1, 1))
    one.decide(AllHere(tuple((group, 0) for group in range(GROUPS))))
    began_s, steps, deaths, gone = one.now_s, 0, 0, list[tuple[int, int, int]]()
    step_bytes, reported_s = 0, one.now_s
    while one.now_s - began_s < hours * 3600 or one.journal._since_bytes + 1.5 * step_bytes < SNAPSHOT_BYTES:
        before = one.bytes
        for number, group, incarnation in [entry for entry in gone if entry[0] <= steps]:
            gone.remove((number, group, incarnation))
            one.decide(Hello(group, incarnation, spec.fingerprint, one.state.committed[0], None, 1))
        one.now_s += STEP_S / 2
        if one.now_s - began_s > (deaths + 1) * DEATH_EVERY_S:
            lose(one, rng, gone, steps)
            deaths += 1
        one.now_s += STEP_S / 2
        for joiner in sorted(one.state.live.keys() - one.state.holders):
            one.decide(Applied(joiner, one.state.live[joiner], one.state.committed[0], one.state.epoch))
        for vote in votes(one.state, rng):
            one.now_s += float(rng.exponential(1e-4))
            one.decide(vote)
        steps += 1
        assert one.state.committed[0] == steps
        step_bytes = one.bytes - before
        if one.now_s - reported_s > 3600:
            reported_s = one.now_s
            hour = (one.now_s - began_s) / 3600
            print(f"  {hour:5.1f} h, {one.records} records, {one.bytes / 1e6:.0f} MB", flush=True)
    return steps, deaths


def lose(one: Coordinator, rng: np.random.Generator, gone: list[tuple[int, int, int]], steps: int) -> None:
    """A random group dies in the middle of a step, and will come back."""
    state = one.state
    dead = sorted(state.live)[int(rng.integers(len(state.live)))]
    done = rng.integers(6, 10, GROUPS).tolist()
    progress = tuple((group, done[group]) for group in sorted(state.live))
    one.decide(Lost((Loss(dead, state.live[dead], "exited", 0, "killed by signal 9"),), progress))
    gone.append((steps + BACK_AFTER_STEPS, dead, state.live[dead] + 1))


def timed(work: Any) -> tuple[float, Any]:
    """(wall seconds, result) of ``work``."""
    gc.collect()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def restart(path: Path) -> tuple[float, Replayed]:
    """As a coordinator that starts again."""
    seen = Observers()
    return timed(lambda: resume(path, seen.observe, seen.recall))


def measure(hours: float, path: Path) -> dict[str, object]:
    """The only row."""
    one = Coordinator(path)
    made_s, (steps, deaths) = timed(lambda: train(one, hours))
    one.journal.close()
    files = [name for _, name in beside(path)]
    # journal.jsonl and the last part are names of one file.
    sizes = {name.stat().st_ino: name.stat().st_size for name in (path, *files)}
    restarts = [restart(path) for _ in range(3)]
    found = restarts[0][1]
    assert found.records == one.records
    assert not found.notes
    verify_s, verified = timed(lambda: verify(path))
    assert verified == one.records
    return {
        "groups": GROUPS,
        "hours": hours,
        "steps": steps,
        "deaths": deaths,
        "records": one.records,
        "vote_bytes": statistics.median(one.vote_bytes),
        "epoch_bytes": statistics.median(one.view_bytes),
        "plain_mb": one.bytes / 1e6,
        "disk_mb": sum(sizes.values()) / 1e6,
        "parts": 1 + sum(name.suffix == ".gz" for name in files),
        "snapshot_kb": max(name.stat().st_size for name in files if name.suffix == ".json") / 1e3,
        "restart_s": statistics.median(seconds for seconds, _ in restarts),
        "restart_mb": found.followed_bytes / 1e6,
        "verify_s": verify_s,
        "append_ms_per_step": one.append_s / steps * 1e3,
        "decide_ms_per_step": one.decide_s / steps * 1e3,
        "longest_append_ms": one.longest_s * 1e3,
        "made_s": made_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/journal.json)")
    parser.add_argument("--hours", type=float, default=24.0, help="length of the job; default: 24")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(arguments.hours, Path(folder) / "journal.jsonl")
    config = {
        "pieces_per_shard": PIECES_PER_SHARD,
        "redundancy": REDUNDANCY,
        "step_s": STEP_S,
        "death_every_s": DEATH_EVERY_S,
        "back_after_steps": BACK_AFTER_STEPS,
        "seed": SEED,
    }
    path = report("journal", config, [row], arguments.json)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
