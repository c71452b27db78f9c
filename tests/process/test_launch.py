"""spare-launch in real processes with torch-free ranks: deaths, restarts, errors, signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.journal import read, verify
from spare_megatron.launch.preload_client import ForkedProcess
from spare_megatron.protocol.messages import Lost
from spare_megatron.runtime.run_directory import RunDirectory, read_json
from tests import preloaded
from tests.process.harness import FORKING

ROOT = Path(__file__).parents[2]
RANK, LIGHT = ("-m", "tests.process.control_client"), ("tests/process/light_rank.py", "--spare-preload", "json")
"""Ranks whose parent imports what those of a job import, and those whose own parent is ready at once."""
EXITS_FIRST = "--heartbeat-timeout-s 20 --grace-s 10"
"""However late a busy launcher is, it reports the end of a process before the closed connection counts as a death."""


class LaunchedJob:
    """One spare-launch and what it leaves in its run directory."""

    def __init__(
        self,
        path: Path,
        words: str,
        groups: int = 3,
        size: int = 2,
        output: str = "launch.out",
        under: str = "",
        own_parent: bool = False,
    ) -> None:
        """``under``: the words before the launcher's. ``own_parent``: it is no fork of the tests' parent, and starts a
        parent for its ranks itself, as always ``under`` another program."""
        self.run_dir = RunDirectory(path / "run")
        path.mkdir(exist_ok=True)
        self.output = path / output
        launcher, _, client = words.partition("--- ")
        flags = ["--num-groups", str(groups), "--group-size", str(size), "--run-dir", str(self.run_dir.path)]
        flags += [*launcher.split(), *(LIGHT if under or own_parent else RANK), "--heartbeat-timeout-s", "2"]
        flags += [*client.split(), "--spare-max-group-restarts", "0"]
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if under or own_parent:
            command = [*under.split(), sys.executable, "-W", "error", "-m", "spare_megatron.cli.launch", *flags]
            with self.output.open("wb") as out:
                self.process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=preloaded.environment(),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        else:
            self.output.write_bytes(b"")
            environ = {**preloaded.environment(), preloaded.LISTENING: preloaded.socket_path()}
            self.process = preloaded.fork_module(FORKING, flags, environ, self.output, strict=True)
        self.pids: set[int] = set()

    def until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for something the job does."""
        started_s = time.monotonic()
        while not holds():
            assert time.monotonic() - started_s < timeout_s, f"did not happen in {timeout_s} s\n{self.everything()}"
            self.note()
            time.sleep(0.01)

    def note(self) -> dict[str, Any]:
        """Look at processes.json, and remember whom it ever named."""
        listed = read_json(self.run_dir.processes) or {"coordinator": {"pid": None}, "ranks": []}
        self.pids |= {rank["pid"] for rank in listed["ranks"]} | {listed["coordinator"]["pid"] or 0}
        return listed

    def pid(self, group: int, position: int) -> int:
        """Process id of a rank, from processes.json."""
        return next(r["pid"] for r in self.note()["ranks"] if (r["group"], r["position"]) == (group, position))

    def committed(self) -> int:
        """Last step in metrics.jsonl."""
        lines = self.metrics()
        return lines[-1]["step"] if lines else 0

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl so far: the last one may be in the middle of being written."""
        text = self.run_dir.metrics.read_text() if self.run_dir.metrics.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def losses(self) -> list[Lost]:
        """All Lost events."""
        return [record.event for record in read(self.run_dir.journal) if isinstance(record.event, Lost)]

    def finish(self, timeout_s: float = 90.0) -> int:
        """The exit code; then nothing may be left, and the journal must replay."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"spare-launch did not end in {timeout_s} s\n{self.everything()}") from None
        assert self.left_behind() == []
        if self.run_dir.journal.exists():
            verify(self.run_dir.journal)
        return code

    def left_behind(self) -> list[str]:
        """Processes of this job that still live: whoever has its run directory in its environment or command line."""
        mark, left = str(self.run_dir.path).encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if mark in text and state != "Z":
                        left.append(f"{entry.name} {state} {(entry / 'cmdline').read_bytes()!r}")
        return left

    def everything(self) -> str:
        """All output, for a failed test."""
        files = [self.output, *sorted(self.run_dir.path.glob("logs/**/*.*"))]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files if file.exists())

    def text(self) -> str:
        """What the user saw."""
        return self.output.read_text()

    def close(self) -> None:
        """End whatever is still there."""
        if self.process.poll() is None:
            self.note()
            self.process.kill()
            self.process.wait()
        for line in self.left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., LaunchedJob]]:
    """Starts launches; ends whatever is left of them."""
    made: list[LaunchedJob] = []

    def make(words: str, **shape: Any) -> LaunchedJob:
        made.append(LaunchedJob(tmp_path / str(len(made)), words, **shape))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_kills_from_outside_are_masked(launch: Callable[..., LaunchedJob]) -> None:
    """A rank of one group, by its pid in processes.json: its end is what is seen, and the rest of its group ends."""
    job = launch(f"--- --steps 30 --piece-s 0.01 {EXITS_FIRST}", groups=3, size=2)
    job.until(lambda: job.committed() >= 5)
    other = job.pid(1, 0)
    os.kill(job.pid(1, 1), signal.SIGKILL)
    assert job.finish() == ExitCode.FINISHED
    [lost] = job.losses()
    assert [(loss.group, loss.position, loss.cause, loss.detail) for loss in lost.losses] == [
        (1, 1, "exited", "killed by SIGKILL")
    ]
    assert [line["step"] for line in job.metrics()] == list(range(1, 31))
    [masked] = [line for line in job.metrics() if line["recovery"]]
    assert masked["recovery"]["lost_groups"] == [1]
    assert not Path(f"/proc/{other}").exists()
    summary = read_json(job.run_dir.summary)
    assert summary is not None
    assert (summary["steps"], summary["failures_masked"], summary["steps_lost"]) == (30, 1, 0)
    assert " iteration       30/      30 |" in job.text()
    assert read_json(job.run_dir.processes) == {"coordinator": {"pid": None}, "ranks": [], "waiting": []}
    assert "started again" not in job.text(), "without --spare-max-group-restarts a lost group stays lost"


