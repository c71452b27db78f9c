"""A real job: the account of its wall time, its report, its timeline and its status; two of the parts by the injector's
own clock."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.journal import read
from spare_megatron.coordinator.records import metrics_lines
from spare_megatron.metrics.rank_lines import BROKEN
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.monitor.step_parts import StepCircumstances, UsualStep, parts_of
from spare_megatron.protocol.messages import AcceptSave, SendCommit, Vote
from spare_megatron.runtime.run_directory import RunDirectory
from tests.process.harness import ROOT, launch
from tests.trace_reading import ReadSlice, ReadTrace, read_trace

pytestmark = pytest.mark.alone  # times of ranks are compared with those of the coordinator
SLOW_S, HEARTBEAT_S = 2.0, 2.0
NEAR_S = 0.25
"""So far a rank may be from the coordinator, on a machine that is busy."""
FAULTS = (
    "sigkill:group=0,step=15,at=reduce",
    "sigstop:group=1,step=25,at=reduce",
    f"slow={SLOW_S}:group=2,step=35,at=forward",
    "sigkill:group=3,step=45,at=forward",
    "sigkill:group=4,step=55,at=reduce",
    "sigkill:group=5,step=65,at=vote",
)
"""With redundancy 3 of 6 groups, the fourth or fifth loss is a wipe-out."""


@dataclass(frozen=True)
class Ran:
    """A job with failures that has ended."""

    run_dir: RunDirectory
    took_s: float
    """By this process's clock."""

    def injected_unix_s(self, index: int) -> float:
        """When the rank was about to do this fault, by the file system's clock."""
        return (self.run_dir.injected / f"{index}-rank-0").stat().st_mtime


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    path = tmp_path_factory.mktemp("failures")
    began_s = time.monotonic()
    words = ("--steps", "72", "--pieces", "2", "--piece-s", "0.05", "--redundancy", "3", "--save-interval", "10")
    job = launch(
        path / "run",
        *words,
        "--save",
        str(path / "save"),
        "--heartbeat-s",
        str(HEARTBEAT_S),
        "--spare-rank-times",
        groups=6,
        group_size=1,
        inject=FAULTS,
    )
    job.finish()
    return Ran(RunDirectory(job.run_dir), time.monotonic() - began_s)


def test_named_parts_cover_the_wall_time(ran: Ran) -> None:
    picture = RunFiles(ran.run_dir).look()
    wall_time = picture.wall_time()
    print({name: round(seconds, 3) for name, seconds in wall_time.parts.items()}, ran.took_s)
    assert len(picture.history.failures) == 5
    assert all(seconds >= 0 for seconds in wall_time.parts.values())
    assert wall_time.parts["unknown"] <= 0.03 * wall_time.wall_s, "0.01 on a machine that is not busy with other work"
    job_attempts, first = picture.history.job_attempts, next(metrics_lines(ran.run_dir.metrics))
    began_s = first["time_unix_s"] - first["step_time_s"] - first["start_s"]
    assert wall_time.wall_s == pytest.approx((job_attempts[-1].ended_s or 0.0) - began_s, abs=0.01)
    assert wall_time.wall_s < ran.took_s, "the launcher begins before the coordinator"


def test_two_parts_are_what_the_injector_did(ran: Ran) -> None:
    """A group that sleeps in step 35; a stopped group, from its last breath to the decision."""
    picture = RunFiles(ran.run_dir).look()
    wall_time = picture.wall_time()
    line = next(line for line in metrics_lines(ran.run_dir.metrics) if (line["life"], line["step"]) == (1, 35))
    assert parts_of(line, UsualStep(), StepCircumstances()).parts["slowest"] == pytest.approx(SLOW_S, abs=0.3)
    assert wall_time.parts["slowest"] >= SLOW_S - 0.3
    silent = next(f for f in picture.failures(wall_time) if f.failure.groups == (1,))
    assert "silent" in silent.failure.causes[0]
    decided_s = silent.failure.time_s - ran.injected_unix_s(1)
    assert decided_s >= HEARTBEAT_S / 2
    assert silent.parts["detect"] == pytest.approx(decided_s, abs=0.2)


