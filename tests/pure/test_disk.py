"""Files on disks that fail for a while: appended files, side files, the backlog, what is read."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.coordinator.appended_file import AppendedFile
from spare_megatron.coordinator.backlog import Backlog, DiskFailedError
from spare_megatron.coordinator.journal import replay
from spare_megatron.coordinator.server import Coordinator, Options
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State
from spare_megatron.runtime.disk import SideFiles, with_retries
from spare_megatron.runtime.failpoints import injected
from spare_megatron.runtime.run_directory import RunDirectory, glance, write_json

# ------------------------------------------------------------------------------------------------- appended files


def test_a_short_write_is_cut_off_and_the_next_line_does_not_merge_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = AppendedFile(path, "metrics")
    file.append(b"one\n")
    with injected("metrics.write=short:2,times=1;metrics.write=ENOSPC,after=1"), pytest.raises(OSError, match="lines"):
        file.append(b"two\n")
    assert path.read_bytes() == b"one\n"
    with injected("metrics.write=short:2,times=1;metrics.write=ENOSPC,after=1;metrics.cut=EIO"):
        with pytest.raises(OSError, match="lines"):
            file.append(b"two\n")
        assert path.read_bytes() == b"one\ntw"
    file.append(b"3\n")
    assert path.read_bytes() == b"one\n3\n"
    file.close()


def test_a_short_write_without_an_error_is_completed(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "lines", "metrics")
    with injected("metrics.write=short:1"):
        file.append(b"one line\n")
    assert (tmp_path / "lines").read_bytes() == b"one line\n"
    file.close()


class Pages:
    """A kernel that throws dirty pages away when a sync fails, and calls them clean: what is on the disk is what was
    written since, and synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.disk: dict[int, int] = {}
        self.dirty: dict[int, int] = {}
        self.fails = 0
        write, cut = os.pwrite, os.ftruncate

        def pwrite(handle: int, data: bytes, offset: int) -> int:
            done = write(handle, data, offset)
            self.dirty.update(enumerate(data[:done], offset))
            return done

        def ftruncate(handle: int, size: int) -> None:
            cut(handle, size)
            for pages in (self.disk, self.dirty):
                for offset in [offset for offset in pages if offset >= size]:
                    del pages[offset]

        def fdatasync(_: int) -> None:
            lost, self.dirty = self.dirty, {}
            if self.fails:
                self.fails -= 1
                raise OSError(5, "Input/output error")
            self.disk.update(lost)

        for name, function in (("pwrite", pwrite), ("ftruncate", ftruncate), ("fdatasync", fdatasync)):
            monkeypatch.setattr(os, name, function)

    def content(self) -> bytes:
        """What a machine that dies now would find."""
        return bytes(self.disk.get(offset, 0) for offset in range(max(self.disk, default=-1) + 1))


def test_after_a_failed_sync_everything_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    file = AppendedFile(tmp_path / "lines", "journal", durable=True)
    file.append(b"synced\n")
    file.sync()
    file.append(b"acted on\n")
    file.append(b"final\n")
    pages.fails = 2
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
        assert pages.content() == b"synced\n"
    file.take_back(len(b"final\n"))
    file.append(b"another\n")
    file.sync()
    assert pages.content() == (tmp_path / "lines").read_bytes() == b"synced\nacted on\nanother\n"
    file.close()


def test_what_a_predecessor_may_not_have_synced_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"settled\nperhaps\ntor")
    pages = Pages(monkeypatch)
    file = AppendedFile(path, "journal", durable=True, durable_bytes=len(b"settled\n"))
    file.append(b"new\n")
    file.sync()
    assert path.read_bytes() == b"settled\nperhaps\nnew\n"
    assert pages.content()[len(b"settled\n") :] == b"perhaps\nnew\n"
    file.close()


# ----------------------------------------------------------------------------------------------------- side files


