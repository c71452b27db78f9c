"""A job that is asked to leave saves and leaves with 4, whoever of its processes gets the signal, and however often."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.launch.attempt_report import ended_attempt
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.launch.restart_policy import EndedAttempt, JobProgress
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.stop_signals import REPEAT_S, STOP_SIGNALS, SignalledStop
from tests import preloaded
from tests.process.harness import Job, launch, toy_digests
from tests.process.returning import failure_free_pipeline

pytestmark = pytest.mark.timeout(400)
PIECES, STEPS = 2, 60
WORDS = ("--steps", str(STEPS), "--piece-s", "0.02", "--redundancy", "2")
TO = ("launcher", "launcher twice", "one rank", "everybody", "timeout")
STOPS = (
    ("launcher twice", signal.SIGHUP),
    ("one rank", signal.SIGUSR1),
    ("everybody", signal.SIGINT),
    ("timeout", signal.SIGTERM),
)


@pytest.fixture(autouse=True)
def hung_up_as_usual() -> Iterator[None]:
    """Children receive SIGHUP, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def tell(job: Job, whom: str, number: signal.Signals) -> None:
    """Signal some processes of a job; spare-launch is a child of ``timeout`` where that was asked for."""
    there = psutil.Process(job.process.pid)
    if whom == "one rank":
        job.kill(job.pid(1, 1), number=number)
    elif whom == "everybody":
        for process in [*there.children(recursive=True), there]:
            process.send_signal(number)
    else:
        for _ in range(2 if whom == "launcher twice" else 1):
            there.send_signal(number)


def stopped(run_dir: Path, save: Path, groups: int, whom: str, number: signal.Signals) -> int:
    """Start a job, or go on with it, and stop it; returns the step at which it has left."""
    words = (*WORDS, "--pieces", str(PIECES), "--save", str(save), "--load")
    # timeout passes on the usual signals and the one that it is to send at its end
    under = ("timeout", "--signal", number.name.removeprefix("SIG"), "600") if whom == "timeout" else ()
    environ = {preloaded.LISTENING: preloaded.socket_path()}  # under timeout, too, nothing is else than here
    job = launch(run_dir, *words, groups=groups, under=under, environ=environ)
    job.wait_for("training", lambda: len(job.metrics) >= 3)
    tell(job, whom, number)
    last: int = job.finish(code=ExitCode.REQUEUE)[-1]["step"]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(last)
    reason = json.loads((run_dir / "summary.json").read_text())["reason"]
    assert f"signal {number.name}" in reason
    return last


def check_stops(tmp_path: Path, groups: int, stops: list[tuple[str, signal.Signals]]) -> None:
    """One job that is stopped in each of these ways, and goes on each time, ends as one that nobody stopped."""
    save, last = tmp_path / "save", 0
    for number, (whom, how) in enumerate(stops):
        print(f"{how.name} to {whom}, after step {last}")
        reached = stopped(tmp_path / str(number), save, groups, whom, how)
        assert reached > last
        last = reached
    assert last < STEPS, "too quick for this test"
    words = (*WORDS, "--pieces", str(PIECES), "--save", str(save), "--load")
    end = launch(tmp_path / "end", *words, groups=groups)
    assert [line["step"] for line in end.finish()] == list(range(last + 1, STEPS + 1))
    right = {str(position): one for position, one in enumerate(failure_free_pipeline(STEPS, groups, PIECES)[-1])}
    found = toy_digests(end.run_dir)
    assert len(found) == 2 * groups
    assert {name: right[name.rpartition("-")[2]] for name in found} == found


def test_who_is_asked_to_leave_saves_and_leaves(tmp_path: Path) -> None:
    check_stops(tmp_path, 2, list(STOPS))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_signal_to_each_process(tmp_path: Path, number: signal.Signals) -> None:
    check_stops(tmp_path, 3, list(itertools.product(TO, [number])))


