"""What of the coordinator's decisions is an event for the operator (``--spare-on-event``), as JSON values.

Each event is made from one record of the journal, once that record is written and its actions are sent. A replay makes
none, so an event is reported at most once: what a coordinator had not reported yet when it was killed is only in the
journal. docs/operating.md describes the kinds and the fields, which stay as they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.coordinator.event_commands import END_PATIENCE_S, EventCommands
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import AcceptSave, DrainRequested, Opened, Ready, SendCommit


@dataclass(frozen=True)
class JobEvent:
    """One event; what its kind does not have is None."""

    kind: str
    step: int
    group: int | None = None
    incarnation: int | None = None
    checkpoint: str | None = None
    outcome: str | None = None


def events_of(record: Record, before: State, after: State) -> Iterator[JobEvent]:
    """The events of one record, in their order."""
    if isinstance(record.event, Opened):
        if after.job_attempt != before.job_attempt:
            yield JobEvent("life", after.step_in_flight)
        return
    if (before.live, before.learners, before.gone) != (after.live, after.learners, after.gone):
        yield from _comings_and_goings(record, before, after)
    for action in record.actions:
        if isinstance(action, AcceptSave):
            yield JobEvent("save", action.step, action.group, action.incarnation, checkpoint=action.directory)
    if after.stopped and not before.stopped:
        kind = "wipe_out" if after.outcome == "wipe-out" else "end"
        yield JobEvent(kind, after.committed[0], outcome=after.outcome)


def _comings_and_goings(record: Record, before: State, after: State) -> Iterator[JobEvent]:
    step, old, new = before.step_in_flight, before.present, after.present
    lost = sorted(group for group in old if new.get(group) != old[group])
    drains = after.drained if isinstance(record.event, DrainRequested) or _commits(record) else frozenset()
    for group in lost:
        yield JobEvent("drained" if group in drains else "loss", step, group, old[group])
    for group in sorted(after.gone - before.gone - set(lost)):
        yield JobEvent("loss", step, group, after.highest.get(group))
    left = before.live.keys() - after.live.keys()
    back = left - set(lost)
    for group in sorted(back):
        yield JobEvent("sent_back", step, group, old[group])
    running = before.phase == after.phase == "running"
    if running and left - back - drains:
        yield JobEvent("patch", step)
    for group in sorted(after.learners.keys() - after.live.keys()):
        if old.get(group) != new[group]:
            yield JobEvent("restart", step, group, new[group])
    if isinstance(record.event, Ready):
        yield JobEvent("ready", step, record.event.group, record.event.incarnation)
    for group in sorted(after.live.keys() - before.live.keys()) if running else ():
        yield JobEvent("return", after.step_in_flight, group, new[group])


def _commits(record: Record) -> bool:
    return any(isinstance(action, SendCommit) for action in record.actions)


def values_of(record: Record, before: State, after: State, run_dir: Path) -> Iterator[dict[str, Any]]:
    """The events of one record with all their fields."""
    common: dict[str, Any] = {}
    for index, event in enumerate(events_of(record, before, after)):
        common = common or {
            "time": _utc(record.time_unix_s),
            "run_dir": str(run_dir),
            "record": record.n,
            "life": after.job_attempt,
            "epoch": after.epoch,
            "reason": record.reason,
            "live": sorted(after.live),
            "learners": sorted(after.learners.keys() - after.live.keys()),
        }
        own = {"event": event.kind, "step": event.step, "group": event.group, "incarnation": event.incarnation}
        yield {**own, "checkpoint": event.checkpoint, "outcome": event.outcome, "index": index, **common}


def _utc(time_unix_s: float) -> str:
    at = datetime.datetime.fromtimestamp(time_unix_s, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JobEvents:
    """Tells the operator's command of the events of one coordinator's records."""

    def __init__(self, command: str, run_dir: Path, announce: Callable[[str], None]) -> None:
        """``command`` is given to the shell; empty: nothing is sent. ``announce`` shows one line, from any thread."""
        self._reported, self._run_dir = bool(command), run_dir
        self._commands = EventCommands(command, announce)

    def observe(self, record: Record, before: State, after: State) -> None:
        """Tell of one record that is in the journal. Waits for nothing."""
        for values in values_of(record, before, after, self._run_dir) if self._reported else ():
            self._commands.tell(values)

    def close(self, in_order: bool) -> None:
        """End the commands. Where the job ended ``in_order``, its last events have END_PATIENCE_S to be reported."""
        self._commands.close(END_PATIENCE_S if in_order else 0.0)
