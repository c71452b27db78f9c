"""The journal: every event of the protocol machine with its actions, one JSON line each, written before anything is
sent.

``append`` returns when the line is out of this process, so that a killed coordinator loses nothing. Records that change
the epoch, commit a step, fence a group, stop the job, accept a checkpoint or take a request (:func:`is_final`) are on
the disk by then (fdatasync), because others act on them for good and the host may die. fdatasync is enough, as a file
that only grows needs its data and its length on the disk and no access times. It costs 0.12 to 0.15 ms on a local
disk, once a step.

An append is done as a whole or not at all (:mod:`spare_megatron.coordinator.appended_file`): a caller that gets an
OSError may try it again, and must decide nothing meanwhile. A torn last line, which a death in the middle of a write
leaves, is dropped: nobody has acted on it.

A journal that grows for months is kept short by two optimisations, both only behind a final record, both left out while
the disk fails: a *part* that is long is finished, compressed beside the training and kept
(:mod:`spare_megatron.coordinator.journal_parts`), and a *snapshot* of the state is taken now and then
(:mod:`spare_megatron.coordinator.snapshot`), so that :func:`resume` replays only what follows it. All parts together
replay to the same actions (:func:`replay`, :func:`verify`). Records hold the actions themselves and not a digest of
them: people read a journal, and of the bytes of a large job nine in ten are votes, which have no actions.
"""

from __future__ import annotations

import errno
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from spare_megatron.coordinator.appended_file import AppendedFile
from spare_megatron.coordinator.chores import Chores
from spare_megatron.coordinator.journal_parts import (
    BEGIN,
    JournalError,
    JournalLines,
    JournalPlace,
    beside,
    header_after,
    last_path,
    plain_path,
    prepare_part,
    snapshot_path,
    tidy_parts,
)
from spare_megatron.coordinator.snapshot import Snapshot, load_snapshot, save_snapshot
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.codec import decode_actions, decode_event, encode_actions, encode_event
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.state_codec import encode_state
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.file_shapes import number, whole

__all__ = [
    "Journal",
    "JournalError",
    "Record",
    "Replayed",
    "acted_on",
    "is_final",
    "read",
    "replay",
    "resume",
    "verify",
]

SNAPSHOT_BYTES = 4 << 20
"""So many bytes of records after a snapshot the next one is due; their replay takes about a second."""
PART_BYTES = 32 << 20
"""A part that is at least so long is finished when a snapshot is due."""
NAME_SEEN_S = 60.0
"""How long the file of a part has been there before the first byte is written to it: longer than file systems keep what
they know of a folder, and than a quarter of a lease (rule 2 of journal_parts)."""
SNAPSHOT, PREPARE, TIDY = "take a snapshot of its journal", "prepare the next part of its journal", "tidy its journal"
_VOTE, _NO_ACTIONS = b'"event":{"type":"Vote"', b'"actions":[],'
"""Texts of a line as :func:`_line` writes it. Inside a string their quotes would be escaped."""
_VOTE_OF = re.compile(rb'"group":(\d+),"incarnation":\d+,"result":\{"type":"ReductionResult","step":(\d+)')
END_PATIENCE_S = 10.0
"""How long a journal that is closed waits for its last snapshot and for the compression of a part."""


@dataclass(frozen=True)
class Record:
    """One line of the journal."""

    n: int
    """Number of the record, from 1 without a gap."""
    time_unix_s: float
    epoch: int
    event: m.Event
    actions: tuple[m.Action, ...]
    reason: str


@dataclass(frozen=True)
class Replayed:
    """The result of replaying a journal."""

    state: State = field(default_factory=initial_state)
    end: JournalPlace = BEGIN
    """The place behind the last record."""
    durable_bytes: int = 0
    """How much of the last part is certainly on the disk: everything up to the last but one of its final records. The
    last one was written when the syncs of earlier ones had succeeded; whether its own did, which is that of all records
    between the two, is not known."""
    followed_bytes: int = 0
    """How many bytes of records were replayed."""
    notes: tuple[str, ...] = ()
    """Why snapshots were not used."""

    @property
    def records(self) -> int:
        """Number of records of the whole journal."""
        return self.end.records