def test_injected_kills_of_a_group_and_of_the_coordinator(launch: Callable[..., LaunchedJob]) -> None:
    job = launch(
        "--inject sigkill:group=2,step=7,at=reduce --inject coordinator-sigkill:group=0,step=12,at=forward,n=1 "
        "--- --steps 30 --piece-s 0.005"
    )
    assert job.finish() == ExitCode.FINISHED
    assert [line["step"] for line in job.metrics()] == list(range(1, 31))
    assert {loss.group for lost in job.losses() for loss in lost.losses} == {2}
    assert job.metrics()[6]["recovery"]["lost_groups"] == [2]
    assert "the coordinator was killed by signal 9; it is started again" in job.text()


def test_a_stopped_rank_is_left_until_the_end_and_then_ended(launch: Callable[..., LaunchedJob]) -> None:
    job = launch("--inject sigstop:group=1,position=0,step=5,at=forward --- --steps 40 --piece-s 0.01")
    job.until(lambda: bool(job.losses()))
    stopped = job.pid(1, 0)
    before = job.committed()
    job.until(lambda: job.committed() >= before + 3)
    assert Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    assert job.finish() == ExitCode.FINISHED
    assert not Path(f"/proc/{stopped}").exists()
    assert [loss.cause for lost in job.losses() for loss in lost.losses] == ["silent"]