def test_the_launcher_leaves_a_report(ran: Ran) -> None:
    text = ran.run_dir.report.read_text()
    assert "effective training time" in text
    assert "group 1 (rank 0) silent: no heartbeat" in text
    assert "could not be masked" in text
    assert "<svg" in text
    outside = [word for word in text.split() if "://" in word and "w3.org" not in word and "purl.org" not in word]
    assert not outside, "the file needs nothing else"


@pytest.fixture(scope="module")
def trace(ran: Ran) -> ReadTrace:
    path = ran.run_dir.path / "trace"
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "spare_megatron.cli.timeline",
        str(ran.run_dir.path),
        "-o",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.FINISHED, "")
    return read_trace(path.read_bytes())


def test_slices_of_the_timeline_are_what_the_journal_says(ran: Ran, trace: ReadTrace) -> None:
    """Each vote that a commit took, each commit, loss and checkpoint, at its time."""
    voted: dict[tuple[int, int], float] = {}
    seen = Counter[tuple[str, str, int, float]]()
    for record in read(ran.run_dir.journal):
        event, now_s = record.event, record.time_unix_s
        if isinstance(event, Vote) and event.result.ok:
            voted[event.group, event.result.step] = now_s
        for action in record.actions:
            if isinstance(action, SendCommit):
                for group in action.groups:
                    seen["vote", f"group {group}", action.step, voted[group, action.step]] += 1
                    seen["commit", f"group {group}", action.step, now_s] += 1
            elif isinstance(action, AcceptSave):
                seen["saved", f"group {action.group}", action.step, now_s] += 1
    drawn = Counter[tuple[str, str, int, float]]()
    for one in trace.slices:
        if len(one.track) > 2 and one.track[2].startswith("rank"):
            continue
        if one.name in ("vote", "commit"):
            drawn[one.name, one.track[1], one.details["step"], round(one.begin_s, 6)] += 1
        elif one.details.get("counts"):
            drawn["saved", one.track[1], one.details["step"], round(one.end_s, 6)] += 1
    assert seen == drawn


def test_arrows_of_the_timeline_lead_from_each_masked_failure_to_its_commit(ran: Ran, trace: ReadTrace) -> None:
    history = RunFiles(ran.run_dir).look().history
    lost = [one for one in trace.slices if one.name == "lost"]
    assert Counter((one.track[1], round(one.begin_s, 6)) for one in lost) == Counter(
        (f"group {group}", failure.time_s) for failure in history.failures for group in failure.groups
    )
    masked = {(failure.step, group) for failure in history.failures if failure.masked for group in failure.groups}
    patched = set()
    for number in trace.flows:
        failed, patch, commit = trace.flow(number)
        assert [one.name for one in (failed, patch, commit)] == ["lost", "patch", "commit"]
        assert failed.details["step"] == patch.details["step"] == commit.details["step"]
        assert patch.track == commit.track != failed.track
        assert failed.begin_s < patch.begin_s <= patch.end_s <= commit.begin_s
        patched.add((failed.details["step"], int(failed.track[1].split()[1])))
    assert patched == masked


def test_lengths_in_the_timeline_are_those_of_the_metrics(ran: Ran, trace: ReadTrace) -> None:
    """Of each group: all groups of a job of six are notified."""
    for line in metrics_lines(ran.run_dir.metrics):
        if line["recovery"] is None and line["step"] > 1:
            for group, compute_s, _, reduce_s in line["slowest"]:
                parts = {
                    one.name: one.end_s - one.begin_s
                    for one in trace.of("groups", f"group {group}")
                    if one.details.get("step") == line["step"] and one.name in ("compute", "reduce")
                    if line["time_unix_s"] - line["step_time_s"] - 1e-3 < one.begin_s < line["time_unix_s"]
                }
                assert parts == pytest.approx({"compute": compute_s, "reduce": reduce_s}, abs=0.005), line


