"""A disk that is full, fails or is stale, once and for a while, under each file of the run directory of a job.

The journal: the job waits and goes on, or the coordinator stops and another one resumes; nothing is lost. Every other
file: the job goes on. The groups' heartbeat time-out is shorter than every outage: nobody may be lost by it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import iteration_name, step_of
from spare_megatron.config.exits import ExitCode
from spare_megatron.protocol.messages import AcceptSave, Lost, Opened, SendCommit
from spare_megatron.runtime.failpoints import VARIABLE
from spare_megatron.runtime.run_directory import read_json
from tests import preloaded
from tests.process.control_job import ROOT, ControlJob

STEPS = 60
FLAGS = f"--steps {STEPS} --piece-s 0.005 --heartbeat-timeout-s 2"
OUTAGE_S = 2.3
LONG_OUTAGE_S = 10.0
ERRORS = ("ENOSPC", "EIO", "ESTALE")

JOURNAL = {
    "write": "coordinator:journal.write={error}",
    "written": "coordinator:journal.written={error}",
    "sync": "coordinator:journal.sync={error}",
    "short": "coordinator:journal.write=short:20,times=1{rule};coordinator:journal.write={error},after=1",
    "and not cut": "coordinator:journal.write={error};coordinator:journal.cut={error}",
    "accepted": "coordinator:accepted-N.json.sync={error}",
}
"""How a file that decisions stand on fails. The job waits."""

OTHERS = (
    "coordinator:metrics.write",
    "coordinator:status.json.write",
    "rank:coordinator.json.read",
    "rank:group-N.json.read",
    "coordinator:coordinator.json.read",
)
"""Files of a job that trains by which nobody decides."""

START = (
    "coordinator:token.write",
    "token.read",
    "coordinator:coordinator.json.read",
    "coordinator:coordinator.json.write",
    "coordinator:journal.open",
    "coordinator:job.json.sync",
    "coordinator:metrics.open",
    "group-N.json.rename",
)
"""Files that a job needs to begin."""

END = ("coordinator:summary.json.rename", "coordinator:status.json.rename")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., ControlJob]]:
    """Makes jobs; ends whatever they started."""
    made: list[ControlJob] = []

    def make(faults: str, flags: str = FLAGS, size: int = 1) -> ControlJob:
        one = ControlJob(tmp_path / str(len(made)), 2, size, f"{flags} --save {tmp_path / 'saved'} --save-interval 20")
        one.environment[VARIABLE] = faults
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def faults(places: tuple[str, ...], error: str, rule: str) -> str:
    """The same fault at several places."""
    return ";".join(f"{place}={error}{rule}" for place in places)


def check(one: ControlJob, steps: int = STEPS) -> None:
    """The job ended in order: nobody was lost, every step was committed and recorded once, every save accepted."""
    assert one.finish() == ExitCode.FINISHED, one.outputs()
    assert set(one.exits().values()) == {ExitCode.FINISHED}, one.outputs()
    one.check_steps(steps)
    records = one.records()
    assert not [record for record in records if isinstance(record.event, Lost)], one.outputs()
    commits = [a.step for record in records for a in record.actions if isinstance(a, SendCommit)]
    assert commits == list(range(1, steps + 1))
    accepted = [a.directory for record in records for a in record.actions if isinstance(a, AcceptSave)]
    assert len(accepted) == steps // 20
    assert one.run_dir.accepted() == accepted[-1]
    named = [Path(directory).parents[1] / iteration_name(step_of(Path(directory))) for directory in accepted]
    assert all(map(Path.exists, named))
    summary, status = read_json(one.run_dir.summary), read_json(one.run_dir.status)
    assert summary is not None
    assert (summary["outcome"], summary["steps_committed"]) == ("finished", steps)
    assert status is not None
    assert status["phase"] == "stopped"
    assert [path.name for path in one.run_dir.path.iterdir() if path.name.startswith(".")] == []


# ------------------------------------------------------------------------------------- files that decisions stand on


def journal_fails(job: Callable[..., ControlJob], tmp_path: Path, outage_s: float, *kinds: tuple[str, str]) -> None:
    """One outage after another; ``kinds``: how the file fails in each, and with which error."""
    specs, files = [], [tmp_path / f"failing-{number}" for number in range(len(kinds))]
    for there, (fault, error) in zip(files, kinds, strict=True):
        rule = f",while={there}"
        spec = JOURNAL[fault].format(error=error, rule=rule)
        specs += [part if rule in part else part + rule for part in spec.split(";")]
    one = job(";".join(specs))
    one.start()

    def reported(what: str, times: int) -> None:
        one.until(lambda: one.output("coordinator").count(what) == times)

    for number, there in enumerate(files, 1):
        before = one.committed()
        one.until(lambda before=before: one.committed() >= before + 5)  # type: ignore[misc]
        there.touch()
        reported("WARNING: ", number)
        time.sleep(outage_s)
        there.unlink()
        reported("the disk is back after", number)
    check(one)
    output = one.output("coordinator")
    assert output.count("WARNING: ") == output.count("the disk is back after") == len(kinds), output
    warnings = output.split("WARNING: ")[1:]
    for warning, (_, error) in zip(warnings, kinds, strict=True):
        assert f"cannot be written: {error}" in warning, output
    waits_s = [float(part.split()[0]) for part in output.split("the disk is back after ")[1:]]
    assert min(waits_s) > outage_s - 0.1
    times = [record.time_unix_s for record in one.records()]
    gaps_s = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert min(gaps_s[-len(kinds) :]) > outage_s - 0.1


def test_the_job_waits_for_the_journal_and_goes_on(job: Callable[..., ControlJob], tmp_path: Path) -> None:
    journal_fails(job, tmp_path, OUTAGE_S, ("short", "ENOSPC"), ("sync", "EIO"), ("accepted", "ENOSPC"))


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("fault", JOURNAL)
def test_the_job_waits_for_the_journal_for_long(
    job: Callable[..., ControlJob], tmp_path: Path, fault: str, error: str
) -> None:
    journal_fails(job, tmp_path, LONG_OUTAGE_S, (fault, error))


def test_the_coordinator_gives_up_and_another_one_resumes(job: Callable[..., ControlJob], tmp_path: Path) -> None:
    there = tmp_path / "failing"
    one = job(f"coordinator:journal.sync=EIO,while={there}", f"{FLAGS} --coordinator-timeout-s 12")
    one.start()
    one.until(lambda: one.committed() >= 5)
    there.touch()
    assert one.coordinator is not None
    assert one.coordinator.wait(60) == ExitCode.DISK_FAILED
    assert "cannot be written: EIO (Input/output error), for " in one.output("coordinator")
    there.unlink()
    one.start_coordinator()
    check(one)
    assert sum(isinstance(record.event, Opened) for record in one.records()) == 2


def test_nobody_leaves_before_what_counts_has_its_name(job: Callable[..., ControlJob]) -> None:
    one = job("rank:checkpoint.publish=sleep:0.5")
    one.start()
    check(one)


@pytest.mark.full
def test_the_candidate_whose_disk_fails_gives_up_the_lease_and_the_next_one_resumes(
    job: Callable[..., ControlJob],
) -> None:
    one = job("coordinator-0:journal.sync=EIO,after=8", f"{FLAGS} --coordinator-timeout-s 8")
    command = ["spare_megatron.cli.coordinator", "--run-dir", str(one.run_dir.path), "--life", "1"]
    first = one.popen("candidate0", [*command, "--candidate", "0", "--lease-s", "1"])
    one.until(lambda: one.run_dir.coordinator() is not None)
    second = one.popen("candidate1", [*command, "--candidate", "1", "--lease-s", "1"])
    for group in range(2):
        one.start_group(group)
    assert set(one.exits(60).values()) == {ExitCode.FINISHED}, one.outputs()
    assert [first.wait(30), second.wait(30)] == [ExitCode.FINISHED] * 2
    assert "cannot be written: EIO (Input/output error), for " in one.output("candidate0")
    assert "candidate 1 is coordinator 2" in one.output("candidate1")
    one.check_steps(STEPS)


def test_a_group_that_dies_while_the_job_waits_is_lost_afterwards(
    job: Callable[..., ControlJob], tmp_path: Path
) -> None:
    there = tmp_path / "failing"
    one = job(f"coordinator:journal.write=ENOSPC,while={there}")
    one.start()
    one.until(lambda: one.committed() >= 5)
    there.touch()
    one.until(lambda: "WARNING: " in one.output("coordinator"))
    one.kill(1, 0)
    time.sleep(OUTAGE_S)
    there.unlink()
    assert one.finish() == ExitCode.FINISHED, one.outputs()
    one.check_steps(STEPS)
    [lost] = [record.event for record in one.records() if isinstance(record.event, Lost)]
    assert [loss.group for loss in lost.losses] == [1]


@pytest.mark.parametrize(
    "places",
    [("write", "synced"), pytest.param(("written", "sync"), marks=pytest.mark.full)],
    ids=["write and synced", "written and sync"],
)
def test_coordinators_die_at_the_journal_and_another_one_resumes(
    job: Callable[..., ControlJob], places: tuple[str, ...]
) -> None:
    """One before and the next after a write or a sync."""
    one = job("")
    for place in places:
        one.environment[VARIABLE] = f"coordinator:journal.{place}=kill,after=30"
        one.start_coordinator()
        if not one.ranks:
            for group in range(one.groups):
                one.start_group(group)
        assert one.coordinator is not None
        assert one.coordinator.wait(60) == -signal.SIGKILL
        assert one.committed() < STEPS
    one.environment.clear()
    one.start_coordinator()
    assert one.finish() == ExitCode.FINISHED, one.outputs()
    one.check_steps(STEPS)


# ------------------------------------------------------------------------------------------------------- other files


def others_fail(job: Callable[..., ControlJob], tmp_path: Path, error: str, outage_s: float) -> None:
    there = tmp_path / "failing"
    ends = faults(END, error, f",for_s={outage_s}")
    one = job(f"{faults(OTHERS, error, f',while={there}')};{ends}", size=2)
    one.start()
    one.until(lambda: one.committed() >= 5)
    there.touch()
    began = len(one.records())
    one.until(lambda: len(one.records()) > began + 40)
    time.sleep(max(0.0, outage_s - 1.0))
    there.unlink()
    check(one)
    output = one.output("coordinator")
    for name in ("metrics.jsonl", "status.json", "summary.json"):
        assert output.count(f"{name} cannot be written: {error}") >= 1, output
        assert output.count(f"{name} is written again") == output.count(f"{name} cannot be written"), output
    assert output.count("metrics.jsonl cannot be written") == 1


@pytest.mark.parametrize("error", ["ENOSPC", "ESTALE"])
def test_the_job_goes_on_while_other_files_fail(job: Callable[..., ControlJob], tmp_path: Path, error: str) -> None:
    others_fail(job, tmp_path, error, OUTAGE_S)


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
def test_the_job_goes_on_while_other_files_fail_for_long(
    job: Callable[..., ControlJob], tmp_path: Path, error: str
) -> None:
    others_fail(job, tmp_path, error, LONG_OUTAGE_S)


@pytest.mark.parametrize("error", ["EIO", *(pytest.param(e, marks=pytest.mark.full) for e in ("ENOSPC", "ESTALE"))])
def test_every_file_fails_once(job: Callable[..., ControlJob], error: str) -> None:
    journal = tuple(f"coordinator:journal.{one}" for one in ("write", "written", "sync", "synced"))
    once = faults((*START, *END, *OTHERS[:2], "coordinator:accepted-N.json.rename"), error, ",times=1")
    later = faults((*OTHERS, *journal), error, ",after=20,times=1")
    one = job(f"{once};{later}", size=2)
    one.start()
    check(one)


@pytest.mark.parametrize(
    ("error", "outage_s"),
    [("ENOSPC", OUTAGE_S), *(pytest.param(error, LONG_OUTAGE_S / 2, marks=pytest.mark.full) for error in ERRORS)],
)
def test_the_job_begins_when_the_disk_allows(job: Callable[..., ControlJob], error: str, outage_s: float) -> None:
    one = job(faults(START, error, f",for_s={outage_s / 2}"), size=2)
    one.start()
    check(one)


def test_standard_output_on_a_full_disk(job: Callable[..., ControlJob]) -> None:
    """Iteration lines and notices are lost, nothing else."""
    one = job("")
    command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(one.run_dir.path)]
    with open("/dev/full", "wb") as full:
        coordinator = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=full, env=dict(os.environ))
    try:
        one.until(lambda: one.run_dir.coordinator() is not None)
        for group in range(2):
            one.start_group(group)
        assert coordinator.wait(60) == ExitCode.FINISHED
        assert set(one.exits().values()) == {ExitCode.FINISHED}
        one.check_steps(STEPS)
    finally:
        coordinator.kill()
        coordinator.wait()


# ------------------------------------------------------------------------------------------------------ spare-launch


def launched(run_dir: Path, faults: str, flags: str, ends: Path | None = None) -> str:
    """What spare-launch writes over a job of two groups that ends in order. The file ``ends`` is removed when the
    coordinator has left."""
    command = [sys.executable, "-W", "error", "-m", "spare_megatron.cli.launch", "--num-groups", "2"]
    command += ["--run-dir", str(run_dir), "-m", "tests.process.control_client", *flags.split()]
    environment = {**preloaded.environment(), preloaded.LISTENING: preloaded.socket_path(), VARIABLE: faults}
    out, written = subprocess.PIPE, ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            written += line
            if ends is not None and "the coordinator leaves" in line:
                ends.unlink()
    assert process.returncode == ExitCode.FINISHED, written
    assert written.count("spare-launch: processes.json cannot be written: ESTALE") == 1, written
    assert written.count("spare-launch: processes.json is written again") == 1, written
    assert read_json(run_dir / "processes.json") == {"coordinator": {"pid": None}, "ranks": [], "waiting": []}
    return written


def test_spare_launch_goes_on_while_its_files_fail(tmp_path: Path) -> None:
    places = ("processes.json.write", "processes.json.rename", "summary.json.read", "coordinator.json.read")
    spec = faults(tuple(f"launch:{place}" for place in places), "ESTALE", f",for_s={OUTAGE_S}")
    launched(tmp_path, f"{spec};launch:processes.log=ENOSPC,times=2;launch:token.write=EIO,times=1", FLAGS)


def test_spare_launch_writes_at_its_end_what_could_not_be_written_before(tmp_path: Path) -> None:
    there = tmp_path / "failing"
    there.touch()
    written = launched(tmp_path, f"launch:processes.json.write=ESTALE,while={there}", "--steps 3", there)
    assert written.index("the coordinator leaves") < written.index("processes.json is written again")
