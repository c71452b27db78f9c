"""The journal: every event of the controller with what it led to, one JSON line each, written before anybody is told.

``append`` returns when the line is out of this process (a killed coordinator loses nothing); records that change the
epoch, commit a step or accept a checkpoint are on the disk too (fdatasync), because others act on them for ever after
and the machine may die. fdatasync, not fsync: a file that only grows needs its data and its length, no access times.
It costs 0.12 to 0.15 ms on a local disk, once a step.

A torn last line, left by a death in the middle of a write, was never acted on: it is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.controller.codec import decode_actions, decode_event, encode_actions, encode_event
from spare_megatron.controller.machine import State, initial_state, step
from spare_megatron.controller.messages import AcceptSave, Action, Decision, Event, SendCommit, SendStop


@dataclass(frozen=True)
class Record:
    """One line."""

    n: int
    """Number of the record, from 1 without a gap."""
    time_unix_s: float
    epoch: int
    event: Event
    actions: tuple[Action, ...]
    reason: str


class JournalError(ValueError):
    """A journal that cannot be what a coordinator wrote, or that does not replay."""


class Journal:
    """The writing side. One process at a time: the run directory's lock sees to it."""

    def __init__(
        self,
        path: Path,
        records: int,
        epoch: int,
        clock: Callable[[], float],
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """``confirm`` is called before a record that others act on is written, and again when it is on the disk, before
        anybody acts on it: it raises where that must not be (:mod:`spare_megatron.recovery.office`)."""
        self._file = path.open("ab", buffering=0)
        self._n, self._epoch, self._clock, self._confirm = records, epoch, clock, confirm

    def append(self, event: Event, decision: Decision) -> Record:
        """Write one record; see the module about when it is where."""
        final = decision.epoch != self._epoch or _is_final(decision)
        if final:
            self._confirm()
        self._n += 1
        record = Record(self._n, self._clock(), decision.epoch, event, decision.actions, decision.reason)
        self._file.write(_line(record))
        if final:
            os.fdatasync(self._file.fileno())
            self._confirm()
        self._epoch = decision.epoch
        return record

    def close(self) -> None:
        """Nothing is written any more."""
        self._file.close()


def _is_final(decision: Decision) -> bool:
    return any(isinstance(action, SendCommit | SendStop | AcceptSave) for action in decision.actions)


def _line(record: Record) -> bytes:
    plain = {
        "n": record.n,
        "time_unix_s": round(record.time_unix_s, 6),
        "epoch": record.epoch,
        "event": encode_event(record.event),
        "actions": encode_actions(record.actions),
        "reason": record.reason,
    }
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def read(path: Path) -> Iterator[Record]:
    """The records in order; none for a file that is not there. A torn last line is dropped.

    Raises:
        JournalError: any other line that is no record, or a gap in the numbers.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for n, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            record = _parse(path, n, line)
            if record.n != n:
                raise JournalError(f"{path} line {n} has number {record.n}: a record is missing or there twice")
            yield record


def _parse(path: Path, n: int, line: bytes) -> Record:
    try:
        plain: dict[str, Any] = json.loads(line)
        return Record(
            plain["n"],
            plain["time_unix_s"],
            plain["epoch"],
            decode_event(plain["event"]),
            decode_actions(plain["actions"]),
            plain["reason"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(f"{path} line {n} is no record: {error}") from None


def cut_torn_line(path: Path) -> None:
    """Before a journal is opened again: remove the end of a line that was never finished."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


Observer = Callable[[Record, State, Decision, State], None]


def replay(path: Path, observe: Observer | None = None) -> tuple[State, int]:
    """The state after the last record, and the number of records.

    ``observe`` gets each record with the state before, the decision and the state after: whoever keeps records of
    its own (metrics) rebuilds them in the same pass.

    Raises:
        JournalError: the journal does not lead to the actions that it says.
    """
    state, count = initial_state(), 0
    for record in read(path):
        after, decision = step(state, record.event)
        if (decision.actions, decision.reason, decision.epoch) != (record.actions, record.reason, record.epoch):
            raise JournalError(
                f"{path} line {record.n}: replay of {type(record.event).__name__} decides {decision.reason!r} with "
                f"{len(decision.actions)} actions, the journal says {record.reason!r} with {len(record.actions)}"
            )
        if observe is not None:
            observe(record, state, decision, after)
        state, count = after, record.n
    return state, count


def verify(path: Path) -> int:
    """Replay and compare every action; the number of records. Raises JournalError where they differ."""
    return replay(path)[1]