def test_a_wipe_out_starts_again_from_the_checkpoint(launch: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    """Both hosts of a shard die in step 14; the job goes on from step 10, and the kills are not injected again."""
    job = launch(
        "--inject sigkill:group=0,step=14,at=reduce --inject sigkill:group=1,step=14,at=reduce "
        f"--- --steps 20 --piece-s 0.002 --save-interval 5 --save {tmp_path / 'save'}",
        groups=2,
    )
    assert job.finish() == ExitCode.FINISHED
    steps = [(line["life"], line["step"]) for line in job.metrics()]
    assert steps == [(1, t) for t in range(1, 14)] + [(2, t) for t in range(11, 21)]
    summary = read_json(job.run_dir.summary)
    assert summary is not None
    assert (summary["wipe_outs"], summary["steps_lost"], summary["lives"]) == (1, 3, 2)
    assert "the job starts again from" in job.text()


def test_a_total_loss_without_a_checkpoint(launch: Callable[..., LaunchedJob]) -> None:
    job = launch("--- --steps 1000 --piece-s 0.01", groups=2, size=1)
    job.until(lambda: job.committed() >= 3)
    for group in range(2):
        os.kill(job.pid(group, 0), signal.SIGKILL)
    assert job.finish() == ExitCode.NO_CHECKPOINT
    assert "there is no good checkpoint of this job in (no --save or --load was given)" in job.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_lets_a_job_leave_which_says_that_nothing_is_saved(
    launch: Callable[..., LaunchedJob], number: signal.Signals
) -> None:
    job = launch("--- --steps 10000 --piece-s 0.01", groups=2)
    job.until(lambda: job.committed() >= 3)
    job.process.send_signal(number)
    assert job.finish() == ExitCode.REQUEUE
    summary = read_json(job.run_dir.summary)
    assert summary is not None
    assert summary["outcome"] == "left"
    assert summary["reason"].startswith(f"signal {number.name}")
    assert summary["reason"].endswith("is committed and applied; nobody saves it")
    assert "the job leaves, and saves nothing without --save" in job.text()
    assert "nobody saves it; as there is no --save, the same command begins where this one began" in job.text()


RENAMED = 'unshare --uts -- sh -c hostname${IFS}nowhere.invalid&&exec${IFS}"$@" sh'
"""Runs a command on a machine whose name leads nowhere."""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode != 0, reason="no UTS namespaces here"
)
def test_a_machine_whose_name_leads_nowhere(launch: Callable[..., LaunchedJob]) -> None:
    """A job on this machine alone trains; one whose coordinator others are to reach by that name is refused."""
    job = launch("--- --steps 10", groups=2, under=RENAMED)
    assert job.finish() == ExitCode.FINISHED, job.everything()
    assert job.committed() == 10
    job = launch("--listen 0.0.0.0:0 --- --steps 10", groups=2, under=RENAMED)
    assert job.finish() == ExitCode.BAD_INPUT, job.everything()
    assert job.text().count("this machine's name, nowhere.invalid, has no address") == 1
    assert "--listen HOST:PORT for the coordinator" in job.text()


def test_a_users_error_of_every_rank_is_shown_once(launch: Callable[..., LaunchedJob]) -> None:
    job = launch("--- --config-error=--lr_is_missing;_use_--lr_0.1")
    assert job.finish() == ExitCode.BAD_INPUT
    assert job.text() == "spare-launch: --lr_is_missing;_use_--lr_0.1\n"
    assert not job.run_dir.journal.exists() or not job.run_dir.journal.read_text()


def test_ranks_that_all_crash_end_the_job(launch: Callable[..., LaunchedJob]) -> None:
    job = launch("--- --crash", groups=2, size=1)
    assert job.finish() == ExitCode.FAILED
    assert "RuntimeError: asked to crash" in job.text()
    assert re.search(r"the job failed; rank 0 of group \d was the first to end, exit code 1; the end of ", job.text())
    assert len(job.text().splitlines()) <= 13


def test_an_exception_in_one_rank_ends_its_group_only(launch: Callable[..., LaunchedJob]) -> None:
    job = launch("--inject exception:group=2,position=1,step=5,at=apply --- --steps 20 --piece-s 0.005")
    assert job.finish() == ExitCode.FINISHED
    assert [(loss.group, loss.position) for lost in job.losses() for loss in lost.losses] == [(2, 1)]
    assert "InjectedError" in job.run_dir.log_of(2, 1).read_text()
    assert [line["step"] for line in job.metrics()] == list(range(1, 21))


