"""Writes the coordinator's records for people: metrics.jsonl, Megatron's iteration line, boards, status and summary.

No decision depends on them, so the job goes on while the disk fails: what cannot be written now is kept and written
later. Each line of metrics.jsonl is written once, also across restarts of the coordinator, which finds in the file what
is written. A step is printed before it is written there: a coordinator that was killed in between prints it again after
its restart, so that no iteration line is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spare_megatron.config.exits import SIGNAL_REASON
from spare_megatron.config.job import JobDescription
from spare_megatron.control_plane.group_aggregation import first_part
from spare_megatron.coordinator.appended_file import AppendedFile
from spare_megatron.coordinator.board_thread import BoardThread
from spare_megatron.coordinator.copies_watch import CopiesWatch, state_copies
from spare_megatron.coordinator.journal import Record
from spare_megatron.coordinator.status_figures import status_figures
from spare_megatron.metrics.boards import BoardPoint, Boards, points
from spare_megatron.metrics.iteration_line import IterationLines, evaluation_lines
from spare_megatron.metrics.metrics import MetricsBook, RealPieces
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Decision, Event, GaveBack, Hello, Lost, StopRequested, Tuned, Withdrawn
from spare_megatron.protocol.saves import is_emergency
from spare_megatron.runtime.disk import END_PATIENCE_S, SideFiles
from spare_megatron.runtime.file_shapes import whole
from spare_megatron.runtime.run_directory import RunDirectory, write_json
from spare_megatron.runtime.steady_clock import SteadyClock, process_age_s

LOSSES_SHOWN = 5


PAUSE_S, PAUSE_MAX_S = 2.0, 8.0
"""How long after status.json was written what changes with each step is written again, at the earliest and at the
latest."""
STATUS_SHARE = 1e-3
"""Of this process's time that may take so much, between these bounds."""
YOUNG_S = 600.0
"""A process that says it is older when it makes its records is in a container whose clocks have other origins."""


