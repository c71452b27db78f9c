"""A coordinator's use of the journal, without the coordinator: a story, who writes it, and what must hold of it."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.coordinator import journal as journal_module
from spare_megatron.coordinator.job_tuning import JobTuning
from spare_megatron.coordinator.journal import Journal, Record, is_final, read, replay, resume, verify
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.state_codec import encode_state

GROUPS, STEPS = 6, 12
SPEC = m.JobSpec(GROUPS, 2, (0, 1, 3), "microbatch", 0, 1000, 3, "f", save_every=4)


def events() -> list[m.Event]:
    """Some steps, in which groups die, vote twice and save."""
    rng, state, made = random.Random(7), initial_state(), list[m.Event]()

    def tell(event: m.Event) -> None:
        nonlocal state
        made.append(event)
        state, _ = step(state, event)

    tell(m.Opened(SPEC, 1, 1))
    for group in range(GROUPS):
        tell(m.Hello(group, 0, "f", 0))
    for number in range(1, STEPS + 1):
        if number in (3, 8):
            dead = rng.choice(sorted(state.live))
            tell(m.Lost((m.Loss(dead, 0, "closed", 0, "gone"),), tuple((g, rng.randrange(2)) for g in state.live)))
        if number == 6:
            tell(m.Tuned("slower saves", save_interval=3))
        at = state.step_in_flight
        for group in rng.sample(sorted(state.live), len(state.live)):
            pieces = tuple(piece for segment in state.segments_of(group) for piece in segment)
            tell(m.Vote(group, 0, m.ReductionResult(at, state.epoch, True, pieces, f"r{at}", f"w{at - 1}")))
        if at % 4 == 0:
            tell(m.Saved(min(state.live), 0, at, f"step-{at}"))
    tell(m.StopRequested("enough"))
    return made


EVENTS = events()


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots and parts after every few records."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_BYTES", 1200)
    monkeypatch.setattr(journal_module, "PART_BYTES", 3500)
    monkeypatch.setattr(journal_module, "NAME_SEEN_S", 0.0)


class Seen:
    """What a coordinator makes of the records."""

    def __init__(self) -> None:
        self.book, self.tuning = MetricsBook(), JobTuning(started_s=10.0)

    def observe(self, record: Record, before: State, decision: m.Decision, after: State) -> None:
        self.book.observe(record.time_unix_s, before, record.event, decision, after)
        self.tuning.observe(record.time_unix_s, before, record.event, after)

    def memo(self) -> dict[str, Any]:
        return {"book": self.book.memo(), "tuning": self.tuning.memo()}

    def recall(self, memo: Mapping[str, Any]) -> None:
        self.book.recall(memo["book"])
        self.tuning.recall(memo["tuning"])


class Writer:
    """A coordinator's use of the journal: it goes on with the records that are there."""

    def __init__(self, path: Path, reported: Callable[[str], None] = lambda _: None) -> None:
        self.seen, self.path = Seen(), path
        self.at_work = threading.RLock()
        self.found = resume(path, self.seen.observe, self.seen.recall)
        self.state = self.found.state
        self.journal = Journal(path, self.found, lambda: float(self.done), lambda: None, reported)

    @property
    def done(self) -> int:
        return self.journal._end.records

    def go_on(self, until: int = len(EVENTS), acked: Callable[[int], None] = lambda _: None) -> None:
        """Append the events that are missing; ``acked`` gets the number of each record that others act on for good."""
        while self.done < until:
            with self.at_work, contextlib.suppress(OSError):
                self._append(acked)
            self._settle()

    def _settle(self) -> None:
        """Let the journal's thread do what it has to, so that every run is the same."""
        chores = self.journal._chores
        with chores._changed:
            while chores._waiting or chores._busy:
                assert chores._changed.wait(60)

    def _append(self, acked: Callable[[int], None]) -> None:
        before = self.state
        after, decision = step(before, EVENTS[self.done])
        record = self.journal.append(EVENTS[self.done], decision)
        self.state = after
        self.seen.observe(record, before, decision, after)
        if is_final(record.event, decision, before.epoch):
            acked(record.n)
        self.journal.keep(self.state, self.seen.memo)

    def close(self) -> None:
        self.journal.close()


def written(path: Path, until: int = len(EVENTS)) -> Writer:
    writer = Writer(path)
    writer.go_on(until)
    writer.close()
    return writer


def assert_whole(path: Path, until: int = len(EVENTS)) -> None:
    """The journal has the first events, once each; a restart has what a replay from the first record on gives."""
    assert [record.event for record in read(path)] == EVENTS[:until]
    assert verify(path) == until
    restarted, replayed = Seen(), Seen()
    found, whole = resume(path, restarted.observe, restarted.recall), replay(path, replayed.observe)
    assert (found.records, found.end, found.notes) == (until, whole.end, ())
    assert encode_state(found.state) == encode_state(whole.state)
    assert json.loads(json.dumps(restarted.memo())) == json.loads(json.dumps(replayed.memo()))


PLACES = (
    "journal.open",
    "journal.write",
    "journal.written",
    "journal.sync",
    "journal.synced",
    "part.prepare",
    "part.begin",
    "part.show",
    "part.compress",
    "part.compressed",
    "snapshot-N.json.write",
    "snapshot-N.json.sync",
    "snapshot-N.json.rename",
    "snapshot-N.json.renamed",
)
