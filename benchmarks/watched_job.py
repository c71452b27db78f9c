"""Measures what it costs to watch a job of many groups: its timeline, and what is added to status.json for people.

    python benchmarks/watched_job.py [--groups 1000] [--steps 1200] [--losses 12]

The journal and metrics.jsonl are those that a coordinator writes for such a job of 3 s a step: every vote is decided by
the real machine. No process computes. Times are CPU times of one process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._played_job import TIMES, specification
from benchmarks._report import report
from spare_megatron.control_plane.reports import Heartbeat, LastRank, Pace
from spare_megatron.coordinator.failure_detector import Detector
from spare_megatron.coordinator.journal import Journal, Replayed
from spare_megatron.coordinator.paces import Paces
from spare_megatron.coordinator.records import Records
from spare_megatron.coordinator.status_figures import speeds, watched_figures
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.placement import build_placement
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.messages import Event, Hello, JobSpec, Loss, Lost, Opened, ReductionResult, Vote
from spare_megatron.runtime.run_directory import RunDirectory

PIECES, REDUNDANCY, STEP_S, COMPUTE_S, SPREAD_S, REDUCE_S, PATCH_S = 8, 4, 3.0, 2.5, 0.05, 0.25, 0.3
WRITES = 50


class WrittenJob:
    """The run directory of a job whose groups vote."""

    def __init__(self, run_dir: RunDirectory, spec: JobSpec) -> None:
        self.state, self._now_s, self._dir = initial_state(), 1_700_000_000.0, run_dir
        self._journal = Journal(run_dir.journal, Replayed(), lambda: self._now_s)
        self._book, self._random = MetricsBook(started_unix_s=self._now_s), random.Random(1)
        self._tell(Opened(spec, 1, 1))
        for group in range(spec.num_groups):
            self._tell(Hello(group, 0, spec.fingerprint, 0, process_nonce=str(group)))

    def _tell(self, event: Event) -> None:
        before = self.state
        self.state, decision = step(before, event)
        record = self._journal.append(event, decision)
        self._book.observe(record.time_unix_s, before, event, decision, self.state)

    def step(self, loses: bool) -> None:
        """One more step, in which a group is lost."""
        self._now_s += STEP_S
        if loses:
            group = self._random.choice(sorted(self.state.live))
            self._tell(Lost((Loss(group, self.state.live[group], "exited"),)))
        state = self.state
        compute_s = {group: self._random.gauss(COMPUTE_S, SPREAD_S) for group in state.live}
        slowest_s = max(compute_s.values())
        for group, incarnation in state.live.items():
            segments = state.segments_of(group)
            reported = {"compute_s": compute_s[group], "patch_s": PATCH_S * (len(segments) > 1)}
            reported["reduce_s"] = REDUCE_S + slowest_s - compute_s[group]
            self._book.figures(state.step_in_flight, state.epoch, group, tuple(reported.items()))
            pieces = tuple(piece for segment in segments for piece in segment)
            self._tell(Vote(group, incarnation, ReductionResult(state.step_in_flight, state.epoch, True, pieces)))
        self._book.report(self.state.committed[0], {"lm loss": 2.0})
        with self._dir.metrics.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in self._book.ready())

    def close(self) -> None:
        """The files are whole."""
        self._journal.close()


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--losses", type=int, default=12)
    options = parser.parse_args()
    offsets = tuple(int(offset) for offset in build_placement(options.groups, REDUNDANCY).offsets)
    spec, _ = specification(offsets, options.groups, PIECES, options.groups)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = RunDirectory(scratch)
        job, every = WrittenJob(run_dir, spec), max(1, options.steps // max(1, options.losses))
        for number in range(options.steps):
            job.step(loses=number % every == every // 2)
        job.close()
        rows = [*_timeline(run_dir), *_status(run_dir, job.state)]
    report("watched_job", {**vars(options), "step_s": STEP_S, "redundancy": REDUNDANCY}, rows)


def _timeline(run_dir: RunDirectory) -> list[dict[str, object]]:
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "spare_megatron.cli.timeline", str(run_dir.path)]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.DEVNULL)
    took_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
    return [
        {"what": "journal, MB", "value": round(run_dir.journal.stat().st_size / 1e6, 3)},
        {"what": "timeline, MB", "value": round(run_dir.timeline.stat().st_size / 1e6, 3)},
        {"what": "timeline, s", "value": round(took_s, 3)},
    ]


def _status(run_dir: RunDirectory, state: State) -> list[dict[str, object]]:
    """A write of status.json, with and without what is known of each group: its place, its speed, what it has left."""
    now_s, records, paces = 100.0, Records(run_dir), Paces()
    detector = Detector(TIMES, now_s)
    for group, incarnation in state.present.items():
        detector.hello(group, incarnation, 8, now_s)
        last = LastRank(group % 8, state.step_in_flight, "forward", 12, 3, 0.25)
        detector.heartbeat(group, incarnation, Heartbeat(state.step_in_flight, 3, 0, last), now_s)
        paces.receive(group, incarnation, Pace(state.step_in_flight, 3, 0.1, COMPUTE_S / PIECES), now_s)

    def with_groups() -> None:
        left = paces.left(state, now_s)
        speed = speeds({group: piece_s for group, (_, piece_s) in left.items()}, state.live)
        watched = watched_figures(detector.standings(state.present, now_s), speed, left, None)
        records.write_status(state, lambda: watched, force=True)

    rows: list[dict[str, object]] = []
    for words, write in (("without groups", lambda: records.write_status(state, force=True)), ("", with_groups)):
        name = f"status {words}".strip()
        rows.append({"what": f"{name}, ms", "value": _cpu_ms(write)})
        rows.append({"what": f"{name}, KB", "value": round(run_dir.status.stat().st_size / 1e3, 1)})
    return rows


def _cpu_ms(work: Callable[[], None]) -> float:
    """The median CPU time of one call."""
    times_ms = []
    for _ in range(WRITES):
        began_ns = time.process_time_ns()
        work()
        times_ms.append((time.process_time_ns() - began_ns) / 1e6)
    return round(statistics.median(times_ms), 3)


if __name__ == "__main__":
    main()
