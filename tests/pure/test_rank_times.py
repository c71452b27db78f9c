"""What ranks tell of their steps: how it is written, found again, and drawn in a timeline."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from spare_megatron.cli import timeline
from spare_megatron.config.exits import ExitCode
from spare_megatron.metrics.rank_lines import BROKEN, RankLine, RankPart, encoded, parsed
from spare_megatron.monitor.rank_files import RankFiles
from spare_megatron.monitor.trace_files import draw_timeline
from spare_megatron.monitor.trace_sample import SLICES_MAX, choose_steps
from spare_megatron.runtime.failpoints import injected
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker import rank_parts
from spare_megatron.worker.rank_parts import WrittenRankParts
from tests.pure.scripted_job import BEGAN_S, ScriptedJob
from tests.pure.test_timeline import failed_and_returned, reported_line
from tests.pure.written_job import Written
from tests.trace_reading import ReadTrace, read_trace

FAILURE_FREE = (("compute", 0.25, 2.25), ("reduce", 2.25, 2.75), ("vote", 2.75, 2.75), ("commit", 2.75, 3.0))
"""The first step of the scripted job, from its beginning."""


def tell(run_dir: RunDirectory, place: tuple[int, int, int], *lines: RankLine, torn: bytes = b"") -> Path:
    """Write what a rank reported; ``place``: group, position, incarnation."""
    path = run_dir.rank_times_of(*place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encoded, lines)) + torn)
    return path


def steps_reported(run_dir: RunDirectory, step: int) -> list[int]:
    """The steps of the lines that are found for ``step`` of group 0, position 0."""
    return [line.step for _, line in RankFiles(run_dir).lines(0, 0, step, [0])]


# ------------------------------------------------------------------------------------------------------------- writing


def test_a_line_has_the_parts_of_a_step_by_the_clock_of_the_host(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).rank_times_of(3, 1, 2)
    assert path == tmp_path / "rank_times" / "group-3" / "rank-1.incarnation-2.jsonl"
    parts, now_s = WrittenRankParts(path), time.monotonic()
    parts.note("compute", now_s, now_s + 2.0)
    parts.note("compute", now_s + 2.0, now_s + 2.5)
    parts.note(BROKEN, now_s + 2.5, now_s + 2.5)
    parts.note("vote", now_s + 3.0, now_s + 3.5)
    parts.end(7)
    parts.end(8)
    parts.note("compute", now_s + 4.0, now_s + 5.0)
    parts.end(9)
    parts.close()
    first, second = (parsed(text) for text in path.read_bytes().splitlines())
    assert first is not None
    assert second is not None
    assert first.began_s == pytest.approx(time.time() - (time.monotonic() - now_s), abs=0.1)
    assert (first.step, first.parts) == (7, [("compute", 0.0, 2.5), ("vote", 3.0, 3.5)])
    assert (second.step, second.began_s - first.began_s) == (9, pytest.approx(4.0, abs=1e-5))
    assert len(path.read_bytes()) < 300, "docs/operating.md says how long a line is"


def note_steps(parts: WrittenRankParts, *steps: int) -> None:
    """Steps of one part each; the thread has written one before the next one comes."""
    for step in steps:
        parts.note("compute", float(step), step + 0.5)
        parts.end(step)
        while parts._waiting.qsize():
            time.sleep(0.001)
        time.sleep(0.01)


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDirectory(tmp_path)
    path = run_dir.rank_times_of(0, 0, 0)
    with injected("rank_times.write=ENOSPC,after=1,times=2"):
        parts = WrittenRankParts(path)
        note_steps(parts, 1, 2, 3, 4)
        parts.close()
    assert [message.split(": ", 1)[1] for message in caplog.messages] == [
        "ENOSPC (No space left on device); steps will lack in it"
    ]
    assert [steps_reported(run_dir, step) for step in (1, 2, 3, 4)] == [[1], [], [], [4]]


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, cut = RunDirectory(tmp_path), [None, 9]
    real = os.write
    monkeypatch.setattr(rank_parts.os, "write", lambda to, data: real(to, data[: cut.pop(0) if cut else None]))
    parts = WrittenRankParts(run_dir.rank_times_of(0, 0, 0))
    note_steps(parts, 1, 2, 3)
    parts.close()
    assert [steps_reported(run_dir, step) for step in (1, 2, 3)] == [[1], [], [3]]


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_parts, "WAITING_MAX", 5)
    monkeypatch.setattr(rank_parts, "CLOSE_S", 0.05)
    with injected("rank_times.write=sleep:3"):
        parts, began_s = WrittenRankParts(tmp_path / "rank.jsonl"), time.monotonic()
        for step in range(100):
            parts.note("compute", float(step), step + 0.5)
            parts.end(step)
        assert parts._waiting.qsize() <= 5
        parts.close()
        assert time.monotonic() - began_s < 2.0


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank_times").touch()
    parts = WrittenRankParts(RunDirectory(tmp_path).rank_times_of(0, 0, 0))
    note_steps(parts, 1, 2)
    parts.close()
    assert [errno.errorcode[errno.ENOTDIR] in message for message in caplog.messages] == [True]


# ------------------------------------------------------------------------------------------------------------- reading


def test_a_step_is_found_in_a_long_file_by_reading_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDirectory(tmp_path)
    lines = [RankLine(step, float(step), FAILURE_FREE) for step in range(10, 20_000, 2)]
    tell(run_dir, (0, 0, 0), *lines, torn=b'{"step":20000,"began_s":2')
    read = []
    monkeypatch.setattr("spare_megatron.monitor.rank_files.parsed", lambda text: read.append(text) or parsed(text))
    for step in (10, 12, 9_998, 19_996, 19_998):
        assert steps_reported(run_dir, step) == [step]
    for step in (0, 9, 11, 9_999, 20_000, 30_000):
        assert steps_reported(run_dir, step) == []
    assert len(read) < 11 * 60
    assert not RankFiles(run_dir).left_out


@pytest.mark.parametrize(
    "text", [b"[1]", b"{}", b"no JSON", b'{"step":"2","began_s":1,"parts":[]}', b'{"v":2,"step":2}']
)
def test_lines_that_are_not_ours_are_left_out_and_said(tmp_path: Path, text: bytes) -> None:
    run_dir = RunDirectory(tmp_path)
    path = tell(
        run_dir,
        (0, 0, 0),
        RankLine(1, 1.0, FAILURE_FREE),
        torn=text + b"\n\n" + encoded(RankLine(3, 3.0, FAILURE_FREE)),
    )
    files = RankFiles(run_dir)
    assert files.positions == {0: [0]}
    assert [len(files.lines(0, 0, step, [0])) for step in (1, 2, 3)] == [1, 0, 1]
    assert files.left_out
    path.write_bytes((text + b"\n") * 10_000)
    began_s = time.monotonic()
    assert steps_reported(run_dir, 2) == []
    assert time.monotonic() - began_s < 1.0


def test_a_directory_without_files_has_no_ranks(tmp_path: Path) -> None:
    files = RankFiles(RunDirectory(tmp_path))
    assert (files.positions, files.lines(0, 0, 1, [0, 1]), files.left_out) == ({}, [], False)


# ------------------------------------------------------------------------------------------------------------- drawing


def drawn(run: Written) -> ReadTrace:
    """The trace that the command writes, read back."""
    run.go_on()
    path = run.dir.path / "trace"
    assert timeline.main([str(run.dir.path), "-o", str(path)]) == ExitCode.FINISHED
    return read_trace(path.read_bytes())


def reported(trace: ReadTrace, group: int, position: int) -> list[tuple[str, float, float, int]]:
    """(name, beginning, end, step) of what is on a rank's track, times from the beginning of the first step."""
    slices = trace.of("groups", f"group {group}", f"rank {position}")
    assert not any(one.depth for one in slices)
    return [(one.name, one.begin_s - BEGAN_S, one.end_s - BEGAN_S, one.details["step"]) for one in slices]