def test_a_repeat_is_the_same_request_and_a_later_signal_another() -> None:
    now = 100.0
    stop = SignalledStop(clock=lambda: now)
    assert not stop.take("signal SIGTERM")
    for _ in range(3):
        now += REPEAT_S / 4
        assert not stop.take("signal SIGHUP"), "timeout signals twice, systemd with two signals"
    now += REPEAT_S / 4
    assert stop.take("signal SIGTERM")
    assert stop.reason == "signal SIGTERM"


IGNORE = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


def test_a_job_goes_on_under_a_parent_that_ignores_its_children(tmp_path: Path) -> None:
    """Who is started so loses the exit codes of its own children, and Python says 0 of each of them: a coordinator that
    was killed had finished its job."""
    words, script = ("--steps", "30", "--piece-s", "0.03", "--spare-preload", "json"), "tests/process/light_rank.py"
    job = launch(tmp_path, *words, groups=2, group_size=1, under=(sys.executable, "-c", IGNORE), script=script)
    job.wait_for_step(3)
    job.kill(json.loads((tmp_path / "processes.json").read_text())["coordinator"]["pid"])
    assert [line["step"] for line in job.finish()] == list(range(1, 31))
    assert "the coordinator was killed by signal 9; it is started again" in (tmp_path / "launch.out").read_text()


def test_an_exit_code_alone_is_no_proof_that_a_job_is_finished(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)

    def ended() -> EndedAttempt:
        return ended_attempt(
            run_dir,
            ExitCode.FINISHED,
            lambda: "",
            LauncherFlags(),
            own=OwnCheckpoints(run_dir, "job"),
            groups=2,
            before=JobProgress(),
            reported=lambda text: None,
        )

    assert ended().code is ExitCode.FAILED
    assert "never said that the job is finished" in ended().reason
    run_dir.summary.write_text(json.dumps({"outcome": "wipe-out", "reason": "every group is lost"}))
    assert ended().code is ExitCode.FAILED
    run_dir.summary.write_text(json.dumps({"outcome": "finished", "reason": "step 9, the last"}))
    assert ended().code is ExitCode.FINISHED


def test_a_command_starts_with_usual_signals() -> None:
    code = (
        "import signal; from spare_megatron.runtime.stop_signals import usual_signals; usual_signals(); "
        "print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )

    def odd() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    ran = subprocess.run([sys.executable, "-c", code], preexec_fn=odd, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[0] == "True set()", os.fsdecode(ran.stderr)


FORKS = """
import os, signal, sys, time
from types import SimpleNamespace
from spare_megatron.worker.signals import stop_on_signals
asked = []
session = SimpleNamespace(request_stop=asked.append)
with stop_on_signals(SimpleNamespace(launcher="spare-launch", lent=False), session):
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], asked)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not asked:
        time.sleep(0.01)
    print(asked)
"""


def test_a_signal_to_a_child_of_a_rank_is_not_the_ranks() -> None:
    """As torch ends the processes that load data."""
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == [f"{signal.SIGTERM.value} []", "['signal SIGUSR1']"], ran.stderr


TORCHRUN = """
import os, signal, time
from types import SimpleNamespace
from spare_megatron.worker import signals
signals.LOST_S = 0.3
asked, over = [], False
class Session:
    orders = SimpleNamespace(over=False, version=1)
    def request_stop(self, why):
        asked.append(why)
    def wait(self, version, timeout_s):
        assert 0 < timeout_s <= signals.LOST_S, timeout_s
        time.sleep(timeout_s)
        return self.orders
with signals.stop_on_signals(SimpleNamespace(launcher="torchrun", lent=False), Session()):
    os.kill(os.getpid(), signal.SIGTERM)
    until_s = time.monotonic() + 20
    while not asked and time.monotonic() < until_s:
        time.sleep(0.01)
print(asked)
"""


def test_torchruns_signal_to_a_group_that_is_not_lost_stops_the_job() -> None:
    ran = subprocess.run([sys.executable, "-c", TORCHRUN], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == ["['signal SIGTERM']"], ran.stderr
