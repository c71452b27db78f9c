"""A run directory that is read while it is written, and what is said of one that cannot be read; the report of it."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli import report, status, status_screen
from spare_megatron.cli.status_screen import StatusChanges, screen
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator import journal_parts
from spare_megatron.coordinator.journal import acted_on, read
from spare_megatron.launch.attempt_report import forget_last_attempt, note_end
from spare_megatron.monitor.html_report import report_html, write_report
from spare_megatron.monitor.observed_choice import observed_choice
from spare_megatron.monitor.page.followed_run import FollowedRun
from spare_megatron.monitor.page.run_drawing import RunDrawing
from spare_megatron.monitor.report_plots import MARKS_MAX, POINTS_MAX, step_plots
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.protocol.messages import Vote
from spare_megatron.runtime.run_directory import write_json
from tests.pure.journal_writer import EVENTS, shrink, written
from tests.pure.scripted_job import FAILURE_FREE_S, ScriptedJob
from tests.pure.written_job import Written


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """A job of three steps, the second of which lost a group."""
    made = Written(tmp_path, ScriptedJob())
    made.job.step()
    made.job.lose(1)
    made.job.step()
    made.job.step()
    made.go_on()
    return made


def test_the_picture_grows_with_the_files(run: Written) -> None:
    files = RunFiles(run.dir)
    first = files.look()
    assert (list(first.series.step), len(first.history.failures)) == ([1, 2, 3], 1)
    before_s = first.wall_time().wall_s
    run.job.step()
    run.go_on()
    assert files.look() is first
    assert list(first.series.step) == [1, 2, 3, 4]
    assert first.wall_time().wall_s == pytest.approx(before_s + FAILURE_FREE_S)
    assert first.wall_time() == run.job.picture().wall_time()


def test_a_torn_last_line_is_waited_for(run: Written) -> None:
    files = RunFiles(run.dir)
    whole = run.dir.metrics.read_bytes()
    torn = run.dir.journal.read_bytes()
    run.dir.metrics.write_bytes(whole[:-7])
    run.dir.journal.write_bytes(torn[:-7])
    assert list(files.look().series.step) == [1, 2]
    run.dir.metrics.write_bytes(whole)
    run.dir.journal.write_bytes(torn)
    assert list(files.look().series.step) == [1, 2, 3]


def test_a_journal_that_another_coordinator_wrote_anew_is_read_from_the_beginning(run: Written) -> None:
    files = RunFiles(run.dir)
    assert len(files.look().history.failures) == 1
    (run.dir.path / "other").mkdir()
    other = Written(run.dir.path / "other", ScriptedJob())
    other.job.step(1.0)
    other.job.step(1.0)
    other.go_on()
    other.dir.journal.replace(run.dir.journal)
    other.dir.metrics.replace(run.dir.metrics)
    picture = files.look()
    assert (list(picture.series.step), picture.history.failures) == ([1, 2], [])


def test_metrics_that_another_coordinator_wrote_anew_are_read_from_the_beginning(run: Written) -> None:
    """The journal is the same; its lines of metrics had not all been written before the takeover."""
    files = RunFiles(run.dir)
    assert list(files.look().series.step) == [1, 2, 3]
    other = run.dir.metrics.with_name("other")
    other.write_text("".join(run.dir.metrics.read_text().splitlines(keepends=True)[:2]))
    other.replace(run.dir.metrics)
    picture = files.look()
    assert (list(picture.series.step), len(picture.history.failures)) == ([1, 2], 1)


def test_metrics_that_are_replaced_during_a_look_are_read_from_the_beginning_by_the_next(
    run: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are replaced right behind the first time that the look touches the file."""
    files = RunFiles(run.dir)
    assert list(files.look().series.step) == [1, 2, 3]
    other = run.dir.metrics.with_name("other")
    other.write_text("".join(run.dir.metrics.read_text().splitlines(keepends=True)[:2]))

    def replacing(touch: Callable[..., Any]) -> Callable[..., Any]:
        def touched(path: Path, *words: Any, **named: Any) -> Any:
            found = touch(path, *words, **named)
            if path == run.dir.metrics and other.exists():
                other.replace(path)
            return found

        return touched

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", replacing(Path.open))
        patch.setattr(Path, "stat", replacing(Path.stat))
        assert list(files.look().series.step) == [1, 2, 3]
    assert not other.exists()
    assert list(files.look().series.step) == [1, 2]