class Journal:
    """Writes a journal. Only one process at a time does: the run directory's lock, or the lease, sees to it."""

    def __init__(
        self,
        path: Path,
        found: Replayed,
        clock: Callable[[], float],
        confirm: Callable[[], None] = lambda: None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``found`` is what replaying ``path`` gave. ``confirm`` is called before a final record is written, and again
        when it is on the disk, which may take long; it raises where this process may not decide any more."""
        own = last_path(path, found.end.part)
        self._file = AppendedFile(own, "journal", durable=True, durable_bytes=found.durable_bytes)
        self._path, self._end, self._epoch = path, found.end, found.state.epoch
        self._clock, self._confirm, self._announce = clock, confirm, announce
        self._since_bytes = found.followed_bytes
        """Bytes of records since the last snapshot."""
        self._final = False
        """The last record is a final one."""
        self._next: AppendedFile | None = None
        """The next part, where an attempt to begin it has failed."""
        self._prepared = (0, 0.0)
        """(the part whose empty file is there, since when by the monotonic clock)."""
        self._reported = False
        self._chores = Chores("spare-journal", announce)
        if found.end.part > 1:  # the process before may have died before it did so
            self._chores.do(TIDY, partial(tidy_parts, path, found.end.part))

    def append(self, event: m.Event, decision: m.Decision) -> Record:
        """Write one record; a final one is on the disk afterwards. Raises OSError where it is not in the journal."""
        if self._next is not None:
            self._next.mend()  # with a header in it, nothing may follow here
        final = is_final(event, decision, self._epoch)
        if final:
            self._confirm()
        time_s = round(self._clock(), 6)  # as in the file: who sees it live and who reads it work with the same number
        actions = cast(tuple[m.Action, ...], decision.actions)  # or one that equals it, which is not made here
        record = Record(self._end.records + 1, time_s, decision.epoch, event, actions, decision.reason)
        line = _line(record) if self._end.offset_bytes else header_after(self._end) + _line(record)
        self._file.append(line)
        if final:
            try:
                self._file.sync()
                self._confirm()
            except OSError:
                self._file.take_back(len(line))
                raise
        self._end, self._epoch, self._final = self._end.after(line), decision.epoch, final
        self._since_bytes += len(line)
        return record

    def keep(self, state: State, seen: Callable[[], Mapping[str, Any]]) -> None:
        """Begin a new part and take a snapshot where that is due. To be called behind each append, once all observers
        know the record; ``state`` is that after it, ``seen`` returns what observers made of the records so far. Never
        fails: what the disk does not take now is left for the next time."""
        if not self._final or self._since_bytes < SNAPSHOT_BYTES:
            return
        self._since_bytes, begins = 0, False
        part, since_s = self._prepared
        if self._end.offset_bytes >= PART_BYTES and part > self._end.part and time.monotonic() - since_s >= NAME_SEEN_S:
            begins = self._begin_part()
        snapshot = Snapshot(self._end, 0 if begins else self._end.offset_bytes, state, seen())
        self._chores.do(SNAPSHOT, partial(save_snapshot, self._path, snapshot))
        if self._prepared[0] <= self._end.part:
            self._chores.do(PREPARE, partial(self._prepare, self._end.part + 1))
        self._chores.do(TIDY, partial(tidy_parts, self._path, self._end.part))

    def close(self) -> None:
        """Close the file; nothing may be appended after it."""
        self._file.close()
        if self._next is not None:
            self._next.close()
        self._chores.close(END_PATIENCE_S)

    def _prepare(self, part: int) -> None:
        prepare_part(self._path, part)
        self._prepared = part, time.monotonic()

    def _begin_part(self) -> bool:
        """Go on in the next part; True where that succeeds. Else nothing may be in it when this one goes on."""
        place = self._end
        try:
            failpoints.hit("part.begin")
            if self._next is None:
                self._next = AppendedFile(plain_path(self._path, place.part + 1), "journal", durable=True)
            if self._next.length:
                raise OSError(errno.EEXIST, "it has lines already", str(plain_path(self._path, place.part + 1)))
            header = header_after(place)
            self._next.append(header)
        except OSError as error:
            if not self._reported:
                self._announce(f"the coordinator goes on with part {place.part} of its journal: {words(error)}")
            self._reported = True
            return False
        self._file.close()
        self._file, self._next, self._reported = self._next, None, False
        self._end = JournalPlace(place.part + 1, len(header), zlib.crc32(header), place.records)
        return True


def is_final(event: m.Event, decision: m.Decision, epoch: int) -> bool:
    """Whether others act on a decision for good; ``epoch`` is that before it. (A learner that is notified that it has
    no offer drops its state; whoever asked for a stop or a drain has its answer and does not ask again.)"""
    if decision.epoch != epoch or isinstance(event, m.StopRequested | m.DrainRequested):
        return True
    acted_on = (
        isinstance(action, m.SendCommit | m.SendStop | m.SendFenced | m.AcceptSave) for action in decision.actions
    )
    taught = (isinstance(action, m.SendView) and not action.view.is_member for action in decision.actions)
    return any(acted_on) or any(taught)


def _line(record: Record) -> bytes:
    plain = {
        "n": record.n,
        "time_unix_s": record.time_unix_s,
        "epoch": record.epoch,
        "event": encode_event(record.event),
        "actions": encode_actions(record.actions),
        "reason": record.reason,
    }
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


# --------------------------------------------------------------------------------------------------------- reading


def read(path: Path) -> Iterator[Record]:
    """The records of all parts in order; none for a file that is not there. A torn last line is dropped.

    Raises:
        JournalError: another line is no record, the numbers have a gap, or a part is missing or damaged.
        ConfigError: the journal has another format.
    """
    return (_parse(path, line, behind) for _, line, behind in JournalLines(path))


def acted_on(
    path: Path, start: JournalPlace = BEGIN, wanted: Callable[[int, int], bool] = lambda _group, _step: False
) -> Iterator[tuple[Record | None, JournalPlace]]:
    """The records from ``start`` on that are more than votes without a consequence, each with the place behind it; None
    in place of the others. Of a large job nine bytes in ten are such votes, which are not even parsed, unless they are
    ``wanted``, by group and step. Raises as :func:`read`; JournalError too where ``start`` is no place of this journal
    any more."""
    for _, line, behind in JournalLines(path, start):
        skipped = _VOTE in line and _NO_ACTIONS in line
        if skipped:
            vote = _VOTE_OF.search(line)
            skipped = vote is None or not wanted(int(vote[1]), int(vote[2]))
        yield None if skipped else _parse(path, line, behind), behind


def _parse(path: Path, line: bytes, behind: JournalPlace) -> Record:
    where = f"{path} record {behind.records} (part {behind.part})"
    try:
        plain: dict[str, Any] = json.loads(line)
        record = Record(
            plain["n"],
            plain["time_unix_s"],
            plain["epoch"],
            decode_event(plain["event"]),
            decode_actions(plain["actions"]),
            plain["reason"],
        )
        if not (number(record.time_unix_s) and whole(record.epoch) and isinstance(record.reason, str)):
            raise ValueError("its time, epoch or reason is none")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise JournalError(f"{where} is no record: {error}") from None
    if record.n != behind.records:
        raise JournalError(f"{where} has number {record.n}: a record is missing or there twice")
    return record


Observer = Callable[[Record, State, m.Decision, State], None]


def replay(path: Path, observe: Observer | None = None) -> Replayed:
    """The state after the last record, from the first one on.

    ``observe`` gets each record with the state before, the decision and the state after, so that metrics and the like
    are rebuilt in the same pass.

    Raises:
        JournalError: as :func:`read`, or the replay of a record decides something else than the record says.
        ConfigError: as :func:`read`.
    """
    return _replay(path, Replayed(), observe)


def resume(path: Path, observe: Observer, recall: Callable[[Mapping[str, Any]], None]) -> Replayed:
    """The same as :func:`replay`, from the newest snapshot on that fits the journal. ``recall`` gets, before anything
    is observed, what the observers had made of the records up to there. Raises the same errors."""
    notes: list[str] = []
    for part in sorted({part for part, _ in beside(path)} if path.parent.is_dir() else (), reverse=True):
        found = load_snapshot(path, part)
        if isinstance(found, str):
            notes += [found] if found else []
            continue
        start = Replayed(found.state, found.place, found.durable_bytes, notes=tuple(notes))
        try:
            next(iter(JournalLines(path, found.place)), None)
        except JournalError as error:
            notes.append(f"{snapshot_path(path, part)} does not fit: {error}")
            continue
        recall(found.seen)
        return _replay(path, start, observe)
    return _replay(path, Replayed(notes=tuple(notes)), observe)


def _replay(path: Path, start: Replayed, observe: Observer | None) -> Replayed:
    """Go on from the end of ``start``."""
    lines = JournalLines(path, start.end)
    state, part, followed_bytes = start.state, start.end.part, 0
    durable_bytes = sure_bytes = start.durable_bytes
    for before, line, behind in lines:
        record = _parse(path, line, behind)
        after, decision = step(state, record.event)
        if (decision.actions, decision.reason, decision.epoch) != (record.actions, record.reason, record.epoch):
            raise JournalError(
                f"{path} record {record.n} (part {behind.part}): replay of {type(record.event).__name__} decides "
                f"{decision.reason!r} with {len(decision.actions)} actions, the journal says {record.reason!r} with "
                f"{len(record.actions)}"
            )
        if observe is not None:
            observe(record, state, decision, after)
        if before.part != part:
            part, durable_bytes, sure_bytes = before.part, 0, 0
        if is_final(record.event, decision, state.epoch):
            durable_bytes, sure_bytes = sure_bytes, behind.offset_bytes
        followed_bytes += len(line)
        state = after
    if lines.end.part != part:
        durable_bytes = 0
    return Replayed(state, lines.end, durable_bytes, followed_bytes, start.notes)


def verify(path: Path) -> int:
    """Replay a journal and return its number of records. Raises JournalError where a decision differs, or a snapshot
    that was taken of it is not the state that is reached there."""
    taken = {}
    for part in {part for part, _ in beside(path)}:
        found = load_snapshot(path, part)
        if isinstance(found, Snapshot):
            taken[found.place.records] = found
        elif found:
            raise JournalError(found)

    def compare(record: Record, _before: State, _decision: m.Decision, after: State) -> None:
        there = taken.get(record.n)
        if there is not None and encode_state(there.state) != encode_state(after):
            raise JournalError(f"{snapshot_path(path, there.place.part)} is not the state behind record {record.n}")

    return replay(path, compare).records