def test_a_side_file_is_said_once_and_written_when_the_disk_is_back(tmp_path: Path) -> None:
    reported: list[str] = []
    path = tmp_path / "status.json"
    side = SideFiles(reported.append)

    async def main() -> None:
        with injected("status.json.write=ENOSPC,for_s=0.2"):
            for number in range(3):
                side.write(path.name, lambda number=number: write_json(path, {"a": number}))
            assert not path.exists()
            while not path.exists():
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert json.loads(path.read_text()) == {"a": 2}, "the newest content"
    assert len(reported) == 2, reported
    assert reported[0] == (
        "status.json cannot be written: ENOSPC (No space left on device); the job goes on, and it is written later"
    )
    assert reported[1].startswith("status.json is written again, after 0.")


def test_the_end_waits_for_side_files_but_not_for_ever(tmp_path: Path) -> None:
    reported: list[str] = []
    path = tmp_path / "summary.json"
    side = SideFiles(reported.append)
    with injected("summary.json.rename=EIO,for_s=0.3"):
        side.write(path.name, lambda: write_json(path, {}))
        assert side.settle(60.0)
    assert glance(path) == {}
    with injected("summary.json.rename=EIO"):
        side.write(path.name, lambda: write_json(path, {}))
        assert not side.settle(0.2)
    assert reported[-1] == "summary.json: not written within 0.2 s, and now left as they are"


# -------------------------------------------------------------------------------------------------------- backlog


