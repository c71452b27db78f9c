"""Parts and snapshots of a journal: whatever is killed, fails or is stopped between two file operations, nothing that
was acknowledged is lost, no record is there twice, and a restart has the state and the figures of a full replay."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.job import JobDescription
from spare_megatron.coordinator import journal as journal_module
from spare_megatron.coordinator.appended_file import AppendedFile
from spare_megatron.coordinator.journal import JournalError, Record, Replayed, is_final, read, replay, resume, verify
from spare_megatron.coordinator.journal_parts import (
    BEGIN,
    FORMAT,
    JournalLines,
    beside,
    header_after,
    packed_path,
    plain_path,
)
from spare_megatron.coordinator.records import metrics_lines
from spare_megatron.coordinator.server import Coordinator, Options
from spare_megatron.coordinator.snapshot import Snapshot, load_snapshot
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.messages import Decision
from spare_megatron.protocol.state_codec import encode_state
from spare_megatron.runtime.failpoints import injected
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.journal_writer import EVENTS, PLACES, SPEC, Seen, Writer, assert_whole, shrink, written


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def parts(path: Path) -> list[str]:
    return [name.name for _, name in beside(path)]


# ------------------------------------------------------------------------------------------------ when nothing fails


def test_parts_follow_each_other_and_a_restart_reads_little(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    packed = [name for name in parts(path) if name.endswith(".gz")]
    assert len(packed) >= 3
    assert len([name for name in parts(path) if name.endswith(".jsonl")]) <= 2, "the last and the next one"
    assert [name for name in parts(path) if name.startswith("snapshot")]
    assert_whole(path)
    assert resume(path, Seen().observe, lambda _: None).followed_bytes < 4000
    assert not list(tmp_path.glob(".*")), "no scratch file is left"


def test_parts_end_and_snapshots_are_taken_behind_final_records_only(tmp_path: Path) -> None:
    """Only these are in every later holder's journal, and on the disk of a machine that fails."""
    path, final, ends = tmp_path / "journal.jsonl", set[int](), set[int]()
    written(path)

    def note(record: Record, before: State, decision: Decision, _: State) -> None:
        if is_final(record.event, decision, before.epoch):
            final.add(record.n)

    replay(path, note)
    behind = BEGIN
    for before, _, after in JournalLines(path):
        if before.part != behind.part:
            ends.add(behind.records)
        behind = after
    found = [load_snapshot(path, part) for part, _ in beside(path)]
    snapshots = [one for one in found if isinstance(one, Snapshot)]
    taken = {one.place.records for one in snapshots}
    for one in snapshots:
        first = one.place.records in ends
        assert one.durable_bytes == (0 if first else one.place.offset_bytes), "a new part's header is not synced yet"
    assert len(ends) >= 3
    assert len(taken) >= 3
    assert final >= ends | taken


@pytest.mark.parametrize("until", range(1, len(EVENTS), 3))
def test_a_restart_at_any_record_goes_on(tmp_path: Path, until: int) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, until)
    assert_whole(path, until)
    written(path)
    assert_whole(path)


# ------------------------------------------------------------------------------------------------- kills and faults


@pytest.mark.parametrize("place", PLACES)
def test_a_coordinator_that_is_killed_loses_nothing_that_was_acknowledged(tmp_path: Path, place: str) -> None:
    """Killed at the same place again and again, each time a little later, until it comes through."""
    path, acks = tmp_path / "journal.jsonl", tmp_path / "acks"
    acks.touch()
    for after in range(20):
        child = os.fork()
        if not child:
            _go_on_and_exit(path, acks, f"{place}=kill,after={after % 5}" if after < 15 else "")
        _, status = os.waitpid(child, 0)
        acked = max(map(int, acks.read_text().split()), default=0)
        there = [record.event for record in read(path)]
        assert there == EVENTS[: len(there)]
        assert len(there) >= acked
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert_whole(path)


def _go_on_and_exit(path: Path, acks: Path, faults: str) -> None:
    code = 1
    try:
        with injected(faults), acks.open("a") as file:

            def acked(number: int) -> None:
                file.write(f"{number}\n")
                file.flush()

            writer = Writer(path)
            writer.go_on(acked=acked)
            writer.close()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


FAULTS = [place for place in PLACES if place != "journal.open"]


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("place", FAULTS)
def test_a_disk_that_fails_stops_neither_the_journal_nor_what_follows(tmp_path: Path, place: str, error: str) -> None:
    path, reported = tmp_path / "journal.jsonl", list[str]()
    writer = Writer(path, reported.append)
    writer.go_on(10)
    with injected(f"{place}={error},times=6"):
        writer.go_on(40)
    writer.go_on()
    writer.close()
    assert_whole(path)
    assert len(reported) <= 2, "a failure is said once"
    written(path)
    assert_whole(path)


@pytest.mark.parametrize("place", [place for place in FAULTS if not place.startswith("journal")])
def test_without_snapshots_and_parts_the_journal_goes_on(tmp_path: Path, place: str) -> None:
    path = tmp_path / "journal.jsonl"
    with injected(f"{place}=ENOSPC"):
        written(path)
    assert_whole(path)