def test_a_rank_s_track_is_below_that_of_its_group(tmp_path: Path) -> None:
    """Of group 0 two ranks, of group 1 one rank of each of its starts; a start that was in no step is not shown."""
    run = Written(tmp_path, failed_and_returned())
    patched: list[RankPart] = [("compute", 0, 2), (BROKEN, 2, 2.25), ("patch", 2.25, 3.25), ("reduce", 3.25, 3.75)]
    for position in (0, 1):
        lines = RankLine(1, BEGAN_S, FAILURE_FREE), RankLine(2, BEGAN_S + 3.0, patched)
        tell(run.dir, (0, position, 0), *lines, torn=b'{"step":3,')
    tell(run.dir, (1, 0, 0), RankLine(1, BEGAN_S, FAILURE_FREE))
    joined = RankLine(5, BEGAN_S + 10.0, [("transfer", 0.0, 1.0), ("catch up", 1.0, 3.75), ("compute", 4.0, 6.0)])
    tell(run.dir, (1, 0, 1), joined)
    tell(run.dir, (1, 0, 2), RankLine(1, 0.0, FAILURE_FREE))
    tell(run.dir, (77, 0, 0), RankLine(1, 0.0, FAILURE_FREE))
    trace = drawn(run)
    assert reported(trace, 0, 0) == reported(trace, 0, 1)
    assert reported(trace, 0, 0) == [
        ("compute", 0.25, 2.25, 1),
        ("reduce", 2.25, 2.75, 1),
        ("vote", 2.75, 2.75, 1),
        ("commit", 2.75, 3.0, 1),
        ("compute", 3.0, 5.0, 2),
        (BROKEN, 5.0, 5.25, 2),
        ("patch", 5.25, 6.25, 2),
        ("reduce", 6.25, 6.75, 2),
    ]
    assert reported(trace, 1, 0)[4:] == [
        ("transfer", 10.0, 11.0, 5),
        ("catch up", 11.0, 13.75, 5),
        ("compute", 14.0, 16.0, 5),
    ]
    tracks = [track for track in trace.tracks if "rank" in track[-1]]
    assert tracks == [
        ("groups", *pair) for pair in (("group 0", "rank 0"), ("group 0", "rank 1"), ("group 1", "rank 0"))
    ]
    assert not trace.of("job", "what is shown")