class Reported:
    """A backlog, and what it said and did."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.reported: list[str] = []
        self.done: list[str] = []
        self.errors: list[Exception] = []
        self.resumed = 0
        self.broken = 0
        self.backlog = Backlog(self.reported.append, self.errors.append, self.resume, lambda: limit_s)

    def resume(self) -> None:
        self.resumed += 1

    def work(self, name: str) -> Callable[[], None]:
        def do() -> None:
            if self.broken:
                self.broken -= 1
                raise OSError(28, "No space left on device", "journal.jsonl")
            self.done.append(name)

        return do


def test_work_waits_in_order_while_the_disk_fails() -> None:
    reported = Reported()

    async def main() -> None:
        reported.backlog.do(reported.work("a"))
        reported.broken = 3
        for name in "bcd":
            reported.backlog.do(reported.work(name))
        assert reported.backlog.waiting
        assert reported.done == ["a"]
        while reported.backlog.waiting:
            await asyncio.sleep(0.01)
        reported.backlog.do(reported.work("e"))

    asyncio.run(main())
    assert reported.done == list("abcde")
    assert (reported.resumed, reported.errors) == (1, [])
    assert len(reported.reported) == 2, reported.reported
    assert reported.reported[0].startswith("WARNING: journal.jsonl cannot be written: ENOSPC (No space left on device)")
    assert "the disk is back after" in reported.reported[1]


def test_what_a_work_leads_to_comes_before_what_waits() -> None:
    reported = Reported()

    def first() -> None:
        reported.backlog.do(reported.work("later"))
        reported.backlog.do_next([reported.work("x"), reported.work("y")])

    reported.backlog.do(first)
    assert reported.done == ["x", "y", "later"]


def test_a_disk_that_stays_away_is_the_end_and_nothing_more_is_done() -> None:
    reported = Reported(limit_s=0.1)
    reported.broken = 1000

    async def main() -> None:
        reported.backlog.do(reported.work("a"))
        while not reported.errors:
            await asyncio.sleep(0.01)
        reported.broken = 0
        reported.backlog.do(reported.work("b"))

    asyncio.run(main())
    assert reported.done == []
    assert isinstance(reported.errors[0], DiskFailedError)


def test_another_exception_is_the_owner_s_and_nothing_more_is_done() -> None:
    reported = Reported()

    def bug() -> None:
        raise RuntimeError("another coordinator has taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        reported.backlog.do(bug)
    reported.backlog.do(reported.work("a"))
    assert reported.done == []
    assert [str(error) for error in reported.errors] == ["another coordinator has taken over"]


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", ["EIO", "ESTALE"])
def test_what_cannot_be_read_now_is_not_known_now(tmp_path: Path, name: str) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.publish_leader(0, 1, "here:1")
    with injected(f"group-N.json.read={name};coordinator.json.read={name}"):
        assert run_dir.leader(0, 1) is None
        assert run_dir.coordinator() is None
        with pytest.raises(OSError, match="coordinator"):
            run_dir.coordinator_for_sure()
    (tmp_path / "coordinator.json").write_text('{"address": "he')
    assert run_dir.coordinator() is None
    assert run_dir.leader(0, 1) == "here:1"


def test_the_start_waits_for_the_disk_and_not_for_a_user_s_error(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    with injected("token.write=ENOSPC,for_s=0.2;token.read=ESTALE,times=2"):
        token = run_dir.token(create=True)
    assert len(token) == 32
    assert run_dir.token(create=True) == token
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    with pytest.raises(ConfigError, match="cannot read the job token"):
        RunDirectory(tmp_path / "nowhere").token()
    with injected("token.read=EIO"), pytest.raises(OSError, match="Input/output"):
        with_retries(lambda: run_dir._read_token(), 0.1)


def test_a_notice_and_an_error_that_cannot_be_left_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDirectory(tmp_path)
    with injected("notices.write=ENOSPC;errors.write=ENOSPC"):
        run_dir.notice("something happened")
        run_dir.report_error("rank", "a sentence")
    assert "something happened (not shown: " in capsys.readouterr().err
    assert run_dir.reported_errors() == []


def test_an_error_that_is_reported_is_whole(tmp_path: Path) -> None:
    """A launcher that read an empty file had no sentence for the user."""
    run_dir = RunDirectory(tmp_path)
    with injected("errors.rename=EIO"):
        run_dir.report_error("group-0-rank-0", "a sentence")
    assert run_dir.reported_errors() == [], "it has its name once it is written"
    run_dir.sweep()
    assert list(run_dir.errors.iterdir()) == []
    run_dir.report_error("group-0-rank-0", "a sentence")
    assert [file.read_text() for file in run_dir.reported_errors()] == ["a sentence\n"]


def test_printing_outlives_a_full_disk() -> None:
    program = "\n".join(
        (
            "from spare_megatron.runtime.standard_output import outlive_the_disk",
            "import os, sys",
            "outlive_the_disk()",
            "print('lost', flush=True)",
            "os.dup2(2, 1)",
            "print('seen \\u2026', flush=True)",
            "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
            "print('lost again')",
        )
    )
    with open("/dev/full", "w") as full:
        ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, env=ascii_only
        )
    assert (done.returncode, done.stderr) == (
        0,
        "[the lines before this one are lost: No space left on device]\nseen \\u2026\n",
    )


def test_nobody_waits_for_a_reader_of_what_is_printed() -> None:
    """A pipe that nobody reads: what it does not take is kept, up to a limit, and written when it is read again."""
    program = "\n".join(
        (
            "from spare_megatron.runtime import standard_output",
            "import os, sys, time",
            "standard_output.KEPT_BYTES = 60_000",
            "standard_output.outlive_the_disk()",
            "began_s = time.monotonic()",
            "for number in range(2_000):",
            "    print(f'{number:0100d}', flush=True)",
            "os.write(2, b'%.1f' % (time.monotonic() - began_s))",
            "os.close(2)",
            "time.sleep(0.5)",
            "print('seen')",
        )
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        took_s = float(process.stderr.read())
        lines = process.stdout.read().decode().splitlines()
        assert (process.wait(), took_s < 5) == (0, True)
    *kept, lost, last = lines
    assert [int(line) for line in kept] == list(range(len(kept)))
    assert 600 < len(kept) < 2_000
    assert (lost, last) == ("[the lines before this one are lost: nobody has read them]", "seen")


def test_streams_that_are_closed_lead_nowhere(tmp_path: Path) -> None:
    """Without them the next file that is opened would get what a library writes to standard output."""
    program = "\n".join(
        (
            "from spare_megatron.runtime.standard_output import outlive_the_disk",
            "import os, sys",
            "outlive_the_disk()",
            f"file = open({str(tmp_path / 'journal')!r}, 'wb', buffering=0)",
            "print('nowhere')",
            "os.write(1, b'nowhere')",
            "print('nowhere', file=sys.stderr)",
            "sys.exit(7 if file.fileno() > 2 and not sys.stdout.isatty() else 1)",
        )
    )
    closed = subprocess.run(["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program])
    assert (closed.returncode, (tmp_path / "journal").read_bytes()) == (7, b"")


# ------------------------------------------------------------------------------------------------- the coordinator


@pytest.mark.parametrize("place", ["journal.write", "journal.written", "journal.sync", "journal.synced"])
def test_nothing_is_said_and_no_state_goes_on_before_its_record_is_in_the_journal(tmp_path: Path, place: str) -> None:
    """The append of a commit fails. A vote that is repeated, or a Hello, must not be notified of it; once the disk is
    back all of it is decided, in order, and the journal replays."""
    run_dir, reported = RunDirectory(tmp_path), list[m.Action]()

    async def main() -> State:
        coordinator = Coordinator(Options("127.0.0.1:0", run_dir, job_attempt=1))
        coordinator._dispatcher.announce = reported.append  # type: ignore[method-assign]
        coordinator._open(m.JobSpec(2, 1, (0, 1), "microbatch", 0, 5, 2, "f"), JobDescription())
        for group in range(2):
            coordinator._apply(m.Hello(group, 0, "f", 0))
        coordinator._apply(m.Vote(0, 0, m.ReductionResult(1, 1, True, (0,))))
        reported.clear()
        before = coordinator._state
        with injected(f"{place}=EIO,for_s=0.2"):
            coordinator._apply(m.Vote(1, 0, m.ReductionResult(1, 1, True, (1,))))
            coordinator._apply(m.Vote(1, 0, m.ReductionResult(1, 1, True, (1,))))
            coordinator._apply(m.Hello(0, 0, "f", 0, held=(1, 1)))
            assert coordinator._state is before
            assert reported == []
            while coordinator._backlog.waiting:
                await asyncio.sleep(0.01)
        coordinator._journal.close()
        return coordinator._state

    state = asyncio.run(main())
    assert state.committed == (1, 1)
    assert isinstance(reported[0], m.SendCommit)
    assert replay(run_dir.journal).records == 7
    assert replay(run_dir.journal).state.committed == (1, 1)


def test_an_older_checkpoint_that_is_late_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    """It counts and its writer is notified; the one to start again from is the newer one, also after a restart."""
    run_dir, reported = RunDirectory(tmp_path), list[m.Action]()

    async def main() -> None:
        coordinator = Coordinator(Options("127.0.0.1:0", run_dir, job_attempt=1))
        coordinator._dispatcher.announce = reported.append  # type: ignore[method-assign]
        coordinator._open(m.JobSpec(2, 1, (0, 1), "microbatch", 0, 5, 2, "f"), JobDescription())
        for group in range(2):
            coordinator._apply(m.Hello(group, 0, "f", 0))
        for step in (1, 2, 3):
            if step == 3:
                coordinator._apply(m.Saved(1, 0, 2, "newer"))
            for group in range(2):
                coordinator._apply(m.Vote(group, 0, m.ReductionResult(step, 1, True, (group,))))
        coordinator._apply(m.Saved(0, 0, 1, "older"))
        coordinator._journal.close()
        assert Coordinator(Options("127.0.0.1:0", run_dir, job_attempt=1))._accepted == "newer"

    asyncio.run(main())
    assert [action.directory for action in reported if isinstance(action, m.AcceptSave)] == ["newer", "older"]
    assert run_dir.accepted() == "newer"