def test_votes_without_a_consequence_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are, over the parts of a journal, some of them compressed."""
    shrink(monkeypatch)
    path = tmp_path / "journal.jsonl"
    written(path)
    assert journal_parts.packed_path(path, 1).exists()
    found = list(acted_on(path))
    idle = [record for record in read(path) if isinstance(record.event, Vote) and not record.actions]
    assert len(found) == len(EVENTS)
    assert len([record for record, _ in found if record is None]) == len(idle) > 20
    assert [record for record, _ in found if record] == [record for record in read(path) if record not in idle]
    one = idle[0].event
    wanted = [r for r in idle if (r.event.group, r.event.result.step) == (one.group, one.result.step)]
    assert 0 < len(wanted) < len(idle)
    voted = acted_on(path, wanted=lambda group, step: (group, step) == (one.group, one.result.step))
    assert [record for record, _ in voted if record] == [r for r in read(path) if r not in idle or r in wanted]
    _, place = found[len(found) // 2]
    assert list(acted_on(path, place)) == found[len(found) // 2 + 1 :]


BAD = {
    "no directory": (lambda run: run.dir.path.rename(run.dir.path.with_name("gone")), "there is no directory .*; give"),
    "no run": (lambda run: (run.dir.journal.unlink(), run.dir.metrics.unlink()), "has no status.json and no journal"),
    "another version": (
        lambda run: run.dir.journal.write_text('{"format": 99, "part": 1}\n'),
        f"has journal format 99, and this version of spare_megatron reads and writes format {journal_parts.FORMAT}",
    ),
    "unknown event": (
        lambda run: run.dir.journal.write_text(run.dir.journal.read_text().replace('"Hello"', '"Howdy"', 1)),
        "the journal cannot be read: .*record 2 .* unknown message type 'Howdy'",
    ),
    "damage": (lambda run: run.dir.metrics.write_text("{]\n"), "line 1 of .*metrics.jsonl is no JSON object"),
    "a job of another version": (
        lambda run: write_json(run.dir.job, {"type": "JobDescription", "colour": 1}),
        "job.json is of another version of spare_megatron",
    ),
    "unreadable": (
        lambda run: (run.dir.metrics.unlink(), run.dir.metrics.mkdir()),
        "metrics.jsonl cannot be read: EISDIR",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_directory_that_cannot_be_read_is_one_sentence(run: Written, what: str) -> None:
    spoil, reported = BAD[what]
    spoil(run)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError) as error:
        RunFiles(run.dir).look()
    assert re.search(reported, str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_a_directory_that_is_removed_while_it_is_looked_at_is_no_job_that_starts(run: Written) -> None:
    page, away = FollowedRun(0, "run", run.dir), run.dir.path.with_name("taken away")
    page.look()
    assert not page.trouble
    run.dir.path.rename(away)
    seen = page.look()
    assert seen is not None
    assert seen.head["lines"] == (page.trouble,)
    assert page.trouble.startswith("there is no directory")
    away.rename(run.dir.path)
    page.look()
    assert not page.trouble


def test_trouble_that_lasts_is_one_line(
    run: Written, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = RunFiles(run.dir)
    found = [files.look(), ConfigError("it is gone"), ConfigError("it is gone"), ConfigError("it cannot be read")]
    monkeypatch.setattr(status_screen, "looks", lambda files, picture: iter(found))
    status_screen.follow(files, files.look())
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["it is gone", "it cannot be read"]
    assert said.count("it is gone") == 1


def test_lines_of_an_older_version_are_left_out_and_said_once(run: Written) -> None:
    old = [{key: value for key, value in line.items() if key != "votes_s"} for line in run.job.lines[:2]]
    whole = run.dir.metrics.read_text()
    run.dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in old) + whole)
    files = RunFiles(run.dir)
    picture = files.look()
    assert (list(picture.series.step), picture.lines_left_out) == ([1, 2, 3], 2)
    run.job.step()
    run.go_on()
    assert files.look().lines_left_out == 2
    reported = "2 lines of metrics.jsonl left out: an older version of spare_megatron wrote what this one does not read"
    assert report_html(files.look(), "run").count(reported) == 1
    run.dir.metrics.write_text(json.dumps(old[0]) + "\n")
    with pytest.raises(ConfigError, match="1 line of metrics"):
        write_report(run.dir, run.dir.report)


class Tags(HTMLParser):
    """The tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page(run: Written) -> None:
    write_report(run.dir, run.dir.report)
    text = run.dir.report.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.seen >= {"svg", "table", "style"}
    assert not tags.seen & {"script", "link", "img"}, "the file needs nothing else"
    assert "group 1 exited" in text
    assert "What spare-plan would choose" in text


