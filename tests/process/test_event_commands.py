"""The operator's command for events: real commands, that behave and that do not, alone and in a job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.event_commands import AT_ONCE, EventCommands
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.brief_command import _wait_for_others
from tests.polling import until
from tests.process.harness import Job, launch


class Runner:
    """The commands of one coordinator, with what they say."""

    def __init__(self, command: str, **options: Any) -> None:
        self.reported: list[str] = []
        self.commands = EventCommands(command, self.reported.append, **options)

    def tell(self, *numbers: int) -> None:
        for number in numbers:
            self.commands.tell({"number": number})

    def close(self, patience_s: float = 20.0) -> float:
        """Seconds that the close took."""
        began_s = time.monotonic()
        self.commands.close(patience_s)
        return time.monotonic() - began_s


def processes_with(word: str) -> list[int]:
    """The processes that have it in their command lines; not within one of the long numbers that browsers have."""
    found, whole = [], re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    for process in psutil.process_iter(["cmdline", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and process.pid != os.getpid() and any(map(whole.search, process.info["cmdline"] or ())):
            found.append(process.pid)
    return found


def test_each_event_is_a_line_of_json(tmp_path: Path) -> None:
    runner = Runner(f"cat >> {tmp_path}/events; echo much; echo of what nobody receives >&2")
    runner.tell(*range(6))
    runner.close()
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert (sorted(line["number"] for line in lines), runner.reported) == (list(range(6)), [])


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("echo 'no route to host' >&2; echo more >&2; exit 3", "exit code 3: no route to host"),
        ("exit 1", "exit code 1"),
        ("kill -TERM $$", "killed by SIGTERM"),
        ("/there/is/no/such-command", "exit code 127: /bin/sh: "),
    ],
)
def test_of_many_failures_the_first_is_said_and_all_are_counted(command: str, failure: str) -> None:
    runner = Runner(command)
    runner.tell(*range(9))
    runner.close()
    first, last = runner.reported
    assert first.startswith(f"--spare-on-event: the command failed: {failure}")
    assert last == "--spare-on-event: 9 of 9 commands failed, 0 events had none"


def test_a_command_that_hangs_is_killed_with_all_that_it_started() -> None:
    runner = Runner("sleep 98765 & sleep 98765", limit_s=0.3)
    runner.tell(1)
    until("a report", lambda: runner.reported)
    assert runner.reported == [
        "--spare-on-event: the command failed: not done within 0.3 s; later failures are counted only"
    ]
    assert processes_with("98765") == []
    runner.close()


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    runner = Runner(f"sleep 98764 & echo done > {tmp_path}/done")
    runner.tell(1)
    assert runner.close() < 5.0
    assert (tmp_path / "done").exists()
    assert (runner.reported, processes_with("98764")) == ([], [])


def test_killed_processes_are_waited_for_beyond_the_shell() -> None:
    """One that is killed ends when it gets a processor, perhaps after the shell. This one takes its time."""
    shell = subprocess.Popen(("/bin/sh", "-c", "sleep 0.98766 &"), start_new_session=True)
    assert shell.wait() == 0
    _wait_for_others(shell.pid, time.monotonic() + 20.0)
    assert processes_with("0.98766") == []


def test_a_storm_of_events_is_dropped_and_counted_and_nobody_waits() -> None:
    runner = Runner("sleep 98763", queue_most=10)
    began_s = time.monotonic()
    runner.tell(*range(AT_ONCE))
    until("all of them", lambda: len(processes_with("sleep 98763")) >= AT_ONCE)
    runner.tell(*range(1000))
    assert time.monotonic() - began_s < 10.0
    assert len(processes_with("98763")) <= 2 * AT_ONCE, "a shell and a sleep each"
    assert runner.close(patience_s=0.2) < 5.0
    assert processes_with("98763") == []
    assert runner.reported[0] == "--spare-on-event: 10 events wait for their commands; further ones are dropped"
    assert runner.reported[-1] == f"--spare-on-event: {AT_ONCE} of {AT_ONCE} commands failed, 1000 events had none"


@pytest.mark.parametrize(("word", "stream"), [("98762", ""), ("98760", " >&2")])
def test_a_command_that_never_stops_writing_costs_little(word: str, stream: str) -> None:
    runner = Runner(f"yes {word}{stream}", limit_s=1.0)
    runner.tell(1)
    began_s = time.thread_time(), time.process_time()
    runner.close()
    assert time.process_time() - began_s[1] < 0.5
    assert processes_with(word) == []
    line = f": {word}" if stream else ""
    assert runner.reported[0] == (
        f"--spare-on-event: the command failed: not done within 1 s{line}; later failures are counted only"
    )


def test_a_command_gets_no_file_of_this_process(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        runner = Runner(f"ls -l /proc/self/fd > {tmp_path}/files")
        runner.tell(1)
        runner.close()
    assert "held" not in (tmp_path / "files").read_text()


def begin(run_dir: Path, command: str, *words: str, **options: Any) -> Job:
    flags = ("--spare-on-event", command, "--piece-s", "0.01", *words)
    client = {"script": "tests.process.control_client", "options": ("-m",)}
    return launch(run_dir, *flags, groups=2, **client, **options)


def events(job: Job) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (job.run_dir / "events").read_text().splitlines()]
    return sorted(lines, key=lambda event: (event["record"], event["index"]))


def test_a_job_tells_of_loss_restart_wipe_out_and_end(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "save"), "--save-interval", "5", "--spare-max-group-restarts", "1")
    job = begin(tmp_path, f"cat >> {tmp_path}/events", *save, "--steps", "100000")
    job.wait_for("a checkpoint", lambda: (tmp_path / "save" / "iter_0000005").exists())
    job.kill(*job.pids(0))
    job.wait_for("the restart", lambda: any(rank["incarnation"] == 1 for rank in job.ranks()))
    job.wait_for("its word", lambda: '"restart"' in (tmp_path / "events").read_text())
    job.kill(*job.pids(1))
    job.wait_for("the second job attempt", lambda: job.metrics[-1]["life"] == 2)
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    reported = events(job)
    kinds = [event["event"] for event in reported if event["event"] != "save"]
    assert kinds[:5] == ["life", "loss", "patch", "restart", "loss"]
    assert kinds[-3:] == ["wipe_out", "life", "end"]
    assert {event["run_dir"] for event in reported} == {str(tmp_path)}
    end = reported[-1]
    assert (end["step"], end["life"], end["outcome"], end["live"]) == (job.metrics[-1]["step"], 2, "left", [0, 1])


def test_a_killed_coordinator_leaves_no_command_and_its_next_one_repeats_nothing(tmp_path: Path) -> None:
    command = f"cat >> {tmp_path}/events; sleep 98761"
    job = begin(tmp_path, command, "--steps", "100000")
    job.wait_for_step(2)
    job.kill(job.pid(1, 1))
    reported = tmp_path / "events"
    words = ('"life"', '"loss"', '"patch"')
    job.wait_for("all words", lambda: reported.exists() and all(word in reported.read_text() for word in words))
    job.wait_for("the command", lambda: any(map(_is_sleep, processes_with("98761"))))
    job.kill(json.loads((tmp_path / "processes.json").read_text())["coordinator"]["pid"])
    job.wait_for("the end of the command", lambda: not any(map(_is_sleep, processes_with("98761"))))
    step = job.metrics[-1]["step"]
    job.wait_for_step(step + 5)
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert processes_with("98761") == []
    kinds = [event["event"] for event in events(job)]
    assert sorted(kinds) == ["end", "life", "loss", "patch"]


def test_a_process_that_dies_as_it_starts_a_command_leaves_none(tmp_path: Path) -> None:
    command = f"touch {tmp_path}/begun; sleep 98768"
    program = "from spare_megatron.coordinator.event_commands import EventCommands as Commands; import sys; "
    program += "commands = Commands(sys.argv[1], print); commands.tell({}); commands.close(60)"
    environ = {**os.environ, failpoints.VARIABLE: "command.begin=kill"}
    killed = subprocess.run([sys.executable, "-c", program, command], env=environ, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    until("the end of the command", lambda: processes_with("98768") == [])
    assert not (tmp_path / "begun").exists()


def _is_sleep(pid: int) -> bool:
    try:
        return psutil.Process(pid).cmdline()[:1] == ["sleep"]
    except psutil.NoSuchProcess:
        return False
