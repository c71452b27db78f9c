"""The journal: torn lines, gaps, replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.controller.machine import State, initial_state, step
from spare_megatron.controller.messages import Event, Hello, JobSpec, Loss, Lost, Opened, Vote
from spare_megatron.recovery.journal import Journal, JournalError, Record, cut_torn_line, read, replay, verify

SPEC = JobSpec(3, 2, (0, 1), "microbatch", 0, 5, 3, "f")


def events() -> list[Event]:
    """A job of three groups that commits two steps and loses a group in the third."""
    hellos = [Hello(g, 0, "f", 0) for g in range(3)]
    votes = [Vote(g, 0, t, 1, True, (2 * g, 2 * g + 1)) for t in (1, 2) for g in range(3)]
    return [Opened(SPEC, 1, 1), *hellos, *votes, Lost((Loss(1, 0, "exited", 0, "killed"),), ((0, 1), (1, 1), (2, 0)))]


def write(path: Path, state: State | None = None, count: int = 0, some: list[Event] | None = None) -> State:
    """Journal some events as the coordinator does."""
    state = state or initial_state()
    journal = Journal(path, count, state.epoch, clock=lambda: 1000.0)
    for event in some if some is not None else events():
        state, decision = step(state, event)
        journal.append(event, decision)
    journal.close()
    return state


def test_replay_gives_the_same_state_and_actions(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written = write(path)
    seen: list[Record] = []
    state, count = replay(path, lambda record, before, decision, after: seen.append(record))
    assert count == verify(path) == len(events()) == len(seen)
    assert (state.epoch, state.committed, state.live) == (2, (2, 1), {0: 0, 2: 0})
    assert state.segments_of(0) == written.segments_of(0)
    assert [record.event for record in seen] == events()
    assert {record.time_unix_s for record in seen} == {1000.0}


def test_an_absent_journal_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    cut_torn_line(path)
    assert replay(path) == (initial_state(), 0)


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_dropped_and_cut(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    assert len(list(read(path))) == len(lines) - 1
    cut_torn_line(path)
    assert path.read_bytes() == b"".join(lines[:-1])
    state, count = replay(path)
    write(path, state, count, events()[-1:])
    assert path.read_bytes() == b"".join(lines)


def test_a_journal_of_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n":1,' + b"x" * 200_000)
    cut_torn_line(path)
    assert path.read_bytes() == b""


def test_a_missing_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(JournalError, match="line 4 has number 5"):
        list(read(path))


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    path.write_bytes(path.read_bytes() + b'{"n": 12}\n')
    with pytest.raises(JournalError, match="line 12 is no record"):
        list(read(path))


def test_a_journal_that_says_something_else_than_the_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    record = json.loads(lines[-1])
    record["reason"] = "something else"
    path.write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    with pytest.raises(JournalError, match="replay of Lost decides"):
        verify(path)


def test_a_record_is_in_the_file_before_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal, state = Journal(path, 0, 0, clock=lambda: 0.0), initial_state()
    for number, event in enumerate(events(), 1):
        state, decision = step(state, event)
        record = journal.append(event, decision)
        assert (record.n, sum(1 for _ in read(path))) == (number, number)
    journal.close()