def test_a_report_escapes_what_it_is_notified(run: Written) -> None:
    text = report_html(RunFiles(run.dir).look(), "<b>runs</b>")
    assert "&lt;b&gt;runs&lt;/b&gt;" in text
    assert "<b>" not in text


def test_a_launcher_leaves_the_report_of_a_very_long_journal_to_its_user(run: Written) -> None:
    reported: list[str] = []
    with run.dir.journal.with_name("journal-000001.jsonl.gz").open("wb") as part:
        part.truncate(report.LEFT_BYTES_MAX // 5)
    report.leave_report(run.dir, reported.append)
    assert reported == [f"the journal has 9 GB; spare-report {run.dir.path} writes the report, in a while"]
    assert not run.dir.report.exists()


def test_what_goes_wrong_with_the_report_at_the_end_of_a_job_is_one_line(run: Written) -> None:
    reported: list[str] = []
    report.leave_report(run.dir, reported.append)
    assert (reported, run.dir.report.exists()) == ([], True)
    run.dir.metrics.write_text("{]\n")
    report.leave_report(run.dir, reported.append)
    assert reported == [f"there is no report: line 1 of {run.dir.metrics} is no JSON object: the file is damaged"]


def test_a_report_of_a_job_that_reports_no_loss(tmp_path: Path) -> None:
    job = ScriptedJob()
    job.step()
    job.lines[0]["loss"] = None
    made = Written(tmp_path, job)
    made.go_on()
    text = report_html(RunFiles(made.dir).look(), "run")
    assert text.count("<svg") == 2
    assert "nan" not in text


def test_the_choice_is_that_of_spare_plan_for_what_was_observed() -> None:
    """With two losses there is none; a third one is reported beside them."""
    job = ScriptedJob()
    for group in (0, 2):
        job.step()
        job.lose(group)
        job.step()
    job.step()
    picture = job.picture()
    wall_time = picture.wall_time()
    costs = picture.failures(wall_time)
    with pytest.raises(ConfigError, match="2 losses in 19 s are too few to know how often they come; 3 would do"):
        observed_choice(picture, wall_time, costs)
    found = observed_choice(picture, wall_time, [*costs, costs[0]])
    assert found.mtbf_s == pytest.approx(wall_time.wall_s / 3)
    assert found.reason.startswith("4 groups lose one every 6.")
    picture.job = replace(picture.job, tuning=replace(picture.job.tuning, standby_groups=2))
    some = observed_choice(picture, wall_time, [*costs, costs[0]])
    assert (some.time_to_train_ratio or 9) < (found.time_to_train_ratio or 0)


def test_a_job_without_a_step_has_no_report(tmp_path: Path) -> None:
    made = Written(tmp_path, ScriptedJob())
    made.go_on()
    with pytest.raises(ConfigError, match="has no committed step yet, so there is nothing to report"):
        write_report(made.dir, made.dir.report)


def test_a_report_that_cannot_be_written_is_one_sentence(run: Written) -> None:
    with pytest.raises(ConfigError, match=r"report\.html cannot be written: ENOENT"):
        write_report(run.dir, run.dir.path / "nowhere" / "report.html")


def test_a_report_of_many_steps_stays_small(tmp_path: Path) -> None:
    made = Written(tmp_path, ScriptedJob())
    made.job.step()
    made.go_on()
    picture = RunFiles(made.dir).look()
    line = made.job.lines[0]
    for step in range(2, 20 * POINTS_MAX):
        picture.series.add({**line, "step": step, "time_unix_s": line["time_unix_s"] + step})
    assert len(report_html(picture, "many")) < 500_000


def test_of_very_many_failures_the_last_ones_are_marked(run: Written) -> None:
    picture = RunFiles(run.dir).look()
    failures = picture.history.failures
    for plot in step_plots(picture):
        assert (len(plot.marks), "marked" in plot.x_name) == (int(plot.y_name != "loss"), False)
    failures += [replace(failures[0], step=step) for step in range(MARKS_MAX + 100)]
    _, times, live = step_plots(picture)
    for plot in (times, live):
        assert [failure for _, failure in plot.marks] == failures[-MARKS_MAX:]
        assert plot.x_name == "seconds since the first step (the last 500 of 601 failures are marked)"


STATUS: dict[str, Any] = {
    "phase": "running",
    "step": 3,
    "last_step": 99,
    "epoch": 2,
    "num_groups": 4,
    "live": {"0": 0, "2": 0, "3": 0},
    "load": {"0": 4, "2": 4, "3": 4},
    "learners": {"1": 1},
    "learning": {"1": "takes the state of step 3"},
    "hosts_least": 1,
    "next_save": 4,
    "failures_masked": 1,
    "saved_step": 2,
    "loss": 2.0,
    "outcome": "",
    "reason": "",
    "time_unix_s": 1030.0,
}


def test_the_screen_names_groups_by_their_load(run: Written) -> None:
    from rich.console import Console

    files = RunFiles(run.dir)
    write_json(run.dir.status, STATUS)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(files.look(), 1060.0))
    text = console.export_text()
    assert "running: step 3 of 99, epoch 2" in text
    assert "groups 0, 2-3: 4 pieces each in the step in flight" in text
    assert "group 1 (takes the state of step 3) is brought up to date" in text
    assert "some shard has one live host, whose loss would be a wipe-out" in text
    assert "last good checkpoint: step 2, next save: step 4" in text
    assert "the coordinator has written nothing for 30.00 s: look whether" in text
    assert "effective training time" in text
    assert "group 1 exited" in text
    assert not files.look().is_over