def test_tracks_of_ranks_lie_in_the_steps_of_the_journal(ran: Ran, trace: ReadTrace) -> None:
    """All clocks are those of one machine. A rank has reported each step that its group voted for and that was
    committed, but perhaps of its last one when it was killed; its times in a step are those of the step's line."""
    lines = {(line["life"], line["step"]): line for line in metrics_lines(ran.run_dir.metrics)}
    names = {one.name for one in trace.slices if one.track[-1] == "rank 0"}
    # Whether a survivor is in the sum when a group dies is a matter of milliseconds.
    assert names - {BROKEN} >= {"compute", "patch", "reduce", "vote", "commit", "save"}
    job_attempts = {(one.begin_s, one.end_s): int(one.name.split()[-1]) for one in trace.of("job", "lives")}

    def of(one: ReadSlice) -> tuple[int, int]:
        """(job attempt, step, 0 where it is of none)."""
        job_attempt = next(
            job_attempt for (begin_s, end_s), job_attempt in job_attempts.items() if begin_s <= one.begin_s <= end_s
        )
        return job_attempt, one.details.get("step", 0)

    for group in range(6):
        rank = trace.of("groups", f"group {group}", "rank 0")
        own = trace.of("groups", f"group {group}")
        voted, reported = ([of(one) for one in track if one.name == "vote"] for track in (own, rank))
        lost = [of(one)[0] for one in own if one.name == "lost"]
        last = {max(key for key in voted if key[0] == job_attempt) for job_attempt in lost}
        assert len(reported) == len(set(reported)) > 10
        assert set(reported) <= set(voted) <= set(reported) | last
        computed = Counter[tuple[int, int, str]]()
        for one in rank:
            line = lines[of(one)]
            assert one.name != BROKEN or line["recovery"], "no sum is broken off in a step without a loss"
            committed_s = line["time_unix_s"]
            if one.name in ("commit", "save", "transfer"):
                assert committed_s - NEAR_S < one.begin_s < committed_s + NEAR_S, one
            else:
                assert committed_s - line["step_time_s"] - NEAR_S < one.begin_s, one
                assert one.end_s < committed_s + NEAR_S, one
            computed[*of(one), one.name] += one.end_s - one.begin_s
        for (job_attempt, step), line in lines.items():
            if (job_attempt, step) in set(voted) - set(reported):
                continue
            for compute_s, patch_s in (parts[1:3] for parts in line["slowest"] if parts[0] == group):
                assert computed[job_attempt, step, "compute"] == pytest.approx(compute_s, abs=0.005), line
                assert computed[job_attempt, step, "patch"] == pytest.approx(patch_s, abs=0.005), line


def test_the_track_of_a_rank_ends_with_its_group(ran: Ran, trace: ReadTrace) -> None:
    for lost in (one for one in trace.slices if one.name == "lost"):
        group = lost.track[1]
        rank = trace.of("groups", group, "rank 0")
        attempt_ends_s = next(one.end_s for one in trace.of("job", "lives") if one.begin_s <= lost.begin_s <= one.end_s)
        assert any(one.end_s < lost.begin_s for one in rank)
        assert not [one for one in rank if lost.begin_s < one.end_s and one.begin_s < attempt_ends_s], group


def test_status_has_the_same_figures(ran: Ran) -> None:
    def status(*words: str) -> str:
        command = [sys.executable, "-W", "error", "-m", "spare_megatron.cli.status", str(ran.run_dir.path), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (ExitCode.FINISHED, "")
        return done.stdout

    wall_time = RunFiles(ran.run_dir).look().wall_time()
    percent = f"{100 * wall_time.share('train'):.1f} %"
    assert json.loads(status("--json", "--wall-time"))["wall_time_s"]["train"] == round(wall_time.parts["train"], 3)
    assert f"effective training time {percent} of" in status("--wall-time")
    assert f"effective training time {percent} of" in status("--watch"), "of a job that has ended, once"


def test_a_directory_of_no_job_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "spare_megatron.cli.report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr == (
        f"spare-report: {tmp_path} has no status.json and no journal.jsonl; give the --run-dir of a job that has been "
        "started\n"
    )