def test_without_the_files_all_is_as_without_the_flag(tmp_path: Path) -> None:
    run = Written(tmp_path, failed_and_returned())
    before = drawn(run)
    run.dir.rank_times.mkdir()
    assert drawn(run) == before


def test_parts_that_overlap_follow_each_other(tmp_path: Path) -> None:
    job = ScriptedJob()
    job.step()
    run = Written(tmp_path, job)
    tell(run.dir, (0, 0, 0), RankLine(1, BEGAN_S, [("compute", 0, 1.0), ("reduce", 0.5, 2.0), ("vote", 1.0, 1.5)]))
    assert reported(drawn(run), 0, 0) == [("compute", 0.0, 1.0, 1), ("reduce", 1.0, 2.0, 1), ("vote", 2.0, 2.0, 1)]


def test_of_a_group_of_many_ranks_the_first_the_last_and_the_slowest_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ScriptedJob()
    for _ in range(3):
        job.step()
    run = Written(tmp_path, job)
    for position in range(12):
        slow_s = {5: 0.5, 10: 0.25}.get(position, 0.0)
        parts = [("compute", 0.25, 2.0 + slow_s), ("reduce", 2.0 + slow_s, 2.75)]
        tell(run.dir, (2, position, 0), *(RankLine(step, BEGAN_S + 2.75 * step, parts) for step in (1, 2, 3)))
    trace = drawn(run)
    assert [track[2] for track in trace.tracks if len(track) == 3] == ["rank 0", "rank 5", "rank 10", "rank 11"]
    reported = "of each group ranks are sampled: the first, the last, and 2 that computed longest"
    assert capsys.readouterr().out.splitlines()[1:] == [reported]
    assert [one.name for one in trace.of("job", "what is shown")] == [reported]


def test_what_could_not_be_read_is_said(tmp_path: Path) -> None:
    job = ScriptedJob()
    job.step()
    run = Written(tmp_path, job)
    path = tell(run.dir, (0, 0, 0), torn=b"{}\n")
    reported = "rank_times is not read as a whole: lines are torn, or of another version of spare_megatron"
    assert [one.name for one in drawn(run).of("job", "what is shown")] == [reported]
    path.unlink()
    path.mkdir()
    assert [one.name for one in drawn(run).of("job", "what is shown")] == [reported]


def test_with_tracks_of_ranks_fewer_steps_are_shown(tmp_path: Path) -> None:
    """So that a trace stays as small."""
    line = reported_line()
    lines = [{**line, "step": step} for step in range(1, 5001)]
    for ranks in (0, 4, 8):
        shown = len(choose_steps(lines, ranks=ranks).steps)
        assert 0.8 * SLICES_MAX < shown * 4 * 5 * (1 + ranks) < 1.1 * SLICES_MAX
    job = ScriptedJob()
    for _ in range(90):
        job.step()
    run = Written(tmp_path, job)
    run.go_on()
    for group in range(4):
        for position in range(8):
            reported_by_it = [RankLine(step, BEGAN_S + 2.75 * step, FAILURE_FREE) for step in range(1, 91)]
            tell(run.dir, (group, position, 0), *reported_by_it)
    slices = draw_timeline(run.dir, 4000).slices
    assert 2000 < len(slices) < 4000 + 90