def test_other_programs_read_the_status_of_a_loss_that_is_not_finite(
    run: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_program(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    write_json(run.dir.status, {**STATUS, "loss": float("nan"), "more": [float("inf")]})
    assert status.main([str(run.dir.path), "--json"]) == 0
    read_back = json.loads(capsys.readouterr().out, parse_constant=other_program)
    assert (read_back["loss"], read_back["more"], read_back["step"]) == (None, [None], 3)


def test_without_a_terminal_each_change_is_a_line(run: Written) -> None:
    """The status once it differs, each event once, and at the end where the time went."""
    files, changes = RunFiles(run.dir), StatusChanges()
    write_json(run.dir.status, STATUS)
    first = list(changes.lines(files.look(), files.now_s()))
    assert [line[9:] for line in first] == [
        "job attempt 1 begins: 4 groups, steps 1 to 99",
        "group 1 exited",
        "running: step 3 of 99, epoch 2, loss 2.0000, 3/4 groups live, load 4, 1 failure masked",
    ]
    assert list(changes.lines(files.look(), files.now_s())) == []
    write_json(run.dir.status, {**STATUS, "time_unix_s": 1031.0, "next_save": 8})
    assert list(changes.lines(files.look(), files.now_s())) == []
    write_json(run.dir.status, {**STATUS, "step": 4})
    assert [line[9:28] for line in changes.lines(files.look(), files.now_s())] == ["running: step 4 of "]
    run.job.leave(1.0)
    run.go_on()
    last = list(changes.lines(files.look(), files.now_s()))
    assert last[0][9:].startswith("job attempt 1 ends, left")
    assert last[-1].startswith("effective training time")


def test_a_job_whose_coordinator_writes_nothing_is_not_shown_as_if_it_ran(run: Written) -> None:
    """All its processes have been killed: nothing in the directory says so but the age of the status."""
    write_json(run.dir.status, STATUS)
    assert "nothing for" not in status.readable_status(run.dir)[1]
    an_hour_ago = run.dir.status.stat().st_mtime - 3600
    os.utime(run.dir.status, (an_hour_ago, an_hour_ago))
    said = "the coordinator has written nothing for 1:00 h: look whether the job's launcher still runs"
    assert status.readable_status(run.dir)[1].endswith(said)
    note_end(run.dir, ExitCode.FAILED)
    assert status.readable_status(run.dir)[1].endswith("the launcher has left with exit code 1")


def test_without_a_terminal_a_line_says_that_the_coordinator_writes_nothing(run: Written) -> None:
    files, changes = RunFiles(run.dir), StatusChanges()
    write_json(run.dir.status, STATUS)
    list(changes.lines(files.look(), STATUS["time_unix_s"] + 8.0))
    (line,) = changes.lines(files.look(), STATUS["time_unix_s"] + 12.0)
    assert line[9:].startswith("the coordinator has written nothing for 12.00 s")
    assert list(changes.lines(files.look(), STATUS["time_unix_s"] + 13.0)) == []
    write_json(run.dir.status, {**STATUS, "time_unix_s": STATUS["time_unix_s"] + 14.0})
    assert [one[9:] for one in changes.lines(files.look(), STATUS["time_unix_s"] + 14.5)] == [
        "the coordinator writes again"
    ]


def test_the_watching_ends_with_the_job(run: Written) -> None:
    run.job.leave(1.0)
    run.go_on()
    assert RunFiles(run.dir).look().is_over


def test_a_wipe_out_is_the_end_once_no_launcher_can_start_the_job_again(run: Written) -> None:
    run.job.lose(*run.job.state.live)
    run.go_on()
    files = RunFiles(run.dir)
    assert files.look().is_over, "of ranks that torchrun has started nobody starts the job again"
    write_json(run.dir.began, {"job": "j", "accepted": ""})
    assert not files.look().is_over
    note_end(run.dir, ExitCode.NO_CHECKPOINT)
    assert files.look().is_over
    forget_last_attempt(run.dir)
    assert not files.look().is_over


def test_a_launcher_that_has_left_is_the_end_whatever_the_journal_says(run: Written) -> None:
    """Such as after a second signal."""
    files = RunFiles(run.dir)
    assert not files.look().is_over
    note_end(run.dir, ExitCode.FAILED)
    picture = files.look()
    assert picture.is_over
    head = RunDrawing().frame(picture, 2000.0).head
    assert (head["phase"], head["tone"]) == ("failed", "bad")


def test_a_run_directory_without_a_status_is_named(run: Written, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(run.dir.path)]) == 2
    assert "has no status.json now: a job attempt begins, or its coordinator cannot write" in capsys.readouterr().err
    run.dir.journal.unlink()
    assert status.main([str(run.dir.path)]) == 2
    assert "has no status.json; give the --run-dir of a job that has been started" in capsys.readouterr().err


def test_a_line_without_what_every_line_has_is_one_sentence(run: Written) -> None:
    run.dir.metrics.write_text(run.dir.metrics.read_text().replace('"live_groups"', '"lve_groups"', 1))
    with pytest.raises(ConfigError, match=r"do not fit together \(KeyError: 'live_groups'\): one of them is damaged"):
        RunFiles(run.dir).look()


@pytest.mark.parametrize("text", ["[]", "5", "{", '{"step": 3}', "\x00", '{"time_unix_s": "now"}'])
def test_a_status_that_is_none_is_one_sentence(run: Written, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run.dir.status.write_text(text)
    assert status.main([str(run.dir.path)]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"spare-status: {run.dir.status} ")
    assert re.search(r" holds a \w+ and no JSON object| is no JSON: | is damaged or of another version: ", reported)
    assert reported.count("\n") == 1
