"""Forked ranks are as spawned ones, and nothing is left of them or of their parent, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.preload_client import UNKNOWN, ParentLink
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.launch.processes import Processes
from spare_megatron.launch.rank_process import RankStarter
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests import preloaded
from tests.polling import until
from tests.process.harness import RESTARTS, TOY, Job, launch
from tests.process.own_parent import own_parent, start
from tests.process.returning import check_voted
from tests.process.running import has_not_ended

pytestmark = [pytest.mark.timeout(240)]
LIGHT = "tests/process/light_rank.py"

STATE = """
import json, multiprocessing.process, os, random, resource, signal, sys, threading
import numpy, torch
from pathlib import Path

def read(path):
    return Path(path).read_text()

status = {line.split(":")[0]: line.split(":")[1].strip() for line in read("/proc/self/status").splitlines()}
same = {
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1],
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "mask": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    "umask": status["Umask"],
    "threads": [status["Threads"], threading.active_count(), threading.current_thread().name],
    "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")],
    "nice": os.nice(0),
    "processors": sorted(os.sched_getaffinity(0)),
    "directory": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR],
    "standard output": [sys.stdout.line_buffering, sys.stdout.write_through, type(sys.stdout.buffer).__name__],
    "environment": dict(os.environ),
    "shown environment": sorted(read("/proc/self/environ").split(chr(0))),
    "shown command": read("/proc/self/cmdline").split(chr(0)),
    "arguments": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "main": [__name__, __file__, type(__loader__).__name__, __spec__ is None, sorted(globals())],
    "standard streams": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
    "leads its process group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0),
    "terminates": sys.flags.interactive,
    "switch interval": sys.getswitchinterval(),
    "recursion": sys.getrecursionlimit(),
    "torch threads": torch.get_num_threads(),
    "default type": str(torch.get_default_dtype()),
    "own death": status["NoNewPrivs"],
}
drawn = [random.random(), float(numpy.random.rand()), torch.initial_seed(), float(torch.rand(()))]
drawn.append(multiprocessing.current_process().authkey.hex())
print(json.dumps([same, drawn]), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script of a user's own directory."""
    path = tmp_path / "scripts" / "state.py"
    path.parent.mkdir()
    path.write_text(STATE)
    return path


@pytest.fixture
def light() -> Iterator[tuple[ParentLink, subprocess.Popen[bytes]]]:
    """A parent that has imported nothing, and its process."""
    with own_parent() as made:
        yield made


def test_a_forked_process_is_as_a_spawned_one(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, os.path.relpath(script, tmp_path), "--flag", "two words"]
    environ = {**preloaded.environment(), "OWN": "ä 1"}
    outputs = [tmp_path / f"{name}.log" for name in ("spawned", "forked", "again")]
    with outputs[0].open("wb") as log:
        done = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )
        assert done.wait() == 0
    for output in outputs[1:]:
        assert preloaded.fork(command, environ, output, tmp_path).wait(60.0) == 0, output.read_text()
    (spawned, drawn), (forked, drawn_too), (_, drawn_again) = (json.loads(output.read_text()) for output in outputs)
    for state in (spawned, forked):
        state["standard streams"] = [name.replace("forked", "spawned") for name in state["standard streams"]]
    assert forked == spawned
    for one, two, three in zip(drawn, drawn_too, drawn_again, strict=True):
        assert len({one, two, three}) == 3, "a generator has the state of another process"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('of the user')", 1),
        ("import os; os._exit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import sys; sys.exit('a sentence')", 1),
        ("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT),
    ],
)
def test_ends_are_those_of_a_spawned_process(source: str, status: int, tmp_path: Path) -> None:
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text(source)
    command = [sys.executable, str(path)]
    process = preloaded.fork(command, preloaded.environment(), log, tmp_path)
    assert process.wait(60.0) == status
    spawned = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert spawned.returncode == status
    assert log.read_text().splitlines()[-1:] == spawned.stderr.splitlines()[-1:]