class Records:
    """Everything the coordinator writes beside its journal."""

    def __init__(self, run_dir: RunDirectory, clock: Callable[[], float] | None = None) -> None:
        """``clock`` says the time of records, seconds since 1970."""
        self._run_dir, self.side, self._clock = run_dir, SideFiles(announce), clock or SteadyClock(run_dir)
        self._metrics: AppendedFile | None = None
        self._unwritten: list[bytes] = []
        """Lines of metrics.jsonl that are not in the file yet."""
        newest = deque(metrics_lines(run_dir.metrics), maxlen=1)
        self._last_line: Mapping[str, Any] = newest[0] if newest else {}
        written = (newest[0]["life"], newest[0]["step"]) if newest else (0, -1)
        self.book = MetricsBook(written=written, started_unix_s=_process_began_s(self._clock()))
        self._losses: deque[str] = deque(maxlen=LOSSES_SHOWN)
        self._job = JobDescription()
        self._lines: IterationLines | None = None
        self._boards = BoardThread(run_dir.path, announce)
        self._lost_s: dict[int, float] = {}
        """Group -> when it was lost last, in this job attempt; seconds since 1970."""
        self._status_of: tuple[State | None, Mapping[str, Any]] = (None, {})
        """The state and the line of which status.json was made last."""
        self._status_s = 0.0
        """When that was."""
        self._pause_s = PAUSE_S
        self.attempt_began_unix_s = self._clock()
        self._withdrawals: set[tuple[int, int]] = set()
        """(group, incarnation) of the learners that an offer was withdrawn from; said once for each."""
        self._copies = CopiesWatch()
        self._relieved = False
        """Whether this process has notified that a group was relieved."""
        self._stop_signal = ""
        """The reason of the first stop by a signal in this job attempt, even if the job attempt was ending already:
        after a signal no other job attempt may follow at once."""

    def begin(self, job: JobDescription, state: State) -> None:
        """The job's description is known: at the first Hello of a job attempt, or after a restart of the
        coordinator."""
        self._job = job
        self.book.loss_name = job.loss_names[0]
        first_step = state.job.first_step
        self._lines = IterationLines(job, first_step)
        if job.batch_phases:
            self.book.real_pieces = RealPieces(
                job.batch_schedule(first_step), job.pieces_per_shard, job.global_batch_size
            )
        for line in self._lines_of(state.job_attempt):
            self._lines.add(line)
        self._boards.begin(job)

    def observe(
        self, record: Record, before: State, decision: Decision, after: State, detect_s: float, live: bool
    ) -> None:
        """Take the figures of one transition; ``live`` is False in a replay, which prints nothing."""
        self.book.observe(record.time_unix_s, before, record.event, decision, after, detect_s)
        if after.job_attempt != before.job_attempt:
            self.attempt_began_unix_s = record.time_unix_s
            self._stop_signal = ""
            self._lost_s.clear()
        if isinstance(record.event, StopRequested) and record.event.reason.startswith(SIGNAL_REASON):
            self._stop_signal = self._stop_signal or record.event.reason
        must_publish = isinstance(record.event, Tuned | StopRequested) or self._withdrawn(record.event, before)
        commits = after.committed != before.committed and before.phase == after.phase == "running"
        must_publish = must_publish or (commits and is_emergency(before, after.endangered))
        relieved = isinstance(record.event, GaveBack) and not after.stopped and after.live == before.live
        changed = (after.epoch != before.epoch and not relieved) or after.phase != before.phase
        if changed and after.live != before.live:
            self._members(record.time_unix_s, before, after, live)
        replaced = isinstance(record.event, Hello) and bool(before.live.keys() - after.live.keys())
        if (isinstance(record.event, Lost) or replaced) and changed:
            self._losses.append(decision.reason)
        if live and (changed or must_publish):
            announce(decision.reason)
        copies = self._copies.observe(before, after, record.time_unix_s)
        if live and copies:
            announce(copies)
        if live and relieved and after.epoch != before.epoch and not self._relieved:
            self._relieved = True
            announce(f"{decision.reason}; later ones are counted in metrics.jsonl (pieces_given)")

    def _members(self, time_s: float, before: State, after: State, live: bool) -> None:
        """Who is lost, and who is a member again."""
        self._lost_s |= dict.fromkeys(before.live.keys() - after.live.keys(), time_s)
        for group in sorted(after.live.keys() - before.live.keys()) if live and before.phase == "running" else ():
            self._boards.do(partial(_tell_return, group, self._lost_s.get(group, time_s), time_s))

    def memo(self) -> dict[str, Any]:
        """What the records so far have left here, as JSON values, for :meth:`recall` after a restart."""
        return {
            "book": self.book.memo(),
            "unwritten": [json.loads(line) for line in self._unwritten],
            "losses": list(self._losses),
            "life_began_unix_s": self.attempt_began_unix_s,
            "stop_signal": self._stop_signal,
            "withdrawals": sorted(self._withdrawals),
            "copies": self._copies.memo(),
        }

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Go on from the memo of the process that took a snapshot; what followed it is observed next."""
        self.book.recall(memo["book"], memo["unwritten"])
        self._losses.extend(memo["losses"])
        self.attempt_began_unix_s, self._stop_signal = memo["life_began_unix_s"], memo["stop_signal"]
        self._withdrawals = {(group, incarnation) for group, incarnation in memo.get("withdrawals", ())}
        if "copies" in memo:
            self._copies.recall(memo["copies"])

    def _withdrawn(self, event: Event, before: State) -> bool:
        """Whether ``event`` takes an offer from a learner from which none was taken before."""
        if not isinstance(event, Withdrawn):
            return False
        learners = {offer.learner for offer in before.offers if offer.number == event.number} - self._withdrawals
        self._withdrawals |= learners
        return bool(learners)

    def report(self, step: int, report: Mapping[str, Any]) -> None:
        """Take a group's report on a step that it applied."""
        self.book.report(step, report)
        self.write_ready()

    def write_ready(self, all_of_them: bool = False) -> None:
        """Write the lines that are complete."""
        ready = self.book.ready(all_of_them)
        for line in ready:
            self._show(line)
        lines = [line for line in ready if not self._closes(line["step"])]
        if lines:
            self._unwritten += [json.dumps(line).encode() + b"\n" for line in lines]
            self._last_line = lines[-1]
            self.side.write(self._run_dir.metrics.name, self._append)

    def _append(self) -> None:
        if self._metrics is None:
            self._metrics = AppendedFile(self._run_dir.metrics, "metrics")
        self._metrics.append(b"".join(self._unwritten))
        self._unwritten = []

    def _lines_of(self, job_attempt: int) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one job attempt; none where the file cannot be read now: then the next
        iteration line averages fewer steps."""
        try:
            return [line for line in metrics_lines(self._run_dir.metrics) if line.get("life") == job_attempt]
        except (OSError, ValueError):
            return []

    def _closes(self, step: int) -> bool:
        """True for the round after the last step, which evaluates and trains nothing."""
        return step > self._job.train_iters > 0

    def write_status(self, state: State, watched: Callable[[], Mapping[str, Any]] = dict, force: bool = False) -> None:
        """Replace status.json: at once where it is about more than the next step; for steps, and for ``watched``, which
        changes all the time, now and then, so that it is known that this process is there."""
        now_s, (known, line) = round(self._clock(), 3), self._status_of
        if not force and known is not None and _reported_at_once(state) == _reported_at_once(known):
            changed = state is not known or self._last_line is not line
            if (state.stopped and not changed) or 0 <= now_s - self._status_s < self._pause_s:
                return
        self._status_of, self._status_s, began_s = (state, self._last_line), now_s, time.thread_time()
        status = {
            "phase": state.phase,
            "life": state.job_attempt,
            "epoch": state.epoch,
            "first_step": state.spec.first_step if state.spec else 0,
            "step": state.committed[0],
            "last_step": state.spec.last_step if state.spec else None,
            "num_groups": state.spec.num_groups if state.spec else None,
            "live": {str(group): incarnation for group, incarnation in sorted(state.live.items())},
            "learners": {str(group): known.incarnation for group, known in sorted(state.learners.items())},
            **status_figures(state),
            "state_copies": state_copies(state),
            "load": {str(group): sum(map(len, state.segments_of(group))) for group in sorted(state.live)},
            "relieved": self.book.relieved,
            "failures_masked": self.book.totals.failures_masked,
            "last_losses": list(self._losses),
            "saved_step": state.saved_step - self._closes(state.saved_step),
            "loss": self._last_line.get("loss"),
            "outcome": state.outcome,
            "reason": state.outcome_reason,
            **watched(),
            "time_unix_s": now_s,
        }
        path = self._run_dir.status
        self.side.write(path.name, lambda: write_json(path, status))
        took_s = time.thread_time() - began_s
        self._pause_s = min(max(PAUSE_S, took_s / STATUS_SHARE), PAUSE_MAX_S)

    def finish(self, state: State) -> None:
        """The job is over: write the lines that are left, status and summary, and close the boards."""
        self.write_ready(all_of_them=True)
        self.write_status(state, force=True)
        totals, last = self.book.totals, self._last_line
        closing = self._closes(state.committed[0])
        summary = {
            "outcome": state.outcome,
            "reason": state.outcome_reason,
            "stop_signal": self._stop_signal,
            "steps": state.committed[0] - closing,
            "first_step": state.spec.first_step if state.spec else 0,
            "steps_committed": totals.steps_committed - closing,
            "failures_masked": totals.failures_masked,
            "steps_lost": totals.steps_lost,
            "wipe_outs": totals.wipe_outs,
            "soft_wipe_outs": totals.soft_wipe_outs,
            "joins": totals.joins,
            "lives": state.job_attempt,
            "stall_s": round(self.book.stall_s, 3),
            "loss": last.get("loss"),
            "weights_digest": first_part(state.last_weights or "") or None,
            "live_groups": sorted(state.live),
            "saved_step": state.saved_step - self._closes(state.saved_step),
        }
        self.side.write(self._run_dir.summary.name, lambda: write_json(self._run_dir.summary, summary))
        self._boards.close()
        self.side.settle(END_PATIENCE_S)
        if self._metrics is not None:
            self._metrics.close()

    def _show(self, line: Mapping[str, Any]) -> None:
        if self._lines is None:
            return
        for evaluated in evaluation_lines(line):
            sys.stdout.write(evaluated + "\n")
        closes = self._closes(line["step"])
        text = None if closes else self._lines.add(line)
        if text is not None:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if self._job.has_boards:
            batch_size = 0 if closes else self._lines.batch_size(int(line["step"]))
            for point in points(line, self._job, self._lines.consumed_samples, batch_size):
                self._boards.do(partial(_write, point))
            self._boards.do(partial(_tell, line))


def _reported_at_once(state: State) -> tuple[object, ...]:
    """What status.json says of a state that is news: all but what changes with each step of a job that nothing
    happens to."""
    members = state.live, state.learners, state.drained, state.adopted, state.slowness, state.state_hosts
    return state.phase, state.job_attempt, state.outcome, state.saved_step, *members


def _write(point: BoardPoint, boards: Boards) -> None:
    boards.write(point)


def _tell(line: Mapping[str, Any], boards: Boards) -> None:
    boards.tell(line)


def _tell_return(group: int, lost_s: float, back_s: float, boards: Boards) -> None:
    boards.tell_return(group, lost_s, back_s)


def metrics_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for text in file:
            if text.endswith("\n"):
                with contextlib.suppress(ValueError, RecursionError):  # it is damaged, and no decision depends on it
                    line = json.loads(text)
                    if isinstance(line, dict) and whole(line.get("life")) and whole(line.get("step")):
                        yield line


def announce(text: str) -> None:
    """Write one line to the coordinator's standard output, which spare-launch shows."""
    sys.stdout.write(f"spare: {text}\n")
    sys.stdout.flush()


def _process_began_s(now_s: float) -> float:
    """When this process began, by the clock that says ``now_s``; infinity where the system does not say, or cannot be
    believed."""
    age_s = process_age_s()
    return now_s - age_s if 0 < age_s < YOUNG_S else math.inf
