"""The journal: torn lines, gaps, replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.coordinator.journal import Journal, JournalError, Record, Replayed, is_final, read, replay, verify
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.view import View
from spare_megatron.runtime.failpoints import injected

SPEC = m.JobSpec(3, 2, (0, 1), "microbatch", 0, 5, 3, "f")


def events() -> list[m.Event]:
    """A job of three groups that commits two steps and loses a group in the third."""
    hellos = [m.Hello(g, 0, "f", 0) for g in range(3)]
    votes = [m.Vote(g, 0, m.ReductionResult(t, 1, True, (2 * g, 2 * g + 1))) for t in (1, 2) for g in range(3)]
    return [
        m.Opened(SPEC, 1, 1),
        *hellos,
        *votes,
        m.Lost((m.Loss(1, 0, "exited", 0, "killed"),), ((0, 1), (1, 1), (2, 0))),
    ]


def write(path: Path, some: list[m.Event] | None = None) -> State:
    """Journal some more events as the coordinator does."""
    found = replay(path)
    state, journal = found.state, Journal(path, found, clock=lambda: 1000.0)
    for event in some if some is not None else events():
        state, decision = step(state, event)
        journal.append(event, decision)
    journal.close()
    return state


def test_replay_gives_the_same_state_and_actions(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written = write(path)
    seen: list[Record] = []
    found = replay(path, lambda record, before, decision, after: seen.append(record))
    state, count = found.state, found.records
    assert count == verify(path) == len(events()) == len(seen)
    assert (state.epoch, state.committed, state.live) == (2, (2, 1), {0: 0, 2: 0})
    assert state.segments_of(0) == written.segments_of(0)
    assert [record.event for record in seen] == events()
    assert {record.time_unix_s for record in seen} == {1000.0}


def test_an_absent_journal_is_an_empty_one(tmp_path: Path) -> None:
    assert replay(tmp_path / "journal.jsonl") == Replayed(initial_state())


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_dropped_and_cut(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    assert len(list(read(path))) == len(events()) - 1
    write(path, events()[-1:])
    assert path.read_bytes() == b"".join(lines)


def test_a_journal_of_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n":1,' + b"x" * 200_000)
    assert replay(path).records == 0
    written = write(path)
    assert (replay(path).records, replay(path).state.committed) == (len(events()), written.committed)


def test_a_missing_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(JournalError, match=r"record 4 \(part 1\) has number 5"):
        list(read(path))


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    path.write_bytes(path.read_bytes() + b'{"n": 12}\n')
    with pytest.raises(JournalError, match=r"record 12 .* is no record"):
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
    journal, state = Journal(path, Replayed(), clock=lambda: 0.0), initial_state()
    for number, event in enumerate(events(), 1):
        state, decision = step(state, event)
        record = journal.append(event, decision)
        assert (record.n, sum(1 for _ in read(path))) == (number, number)
    journal.close()


# --------------------------------------------------------------------------------------------- a disk that fails

FAULTS = [
    "journal.write=ENOSPC,{}",
    "journal.written=EIO,{}",
    "journal.sync=EIO,{}",
    "journal.synced=EIO,{}",
    "journal.write=short:{cut},{};journal.write=ENOSPC,after=1,times=1",
    "journal.write=short:{cut},{};journal.write=ENOSPC,after=1,times=1;journal.cut=EIO,times=1",
    "journal.sync=EIO,{};journal.write=ESTALE,after=1,times=3;journal.cut=ESTALE,times=2",
]


@pytest.mark.parametrize("spec", FAULTS)
@pytest.mark.parametrize("number", range(len(events())))
def test_an_append_that_fails_leaves_the_journal_as_it_was_and_can_be_repeated(
    tmp_path: Path, spec: str, number: int
) -> None:
    """At each record: after the error the journal reads as before it (or with the whole record, where it could not be
    cut off), and with the disk back it is the journal of a disk that never failed."""
    good, path = tmp_path / "good.jsonl", tmp_path / "journal.jsonl"
    write(good)
    header, *lines = good.read_bytes().splitlines(keepends=True)
    lines[0] = header + lines[0]
    state, failures = initial_state(), 0
    journal = Journal(path, Replayed(), clock=lambda: 1000.0)
    for n, event in enumerate(events()):
        state, decision = step(state, event)
        with injected(spec.format("times=1", cut=len(lines[n]) - 1) if n == number else ""):
            while (error := failure(journal, event, decision)) is not None:
                failures += 1
                assert failures < 10, error
                assert error.filename == str(path)
                assert [r.n for r in read(path)] in ([*range(1, n + 1)], [*range(1, n + 2)])
        assert path.read_bytes() == b"".join(lines[: n + 1])
    journal.close()
    assert bool(failures) == ("sync" not in spec or decided_finally(lines, number))


def failure(journal: Journal, event: m.Event, decision: m.Decision) -> OSError | None:
    """What an append fails of, None if it does not."""
    try:
        journal.append(event, decision)
    except OSError as error:
        return error
    return None


def decided_finally(lines: list[bytes], number: int) -> bool:
    """Whether record ``number`` (from 0) is one that is synced."""
    record = json.loads(lines[number].splitlines()[-1])
    before = json.loads(lines[number - 1].splitlines()[-1])["epoch"] if number else 0
    return record["epoch"] != before or any(a.get("type") == "SendCommit" for a in record["actions"])


def test_a_record_counts_only_when_the_lease_is_confirmed_after_the_sync(tmp_path: Path) -> None:
    """The sync may take longer than a lease. A look that fails is tried again; a lost lease is the end."""
    path, calls, answers = tmp_path / "journal.jsonl", [0], {2: OSError(116, "Stale file handle")}

    def confirm() -> None:
        calls[0] += 1
        if calls[0] in answers:
            raise answers[calls[0]]

    journal, state = Journal(path, Replayed(), lambda: 0.0, confirm), initial_state()
    for event in events()[:4]:
        state, decision = step(state, event)
        error = failure(journal, event, decision)
        if error is not None:
            assert error.errno == 116
            assert [record.n for record in read(path)] == [1, 2, 3]
            assert failure(journal, event, decision) is None
    journal.close()
    assert calls == [4]
    assert verify(path) == 4


@pytest.mark.parametrize("member", [True, False])
def test_a_learner_is_notified_only_what_is_final(member: bool) -> None:
    """It drops its state when it is notified that its offer has ended: were that lost with the journal's end, it could
    be called as a holder later. A member that is notified of its epoch again does nothing for good."""
    view = View(1, 1, 4, 2, ((0, 0), (1, 1)) if member else ((0, 0),), (6, 3), 7, (), ())
    again = m.Decision((m.SendView(view),), "again", 4)
    assert is_final(m.Hello(1, 0, "f", 6), again, 4) is not member


@pytest.mark.parametrize("request_", [m.StopRequested("enough"), m.DrainRequested((1,), "a fan", undo=True)])
def test_what_an_operator_has_asked_for_is_on_the_disk_before_the_answer(request_: m.Event) -> None:
    """A power failure behind the answer may not undo it: nobody asks again."""
    assert is_final(request_, m.Decision((), "noted", 4), 4)