def test_a_header_that_cannot_be_cut_off_is_cut_off_before_the_part_before_goes_on(tmp_path: Path) -> None:
    """Else two parts would follow the same one."""
    path = tmp_path / "journal.jsonl"
    writer = Writer(path)
    writer.go_on(12)
    assert writer.journal._end.part == 1
    header = header_after(writer.journal._end)
    writer.journal._next = AppendedFile(plain_path(path, 2), "journal", durable=True)
    with (
        injected("journal.written=EIO,times=1;journal.cut=EIO,times=1"),
        pytest.raises(OSError, match="journal-000002"),
    ):
        writer.journal._next.append(header)
    assert plain_path(path, 2).read_bytes() == header
    with injected("journal.cut=EIO,times=3"):
        writer.go_on(13)
    assert plain_path(path, 2).read_bytes() != header
    writer.go_on()
    writer.close()
    assert_whole(path)


def test_a_part_is_begun_only_when_its_name_was_there_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "NAME_SEEN_S", 3600.0)
    path = tmp_path / "journal.jsonl"
    writer = written(path)
    assert writer.journal._end.part == 1
    assert plain_path(path, 1).samefile(path)
    assert plain_path(path, 2).read_bytes() == b""
    assert_whole(path)


@pytest.mark.parametrize("torn", [b"", b'{"format":4,"pa'])
def test_a_part_without_a_whole_header_has_not_begun(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    done = written(path, 40)
    plain_path(path, done.journal._end.part + 1).write_bytes(torn)
    assert_whole(path, 40)
    written(path)
    assert_whole(path)


# --------------------------------------------------------------------------------------------------- damaged files


def _newest_snapshot(path: Path) -> Path:
    return max(name for _, name in beside(path) if name.name.startswith("snapshot"))


@pytest.mark.parametrize("how", ["torn", "one bit", "empty", "another state", "another format"])
def test_a_damaged_snapshot_is_left_out(tmp_path: Path, how: str) -> None:
    path = tmp_path / "journal.jsonl"
    expected = written(path).state
    newest = _newest_snapshot(path)
    content = newest.read_bytes()
    if how == "torn":
        newest.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        newest.write_bytes(b"")
    elif how == "one bit":
        newest.write_bytes(content.replace(b'"phase": "running"', b'"phase": "runnini"'))
    elif how == "another state":
        newest.write_bytes(content.replace(b'"committed": [', b'"committed": [1'))
    else:
        newest.write_bytes(content.replace(f'"format": {FORMAT}'.encode(), f'"format": {FORMAT + 1}'.encode()))
    assert newest.read_bytes() != content
    seen = Seen()
    found = resume(path, seen.observe, seen.recall)
    assert encode_state(found.state) == encode_state(expected)
    [note] = found.notes
    assert newest.name in note
    with pytest.raises(JournalError, match=newest.name):
        verify(path)


def test_a_snapshot_of_another_journal_is_left_out(tmp_path: Path) -> None:
    """Its own checksum is right, but it was not taken behind these bytes."""
    path, other = tmp_path / "a" / "journal.jsonl", tmp_path / "b" / "journal.jsonl"
    for one in (path, other):
        one.parent.mkdir()
    written(path)
    writer = Writer(other)
    writer.journal._clock = lambda: 5.0
    writer.go_on()
    writer.close()
    for name in other.parent.glob("snapshot*"):
        name.unlink()
    newest = _newest_snapshot(path)
    shutil.copyfile(newest, other.with_name(newest.name))
    seen = Seen()
    found = resume(other, seen.observe, seen.recall)
    assert found.records == len(EVENTS)
    assert "does not fit" in found.notes[0]


def test_a_snapshot_that_is_not_the_state_of_its_place_is_found_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "journal.jsonl", encode_state

    def wrong(state: State) -> dict[str, Any]:
        return {**real(state), "save_step": 99}

    monkeypatch.setattr("spare_megatron.coordinator.snapshot.encode_state", wrong)
    written(path)
    with pytest.raises(JournalError, match="is not the state behind record"):
        verify(path)


def test_a_missing_part_is_named_by_whoever_needs_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    packed_path(path, 2).unlink()
    seen = Seen()
    assert resume(path, seen.observe, seen.recall).records == len(EVENTS), "a restart does not need it"
    with pytest.raises(JournalError, match=r"part 2 of .* is missing: there is no journal-000002.jsonl.gz beside it"):
        verify(path)
    written(path)


def test_parts_of_another_journal_or_order_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    shutil.copyfile(packed_path(path, 1), packed_path(path, 2))
    with pytest.raises(JournalError, match=r"journal-000002.jsonl.gz does not follow the part before it"):
        verify(path)


@pytest.mark.parametrize("cut", [0.5, 0.99])
def test_a_torn_archive_is_named(tmp_path: Path, cut: float) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    packed = packed_path(path, 2)
    packed.write_bytes(packed.read_bytes()[: int(cut * packed.stat().st_size)])
    with pytest.raises(JournalError, match=r"journal-000002.jsonl.gz is damaged"):
        verify(path)


def test_a_plain_part_counts_beside_a_torn_archive(tmp_path: Path) -> None:
    """As a machine that fails between the two leaves them."""
    path = tmp_path / "journal.jsonl"
    with injected("part.compressed=EIO"):
        writer = Writer(path)
        while not packed_path(path, 1).exists():
            writer.go_on(writer.done + 1)
        writer.go_on()
        writer.close()
    assert packed_path(path, 1).exists()
    packed_path(path, 1).write_bytes(b"torn")
    assert plain_path(path, 1).exists()
    assert_whole(path)


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_a_journal_without_its_present_part_is_refused(tmp_path: Path, left: str) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    path.unlink()
    if left != "nothing":
        path.touch()
    with pytest.raises(JournalError, match=r"is not there or empty, but there is"):
        resume(path, Seen().observe, lambda _: None)


# --------------------------------------------------------------------------------------------------- the coordinator


def test_a_restarted_coordinator_has_the_figures_of_a_full_replay(tmp_path: Path) -> None:
    """Snapshots are taken by the coordinator itself; ranks report some of the steps, so that lines are written."""
    run_dir = RunDirectory(tmp_path)

    async def begun() -> Coordinator:
        return Coordinator(Options("127.0.0.1:0", run_dir, job_attempt=1))

    def figures(one: Coordinator) -> dict[str, Any]:
        memo: dict[str, Any] = json.loads(json.dumps(one._memo()))
        del memo["tuning"]["restart_s"], memo["tuning"]["measured"], memo["tuning"]["first"]
        return {**memo, "state": encode_state(one._state), "last": one._records.book.stall_s}

    async def play() -> Coordinator:
        one = await begun()
        one._dispatcher.announce = lambda action: None  # type: ignore[method-assign]
        one._open(SPEC, JobDescription(train_iters=1000))
        for event in EVENTS[1:]:
            one._apply(event)
            if one._state.committed[0] in (2, 3, 7):
                one._records.report(one._state.committed[0], {"lm loss": 2.0, "grad_norm": 1.0})
        one._journal.close()
        return one

    first = asyncio.run(play())
    second = asyncio.run(begun())
    assert second._journal._since_bytes < 4000, "it began with a snapshot"
    second._journal.close()
    for _, name in list(beside(run_dir.journal)):
        if name.suffix == ".json":
            name.unlink()
    third = asyncio.run(begun())
    third._journal.close()
    assert figures(second) == figures(third) == figures(first)
    assert figures(second)["accepted"] == "step-8"
    assert [line["step"] for line in metrics_lines(run_dir.metrics)] == [1, 2, 3, 4, 5, 6, 7]


def test_lines_that_the_disk_did_not_take_are_written_after_a_restart(tmp_path: Path) -> None:
    """They are in the snapshot, complete."""
    book, reported = MetricsBook(), MetricsBook(written=(1, 2))
    line = {"step": 3, "epoch": 1, "life": 1, "loss": 2.5}
    story = Seen()
    state = initial_state()
    for number, event in enumerate(EVENTS[:20], 1):
        before = state
        state, decision = step(before, event)
        story.observe(
            Record(number, 0.0, state.epoch, event, decision.actions, decision.reason), before, decision, state
        )
    memo = json.loads(json.dumps(story.book.memo()))
    reported.recall(memo, [{"step": 2, "epoch": 1, "life": 1, "loss": 9.0}, line])
    [ready] = [one for one in reported.ready(all_of_them=True) if one["step"] == 3]
    assert ready["loss"] == 2.5
    book.recall(memo)
    assert [one["step"] for one in book.ready(all_of_them=True)] == [1, 2]


# ---------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("found", "line"), [(1, b'{"n":1,"time_unix_s":0.0}\n'), (99, b'{"format":99,"kind":"new"}\n')]
)
def test_an_older_or_newer_format_is_one_sentence_and_exit_code_2(tmp_path: Path, found: int, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line)
    with pytest.raises(
        ConfigError, match=f"has journal format {found}, and this version .* format {FORMAT}: go on with"
    ):
        list(read(path))
    command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.BAD_INPUT == 2
    [sentence] = done.stderr.splitlines()
    assert f"journal.jsonl has journal format {found}, and this version" in sentence
    assert "or give the job another run directory" in sentence
    assert path.read_bytes() == line, "it is left as it is"


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for line in (b"one\n", b"[]\n", b'{"what": 1}\n'):
        path.write_bytes(line)
        with pytest.raises(JournalError, match="line 1 is no header"):
            list(read(path))


def test_a_restart_takes_little_that_is_not_a_snapshot(tmp_path: Path) -> None:
    """The second restart of a coordinator that always dies soon reads no more than the first one."""
    path = tmp_path / "journal.jsonl"
    for until in range(5, len(EVENTS), 5):
        writer = Writer(path)
        assert writer.found.followed_bytes < 6000
        writer.go_on(until)
        writer.close()


def test_an_empty_replay_is_the_first_state() -> None:
    assert encode_state(Replayed().state) == encode_state(initial_state())