@pytest.mark.parametrize("forks", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_many_forks_leave_nothing(
    light: tuple[ParentLink, subprocess.Popen[bytes]], tmp_path: Path, forks: int
) -> None:
    link, process = light
    path = tmp_path / "script.py"
    path.write_text("import sys, os; os._exit(int(sys.argv[1]))")
    parent = psutil.Process(process.pid)
    command = [sys.executable, str(path)]
    for number in range(forks):
        one = start(link, [*command, str(number % 251)], tmp_path / "log", tmp_path)
        assert one.wait(30.0) == number % 251
        if number == 10:
            before = parent.num_fds(), len(os.listdir("/proc/self/fd"))
    assert (parent.num_fds(), len(os.listdir("/proc/self/fd"))) == before
    assert parent.children() == []
    assert parent.num_threads() == 1


def test_an_end_of_the_launcher_ends_what_was_forked(
    light: tuple[ParentLink, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    link, process = light
    path = tmp_path / "script.py"
    path.write_text(
        "import subprocess, time; subprocess.Popen(['sleep', '1000']); print('on', flush=True); time.sleep(99)"
    )
    log = tmp_path / "log"
    pids = [start(link, [sys.executable, str(path)], log, tmp_path).pid for _ in range(3)]
    until("three lines", lambda: log.read_text().count("on") == 3)
    started = [child.pid for pid in pids for child in psutil.Process(pid).children()]
    assert len(started) == 3
    link.close()
    assert process.wait(20.0) == 0
    until("their end", lambda: not any(has_not_ended(pid) for pid in (*pids, *started)))


def test_an_error_of_one_process_is_no_end_of_the_others(tmp_path: Path) -> None:
    """Neither one before its script runs (its directory cannot be entered), nor that of a fork."""
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text("import time; print('on', flush=True); time.sleep(99)")
    command = [sys.executable, str(path)]
    with own_parent(SPARE_FAILPOINTS="preload:preload.fork=EAGAIN,after=2,times=1") as (link, _):
        first = start(link, command, log, tmp_path)
        assert start(link, command, tmp_path / "second", tmp_path / "gone").wait(20.0) == 1
        last = (tmp_path / "second").read_text().splitlines()[-1]
        assert last == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path / 'gone'}'"
        with pytest.raises(BlockingIOError):
            start(link, command, log, tmp_path)
        third = start(link, command, log, tmp_path)
        until("two lines", lambda: log.read_text() == "on\non\n")
        assert (first.poll(), third.poll()) == (None, None)


def test_what_was_forked_outlives_its_parent(light: tuple[ParentLink, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Nobody knows its exit code then, and nothing more is forked."""
    link, process = light
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text("import os; print('on', flush=True); os.read(0, 1)")
    asked, answered = os.pipe()
    with log.open("ab") as out:
        one = link.start([sys.executable, str(path)], preloaded.environment(), (asked, out.fileno(), out.fileno()))
    one.release()
    os.close(asked)
    until("a line", lambda: log.read_text() == "on\n")
    process.kill()
    process.wait()
    assert one.poll() is None
    os.close(answered)
    assert one.wait(20.0) == UNKNOWN
    with pytest.raises(OSError, match=r"does not answer|has ended"):
        start(link, [sys.executable, str(path)], log, tmp_path)


def test_a_parent_that_is_started_with_ignored_and_blocked_signals(tmp_path: Path) -> None:
    """As a shell's ``trap '' CHLD`` leaves them: the kernel then throws exit codes away."""
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text(
        "import signal, sys; print(signal.pthread_sigmask(signal.SIG_BLOCK, ())); sys.exit(int(sys.argv[1]))"
    )
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        stack = contextlib.ExitStack()
        link, _ = stack.enter_context(own_parent())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGCHLD, before)
    with stack:
        assert [start(link, [sys.executable, str(path), code], log, tmp_path).wait(20.0) for code in "34"] == [3, 4]
    assert log.read_text() == "set()\nset()\n"


def parent_of(job: Job) -> int:
    """The preloaded parent of a job's ranks."""
    parent = psutil.Process(job.pid(0, 0)).ppid()
    assert "preloaded_parent" in " ".join(psutil.Process(parent).cmdline())
    return parent


@pytest.mark.parametrize("script", [pytest.param(TOY, marks=pytest.mark.full), LIGHT])
@pytest.mark.parametrize("both", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_kill_of_the_launcher_and_of_both(both: bool, script: str, tmp_path: Path) -> None:
    """Nothing is left."""
    words = ("--steps", "1000", "--piece-s", "0.1", "--spare-preload", "json")
    job = launch(tmp_path / "run", *words, groups=3, environ={LISTENING: ""}, script=script)
    job.wait_for_step(3)
    parent = parent_of(job)
    job.kill(*([parent] if both else []), job.process.pid)
    job.wait_until_gone()
    assert not has_not_ended(parent)


@pytest.mark.parametrize("script", [pytest.param(TOY, marks=pytest.mark.full), LIGHT])
def test_a_kill_of_the_parent(script: str, tmp_path: Path) -> None:
    """The job goes on, and a lost group is started again; one of the toy has its state and is a member."""
    words = ("--steps", "100000", "--piece-s", "0.1", "--spare-preload", "json", RESTARTS, "3")
    job = launch(tmp_path / "run", *words, groups=3, group_size=1, environ={LISTENING: ""}, script=script)
    job.wait_for_step(3)
    job.kill(parent_of(job))
    job.wait_for_step(5)
    job.kill(job.pid(1, 0))
    where = "live" if script == TOY else "learners"
    job.wait_for("group 1", lambda: (glance(job.run_dir / "status.json") or {where: {}})[where].get("1") == 1)
    job.kill(job.process.pid, number=signal.SIGTERM)
    lines = job.finish(code=ExitCode.REQUEUE)
    assert (job.run_dir / "launch.out").read_text().count("the preloaded parent of the ranks has ended") == 1
    assert len(lines) > 5
    if script == TOY:
        check_voted(job.run_dir / "journal.jsonl", groups=3)


def test_a_parent_that_hangs_costs_its_time_out_once(tmp_path: Path) -> None:
    """Ranks are then started as new processes, and the parent's are judged as killed. Those that it has forked train on
    when its answer comes after all."""
    job = launch(
        tmp_path / "run",
        *("--steps", "100000", "--piece-s", "0.1", "--spare-preload", "json"),
        script=LIGHT,
        groups=2,
        group_size=1,
        environ={LISTENING: "", "SPARE_FAILPOINTS": "preload:preload.request=stop,after=1,times=1"},
    )
    output = job.run_dir / "launch.out"
    said = "a rank is started with its own imports: "
    job.wait_for("the time-out", lambda: said in output.read_text())
    job.wait_for_step(3)
    first = job.pid(0, 0)
    job.kill(parent_of(job), number=signal.SIGCONT)
    job.wait_for_step(8)
    assert job.pid(0, 0) == first
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert "the preloaded parent of the ranks has ended" not in output.read_text()


def test_a_parent_that_answers_late_can_be_asked_again(
    light: tuple[ParentLink, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    link, process = light
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text("import sys; print('on', flush=True); sys.stdin.read(); sys.exit(7)")
    link.sock.settimeout(0.2)
    process.send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(OSError, match="the preloaded parent "):
            start(link, [sys.executable, str(path)], log, tmp_path)
    process.send_signal(signal.SIGCONT)
    link.sock.settimeout(20.0)
    assert link.hear()
    assert start(link, [sys.executable, str(path)], log, tmp_path).wait(20.0) == 7
    assert log.read_text() == "on\n", "the process that was given up has not run"


def test_a_variable_that_a_script_sets_after_its_parents_imports_is_named(tmp_path: Path) -> None:
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text(
        "import os\n"
        "from spare_megatron.runtime.import_variables import set_too_late\n"
        "os.environ.update(OMP_NUM_THREADS='3', NCCL_DEBUG='INFO', OWN='1')\n"
        "del os.environ['PYTHONPATH']\n"
        "print(set_too_late(os.environ))\n"
    )
    command = [sys.executable, str(path)]
    assert preloaded.fork(command, preloaded.environment(), log, tmp_path).wait(30.0) == 0
    assert log.read_text() == "['OMP_NUM_THREADS', 'PYTHONPATH']\n"
    done = subprocess.run(command, env=preloaded.environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_what_is_not_released_runs_nothing(light: tuple[ParentLink, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """As where the launcher dies before it has noted the process."""
    link, _ = light
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text("print('on', flush=True)")
    with open(os.devnull, "rb") as nothing, log.open("ab") as out:
        streams = (nothing.fileno(), out.fileno(), out.fileno())
        one = link.start([sys.executable, str(path)], preloaded.environment(), streams)
    time.sleep(0.2)
    assert one.poll() is None
    os.close(one._leash)
    assert one.wait(20.0) == 1
    assert log.read_text() == ""


@pytest.mark.parametrize("given", ["", "2"])
def test_numpy_sums_with_as_many_threads_in_spawned_ranks(given: str, tmp_path: Path) -> None:
    """As in forked ones, whose parent has one: the order of sums depends on it."""
    seen: list[str] = []

    def fork(command: object, environ: Mapping[str, str], streams: object) -> None:
        seen.append(environ["OPENBLAS_NUM_THREADS"])
        raise ChildProcessError

    own = {"OMP_NUM_THREADS": "4", **({"OPENBLAS_NUM_THREADS": given} if given else {})}
    launched = Launch(1, 1, RunDirectory(tmp_path), (sys.executable, "-c", "0"), environ=own)
    with Processes() as processes, pytest.raises(ChildProcessError):
        RankStarter(launched, processes, 1, lambda *_: None, fork).rank(GroupStart(0, 0), 0, 0)
    assert seen == [given or "1"]


@pytest.mark.parametrize("script", [pytest.param(TOY, marks=pytest.mark.full), LIGHT])
def test_ranks_with_several_threads_are_forked_too(script: str, tmp_path: Path) -> None:
    """numpy's library of linear algebra would start threads as it is imported."""
    environ = {LISTENING: "", "OMP_NUM_THREADS": "4"}
    words = ("--steps", "2", "--spare-preload", "numpy.random")
    job = launch(tmp_path / "run", *words, groups=2, group_size=1, environ=environ, script=script)
    job.finish()
    output = (tmp_path / "run" / "launch.out").read_text()
    assert "imports" not in output
    assert "not preloaded" not in output