def test_a_killed_launcher_leaves_nothing_behind(launch: Callable[..., LaunchedJob]) -> None:
    """Ranks, their preloaded parent, coordinator and guard; a stopped rank too."""
    job = launch("--- --steps 100000 --piece-s 0.01", groups=2, own_parent=True)
    job.until(lambda: job.committed() >= 3)
    os.kill(job.pid(1, 1), signal.SIGSTOP)
    job.process.kill()
    job.process.wait()
    job.until(lambda: job.left_behind() == [], timeout_s=10.0)


def test_two_jobs_with_one_run_directory(launch: Callable[..., LaunchedJob]) -> None:
    job = launch("--- --steps 100000 --piece-s 0.01", groups=2, size=1)
    job.until(lambda: job.committed() >= 3)
    processes = job.run_dir.processes.read_text()
    second = LaunchedJob(job.run_dir.path.parent, "--- --steps 5", groups=2, size=1, output="second.out")
    assert second.process.wait(30) == ExitCode.BAD_INPUT
    text = second.text()
    assert "is in use by spare-launch (pid" in text
    assert len(text.splitlines()) == 1
    assert job.run_dir.processes.read_text() == processes
    before = job.committed()
    job.until(lambda: job.committed() > before)
    job.process.terminate()
    assert job.finish() == ExitCode.REQUEUE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-groups 0 x.py", "--num-groups is 0, but must be at least 1"),
        ("--num-groups 2 no_such_script.py", "the script no_such_script.py does not exist"),
        ("--num-groups 2 --group-size 0 -m x", "--group-size is 0"),
        ("--num-groups 2 --inject boom:group=1 -m x", "'boom' is no kind of"),
        ("--num-groups 2 --inject sigkill:group=2,step=1,at=vote -m x", "the job has groups 0 to 1"),
        (
            "--num-groups 2 -m x --tensor-model-parallel-size many",
            "--tensor-model-parallel-size: takes a whole number, but got 'many'",
        ),
        ("--num-groups 2 --listen nowhere -m x", "--listen nowhere is not HOST:PORT"),
    ],
)
def test_bad_flags_are_one_sentence(words: str, message: str, tmp_path: Path) -> None:
    flags, log = ["--run-dir", str(tmp_path / "run"), *words.split()], tmp_path / "log"
    done = preloaded.fork_module(FORKING, flags, preloaded.environment(), log, strict=True)
    assert done.wait(60.0) == ExitCode.BAD_INPUT
    [line] = log.read_text().splitlines()
    assert message in line


def test_status_of_a_running_and_of_an_ended_job(launch: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    def status(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "spare_megatron.cli.status", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    words = f"--inject sigkill:group=1,step=5,at=apply --- --steps 100000 --piece-s 0.01 {EXITS_FIRST}"
    job = launch(words, groups=3, size=1)
    job.until(lambda: (read_json(job.run_dir.status) or {}).get("failures_masked") == 1)
    now = json.loads(status(str(job.run_dir.path), "--json").stdout)
    assert (now["phase"], now["num_groups"], sorted(now["live"]), now["epoch"]) == ("running", 3, ["0", "2"], 2)
    assert now["summary"] is None
    text = status(str(job.run_dir.path)).stdout
    assert "2/3 groups live" in text
    assert "group 1 (rank 0) exited: killed by SIGKILL" in text
    job.process.terminate()
    assert job.finish() == ExitCode.REQUEUE
    assert "left: signal SIGTERM" in status(str(job.run_dir.path)).stdout
    nothing = status(str(tmp_path / "nowhere"))
    assert nothing.returncode == ExitCode.BAD_INPUT
    assert "has no status.json" in nothing.stderr
