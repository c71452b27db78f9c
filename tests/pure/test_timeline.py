"""The timeline of a job whose times are known, written as a Perfetto trace and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli import timeline
from spare_megatron.config.exits import ExitCode
from spare_megatron.metrics.metrics import SLOWEST_MAX, _slowest
from spare_megatron.monitor.trace_book import TraceBook
from spare_megatron.monitor.trace_files import perfetto_trace
from spare_megatron.monitor.trace_sample import SLICES_MAX, choose_steps, with_lines
from spare_megatron.protocol.messages import CaughtUp, Hello, Ready, Saved
from tests.pure.scripted_job import BEGAN_S, COMPUTE_S, FAILURE_FREE_S, REDUCE_S, REST_S, SPEC, ScriptedJob
from tests.pure.written_job import Written
from tests.trace_reading import ReadTrace, read_trace


def failed_and_returned() -> ScriptedJob:
    """Group 1 is lost in step 2, patched by group 0 within 1 s, and back for step 5."""
    job = ScriptedJob()
    job.step()
    job.now_s += REST_S + COMPUTE_S + 0.25
    job.lose(1, detect_s=0.125)
    job.now_s += 1.0 + REDUCE_S
    job.votes({}, {0: 1.0})
    job.report()
    job.tell(Hello(1, 1, "f", 0, process_nonce="again"))
    job.now_s += 0.5
    job.step()
    job.tell(Ready(1, 1))
    job.now_s += 1.0
    job.tell(CaughtUp(1, 1, 1, job.state.committed[0]))
    job.step()
    job.tell(CaughtUp(1, 1, 1, job.state.committed[0]))
    job.step()
    return job


def drawn(job: ScriptedJob, slices_max: int = SLICES_MAX) -> ReadTrace:
    """The trace of what is shown of the job, read back."""
    book = TraceBook(with_lines(choose_steps(job.lines, slices_max), job.lines))
    for record, _, _ in job.transitions:
        book.take(record)
    return read_trace(perfetto_trace(book.finish()))


def reported_lines(trace: ReadTrace) -> list[str]:
    """What is on the tracks of the groups, times from the beginning of the first step."""
    lines = []
    for one in trace.slices:
        if one.track[0] == "groups":
            times = f"{one.begin_s - BEGAN_S:.4g}-{one.end_s - BEGAN_S:.4g}"
            lines.append(f"{'/'.join(one.track[1:])}: {'  ' * one.depth}{one.name} {times} {one.flows or ''}".rstrip())
    return lines


GOLDEN = [
    "group 0: compute 0.25-2.25",
    "group 0: reduce 2.25-2.75",
    "group 0: vote 2.75-2.75",
    "group 0: commit 2.75-3",
    "group 0: compute 3-5",
    "group 0: patch 5.25-6.25 (1,)",
    "group 0: reduce 6.25-6.75",
    "group 0: vote 6.75-6.75",
    "group 0: commit 6.75-7.5 (1,)",
    "group 0: compute 7.5-9.5",
    "group 0: reduce 9.5-10",
    "group 0: vote 10-10",
    "group 0: commit 10-11.25",
    "group 0: compute 11.25-13.25",
    "group 0: reduce 13.25-13.75",
    "group 0: vote 13.75-13.75",
    "group 0: commit 13.75-14",
    "group 0: compute 14-16",
    "group 0: reduce 16-16.5",
    "group 0: vote 16.5-16.5",
    "group 0: commit 16.5-16.5",
    "group 1: compute 0.25-2.25",
    "group 1: reduce 2.25-2.75",
    "group 1: vote 2.75-2.75",
    "group 1: commit 2.75-2.75",
    "group 1: compute, reduce 2.75-5.25",
    "group 1: lost 5.25-13.75 (1,)",
    "group 1:   start 6.75-10",
    "group 1:   transfer 10-11",
    "group 1:   catch up 11-13.75",
    "group 1: commit 13.75-14",
    "group 1: compute 14-16",
    "group 1: reduce 16-16.5",
    "group 1: vote 16.5-16.5",
    "group 1: commit 16.5-16.5",
    "group 2: compute 0.25-2.25",
    "group 2: reduce 2.25-2.75",
    "group 2: vote 2.75-2.75",
    "group 2: commit 2.75-3",
    "group 2: compute 3-5",
    "group 2: reduce 5.25-6.75",
    "group 2: vote 6.75-6.75",
    "group 2: commit 6.75-7.5",
    "group 2: compute 7.5-9.5",
    "group 2: reduce 9.5-10",
    "group 2: vote 10-10",
    "group 2: commit 10-11.25",
    "group 2: compute 11.25-13.25",
    "group 2: reduce 13.25-13.75",
    "group 2: vote 13.75-13.75",
    "group 2: commit 13.75-14",
    "group 2: compute 14-16",
    "group 2: reduce 16-16.5",
    "group 2: vote 16.5-16.5",
    "group 2: commit 16.5-16.5",
    "group 2/gives state to group 1: transfer 10-16.5",
    "group 3/gives state to group 1: transfer 10-16.5",
]
"""Without the own track of group 3, which did what group 2 did."""


def test_each_group_has_a_track_of_what_it_did() -> None:
    trace = drawn(failed_and_returned())
    assert [line for line in reported_lines(trace) if not line.startswith("group 3:")] == GOLDEN
    second, third = (
        [(one.name, one.begin_s, one.end_s) for one in trace.of("groups", f"group {group}")] for group in (2, 3)
    )
    assert second == third
    assert trace.tracks == [
        ("job",),
        *(("job", name) for name in ("lives", "epochs", "events", "steps")),
        ("groups",),
        ("groups", "group 0"),
        ("groups", "group 1"),
        ("groups", "group 2"),
        ("groups", "group 2", "gives state to group 1"),
        ("groups", "group 3"),
        ("groups", "group 3", "gives state to group 1"),
    ]


def test_slices_say_what_the_journal_says() -> None:
    trace = drawn(failed_and_returned())
    assert [one.name for one in trace.of("job", "epochs")] == ["epoch 1", "epoch 2", "epoch 3"]
    assert [one.name for one in trace.of("job", "steps")] == [f"step {step}" for step in range(1, 6)]
    assert [one.name.split(":")[0] for one in trace.of("job", "events")] == [
        "job attempt 1 begins",
        "group 1 exited",
        "group 1 is back after 8.50 s, from step 5 on",
    ]
    [lost] = [one for one in trace.of("groups", "group 1") if one.name == "lost"]
    assert lost.details["reason"].startswith("group 1 exited; epoch 2 with 3 of 4 groups; step 2: 3 pieces")
    [patch] = [one for one in trace.of("groups", "group 0") if one.name == "patch"]
    assert patch.details == {"step": 2, "pieces": 3}


def test_an_arrow_leads_from_the_failure_to_the_patch_to_the_commit() -> None:
    trace = drawn(failed_and_returned())
    assert trace.flows == {1}
    assert [(one.track[1], one.name, one.details["step"]) for one in trace.flow(1)] == [
        ("group 1", "lost", 2),
        ("group 0", "patch", 2),
        ("group 0", "commit", 2),
    ]


def test_lives_follow_each_other_whatever_their_numbers() -> None:
    """A job attempt whose ranks never came has no record; one whose launcher was killed has no end but the next one."""
    job = ScriptedJob()
    job.step()
    job.now_s += 5.0
    job.begin_coordinator()
    job.open(replace(SPEC, first_step=1), 3, begun_s=job.now_s + 2.0)
    job.step()
    job_attempts = drawn(job).of("job", "lives")
    assert [(one.name, one.details["outcome"]) for one in job_attempts] == [
        ("job attempt 1", "unknown"),
        ("job attempt 3", "running"),
    ]
    assert job_attempts[0].end_s == job_attempts[1].begin_s == BEGAN_S + FAILURE_FREE_S + 5.0
    assert job_attempts[1].end_s == job_attempts[1].begin_s + 2.0 + FAILURE_FREE_S


def test_a_save_is_drawn_beside_the_steps_and_where_it_kept_its_group() -> None:
    job = ScriptedJob(replace(SPEC, save_every=2))
    job.step()
    job.step()
    job.now_s += 0.5
    job.tell(Saved(0, 0, 2, "step-2"))
    job.step(FAILURE_FREE_S + 0.75, save_s=0.75)
    job.step()
    trace = drawn(job)
    first, second = trace.of("groups", "group 0", "saves")
    committed_s = BEGAN_S + 2 * FAILURE_FREE_S
    assert (first.begin_s, first.end_s, first.details) == (
        committed_s,
        committed_s + 0.5 + FAILURE_FREE_S + 0.75,
        {"step": 2, "counts": True},
    )
    assert second.details == {"step": 4, "counts": False}
    [kept] = [one for one in trace.of("groups", "group 0") if one.name == "save"]
    assert (kept.begin_s, kept.end_s) == (committed_s + 0.5 + REST_S, committed_s + 0.5 + REST_S + 0.75)


def test_of_a_long_job_a_sample_is_shown_and_said() -> None:
    """All steps with a loss, and those beside; each step is drawn or is in a slice that says that it is not."""
    job = ScriptedJob()
    for step in range(1, 91):
        if step == 50:
            job.lose(1)
        job.step()
    whole, trace = drawn(job), drawn(job, 400)
    assert len(whole.of("job", "steps")) == 90
    assert not whole.of("job", "what is shown")
    shown = {one.name for one in trace.of("job", "steps")}
    assert shown >= {"step 49", "step 50", "step 51"}
    covered = 0
    for one in trace.of("job", "steps"):
        words = one.name.split()
        covered += 1 if words[0] == "step" else int(words[3]) - int(words[1]) + 1
    assert covered == 90
    assert len(trace.slices) < 400 + 90
    [note] = trace.of("job", "what is shown")
    assert note.name == (
        "sampled: 21 of 90 steps: one in 11 with the next, and all in which groups were lost or came back, with those "
        "beside"
    )


def test_of_many_groups_a_sample_is_shown_and_said() -> None:
    line = {**reported_line(), "live_groups": 1000}
    sample = choose_steps({**line, "step": step} for step in range(1, 2001))
    assert (sample.every_group, len(sample.steps) * 60 * 5 < SLICES_MAX * 1.1) == (25, True)
    assert sample.note() == (
        "sampled: 250 of 2000 steps: one in 16 with the next, one group in 25, the slowest of each step, and those "
        "that were lost or computed pieces of lost ones"
    )


def test_groups_of_which_the_line_does_not_tell_are_drawn_at_the_median_pace() -> None:
    job = ScriptedJob()
    job.step()
    job.lines[0]["slowest"] = [one for one in job.lines[0]["slowest"] if one[0] != 3]
    trace = drawn(job)
    first, last = (trace.of("groups", f"group {group}") for group in (0, 3))
    assert [(one.name, one.begin_s, one.end_s) for one in first] == [(one.name, one.begin_s, one.end_s) for one in last]
    assert [one.details.get("measured") for one in first] == [None] * 4
    assert [one.details.get("measured") for one in last] == [False, False, False, None]


def reported_line() -> dict[str, Any]:
    """A line of metrics.jsonl."""
    job = ScriptedJob()
    job.step()
    return job.lines[0]


def test_a_line_tells_of_the_slowest_groups_only() -> None:
    job = ScriptedJob()
    job.step(FAILURE_FREE_S + 1.0, {2: COMPUTE_S + 1.0})
    assert job.lines[0]["slowest"] == [[2, 3.0, 0.0, 0.5], [0, 2.0, 0.0, 1.5], [1, 2.0, 0.0, 1.5], [3, 2.0, 0.0, 1.5]]
    times = {group: {"compute_s": float(group)} for group in range(1000)}
    assert [group for group, *_ in _slowest(times)] == list(range(999, 999 - SLOWEST_MAX, -1))


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Written(tmp_path, failed_and_returned())
    run.go_on()
    assert timeline.main([str(tmp_path)]) == ExitCode.FINISHED
    assert capsys.readouterr().out == f"{run.dir.timeline}: 89 slices, 0.0 MB, for https://ui.perfetto.dev\n"
    assert reported_lines(read_trace(run.dir.timeline.read_bytes())) == reported_lines(drawn(failed_and_returned()))


def test_what_cannot_be_drawn_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Written(tmp_path, ScriptedJob())
    run.go_on()
    assert timeline.main([str(tmp_path)]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        f"spare-timeline: {tmp_path} has no committed step yet, so there is nothing to draw\n"
    )
    run.job.step()
    run.go_on()
    assert timeline.main([str(tmp_path), "-o", str(tmp_path / "no" / "where")]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        f"spare-timeline: the trace {tmp_path}/no/where cannot be written: ENOENT (No such file or directory)\n"
    )


def test_lines_of_an_older_version_are_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Written(tmp_path, failed_and_returned())
    del run.job.lines[0]["votes_s"]
    run.go_on()
    assert timeline.main([str(tmp_path)]) == ExitCode.FINISHED
    reported = "1 line of metrics.jsonl left out: an older version of spare_megatron wrote what this one does not read"
    assert capsys.readouterr().out.splitlines()[1:] == [reported]
    trace = read_trace(run.dir.timeline.read_bytes())
    assert [one.name for one in trace.of("job", "what is shown")] == [reported]
    assert trace.of("job", "steps")[0].name == "step 1 is not shown"
