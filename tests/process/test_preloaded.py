"""Forked ranks are as spawned ones, and nothing is left of them or of their parent, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.preload_client import UNKNOWN, ParentLink, connect, search_path_of
from spare_megatron.launch.preload_wire import ForkRefusedError
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.launch.processes import Processes
from spare_megatron.launch.rank_process import RankStarter
from spare_megatron.launch.script_modules import OF_A_JOB, modules_of
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests import preloaded
from tests.polling import until
from tests.process.harness import RESTARTS, ROOT, TOY, Job, launch
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


@contextlib.contextmanager
def own_parent(
    *modules: str, search_path: Sequence[str] = (), **environ: str
) -> Iterator[tuple[ParentLink, subprocess.Popen[bytes]]]:
    """A parent that has imported no more than these modules, and its process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--fd", str(theirs.fileno())],
            cwd=ROOT,
            env={**preloaded.environment(), **environ},
            pass_fds=[theirs.fileno()],
        )
    link = ParentLink(ours)
    try:
        link.greet(modules, search_path or [str(ROOT), *environ.get("PYTHONPATH", "").split(), *sys.path[1:]])
        link.receive()
        yield link, process
    finally:
        link.close()
        process.wait()


@pytest.fixture
def light() -> Iterator[tuple[ParentLink, subprocess.Popen[bytes]]]:
    """A parent that has imported nothing, and its process."""
    with own_parent() as made:
        yield made


def start(link: ParentLink, command: list[str], log: Path, directory: Path, **environ: str) -> Any:
    """Fork a process with its output in ``log``."""
    with open(os.devnull, "rb") as nothing, log.open("ab") as out:
        streams = (nothing.fileno(), out.fileno(), out.fileno())
        process = link.start(command, {**preloaded.environment(), **environ}, streams, str(directory))
    process.release()
    return process


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


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()", "thread"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        *(
            pytest.param(source, f"cannot be imported: {error}", marks=pytest.mark.full)
            for source, error in (
                ("import sys; sys.exit('no')", "SystemExit: no"),
                ("FILE = open('/dev/nvidia-of-a-test')", "FileNotFoundError"),
            )
        ),
    ],
)
def test_a_module_after_which_nothing_may_be_forked_is_named(source: str, sentence: str, tmp_path: Path) -> None:
    """It is left out, and the job runs."""
    name = f"preloaded_{abs(hash(source)) % 10**6}"
    (tmp_path / f"{name}.py").write_text(source)
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", LISTENING: ""}
    words = ("--steps", "2", "--spare-preload", f"{name},json")
    job = launch(tmp_path / "run", *words, groups=2, group_size=1, environ=environ, script=LIGHT)
    job.finish()
    reported = [line for line in (tmp_path / "run" / "launch.out").read_text().splitlines() if name in line]
    assert len(reported) == 1, job.report()
    assert sentence in reported[0]
    assert reported[0].endswith("it is not preloaded")
    assert (tmp_path / "run" / "logs" / "preloaded_parent.log").read_text() == ""


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "import os\nDEVICE = int(os.environ.get('LOCAL_RANK', 0))",
            "reads LOCAL_RANK as it is imported, which each rank",
        ),
        ("import os\nDEVICE = os.getenv('SPARE_GROUP')", "reads SPARE_GROUP as it is imported, which each rank"),
        ("import sys\nRATE = sys.argv[1:]", "reads the command line as it is imported, which each rank"),
        ("import random\nrandom.seed(1)", "uses the random numbers of random as it is imported"),
        (
            "import tempfile\nFOLDER = tempfile.TemporaryDirectory()",
            r"has made the directory /.*, which the first fork",
        ),
        ("FILE = open(__file__)", r"has opened /.*/unfit\.py"),
        ("import socket\nENDS = socket.socketpair()", r"has opened socket:"),
        ("import os, sys\nEMPTY, ALL, ONE = open(os.devnull), {**os.environ}, sys.argv[0]", ""),
        ("import tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    pass", ""),
    ],
)
def test_what_forks_would_share_or_miss_is_not_preloaded(source: str, sentence: str, tmp_path: Path) -> None:
    """One position in a file, and the variables of a rank."""
    (tmp_path / "unfit.py").write_text(source)
    with contextlib.ExitStack() as stack:
        if sentence:
            stack.enter_context(pytest.raises(ForkRefusedError, match=sentence))
        stack.enter_context(own_parent("unfit", PYTHONPATH=str(tmp_path), LOCAL="0"))


def test_what_imports_set_in_the_environment_is_set_in_forked_processes(tmp_path: Path) -> None:
    """Where they would have found what they found."""
    (tmp_path / "setting.py").write_text(
        "import os\nos.environ['ONE'] = '1'\nos.environ.setdefault('TWO', '1')\ndel os.environ['THREE']"
    )
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text("import os; print([os.environ.get(name) for name in ('ONE', 'TWO', 'THREE')])")
    with own_parent("setting", PYTHONPATH=str(tmp_path), THREE="3") as (link, _):
        for own in ({"THREE": "3"}, {"THREE": "3", "TWO": "2"}):
            assert start(link, [sys.executable, str(path)], log, tmp_path, **own).wait(20.0) == 0
    assert log.read_text() == "['1', '1', None]\n['1', '2', None]\n"


def test_the_parent_that_listens_forks_only_for_processes_like_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, search_path = Path(preloaded.socket_path()), [str(ROOT), *sys.path[1:]]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")  # as other tests of this process do: its processes have not got it
    with pytest.raises(ForkRefusedError, match=r"with other values of (\w+, )*OMP_NUM_THREADS"):
        connect(path, OF_A_JOB, search_path, {**preloaded.environment(), "OMP_NUM_THREADS": "3"})
    buffered = {name: value for name, value in preloaded.environment().items() if name != "PYTHONUNBUFFERED"}
    with pytest.raises(ForkRefusedError, match=r"with other values of (\w+, )*PYTHONUNBUFFERED"):
        connect(path, OF_A_JOB, search_path, buffered)
    with pytest.raises(ForkRefusedError, match="is not the package that the script would import"):
        connect(path, OF_A_JOB, [str(tmp_path)], preloaded.environment())
    before = os.umask(0o027)
    try:
        link = connect(path, OF_A_JOB, search_path, preloaded.environment())
    finally:
        os.umask(before)
    script, log = tmp_path / "umask.py", tmp_path / "log"
    script.write_text("import os; print(oct(os.umask(0)))")
    assert start(link, [sys.executable, str(script)], log, tmp_path).wait(30.0) == 0
    assert log.read_text() == "0o27\n"
    link.close()


@contextlib.contextmanager
def listening(path: Path, *modules: str, **environ: str) -> Iterator[Path]:
    """A parent that listens at ``path``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--listen", str(path), *modules],
        cwd=ROOT,
        env={**preloaded.environment(), **environ},
        stdin=subprocess.PIPE,
    )
    try:
        until("its socket", lambda: path.exists() or process.poll() is not None)
        yield path
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def test_the_parent_that_listens_has_imported_what_the_script_would_import(tmp_path: Path) -> None:
    """Not what was in these files before, nor what lies behind them on the script's own search path, nor a part of a
    package without a file, as megatron.core in a clone."""
    old, own = tmp_path / "old", tmp_path / "own"
    files = [folder / name for folder in (old, own) for name in ("model.py", "parts/of.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    for file in files[:2]:
        file.write_text("VALUE = 1")
    environ = {**preloaded.environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{old}"}
    modules, search_path = ("model", "parts.of"), [str(own), str(ROOT), str(old), *sys.path[1:]]
    with listening(tmp_path / "s", *modules, PYTHONPATH=environ["PYTHONPATH"]) as path:
        connect(path, modules, search_path, environ).close()
        for file, other in zip(files[2:], files[:2], strict=True):
            file.write_text("VALUE = 2")
            with pytest.raises(
                ForkRefusedError, match=f"it has imported {other}, where the script would import {file}"
            ):
                connect(path, modules, search_path, environ)
            file.unlink()
        connect(path, modules, search_path, environ).close()
        files[0].write_text("VALUE = 3")
        with pytest.raises(ForkRefusedError, match=f"it has imported {files[0]}, which has changed since"):
            connect(path, modules, search_path, environ)


def test_a_socket_belongs_to_one_parent_and_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is none stays, and so does the socket of a later parent; to another user nothing is sent."""
    search_path, path = [str(ROOT), *sys.path[1:]], tmp_path / "s"
    with listening(path):
        first = path.stat().st_ino
        with listening(tmp_path / "t") as other:
            other.rename(path)
        assert path.stat().st_ino != first
        with socket.socket(socket.AF_UNIX) as theirs:
            path.unlink()
            theirs.bind(str(path))
            theirs.listen()
            monkeypatch.setattr("spare_megatron.launch.preload_wire.peer_user", lambda sock: 4711)
            with pytest.raises(ForkRefusedError, match="it belongs to user 4711"):
                connect(path, (), search_path, preloaded.environment())
            with theirs.accept()[0] as came:
                assert came.recv(1) == b""
    assert path.exists()
    path.unlink()
    path.write_text("of the user")
    words = [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--listen", str(path)]
    refused = subprocess.run(words, cwd=ROOT, env=preloaded.environment(), capture_output=True, text=True, check=False)
    assert "exists and is no socket" in refused.stderr
    assert path.read_text() == "of the user"


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


def test_which_modules_are_preloaded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    command = (sys.executable, str(script))
    script.write_text("import numpy\n")
    assert modules_of(command, "", {}) == ((), "")
    script.write_text("def main():\n    import torch\n")
    assert modules_of(command, "", {}) == (("numpy.random", "torch"), "")
    script.write_text("from spare_megatron.training import pretrain\n")
    assert modules_of(command, "one, two.three", {}) == ((*OF_A_JOB, "one", "two.three"), "")
    assert modules_of(command, "none", {}) == ((), "")
    assert modules_of(command, "", {"LD_PRELOAD": "libjemalloc.so"}) == ((), "LD_PRELOAD is set")
    assert modules_of(("/usr/bin/python3", str(script)), "", {})[1].startswith("/usr/bin/python3 is not the Python")
    assert search_path_of(command)[0] == str(tmp_path)


def test_a_module_is_found_and_its_packages_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "runs_at_import"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0")
    (package / "train.py").write_text("import torch")
    (package / "__main__.py").write_text("import torch")
    monkeypatch.chdir(tmp_path)
    for name, modules in (("train", ("numpy.random", "torch")), ("other", ()), ("train.more", ())):
        assert modules_of((sys.executable, "-m", f"runs_at_import.{name}"), "", {}) == (modules, "")
    assert modules_of((sys.executable, "-m", "runs_at_import"), "", {}) == (("numpy.random", "torch"), "")
    assert modules_of((sys.executable, "-m", "sys"), "", {}) == ((), "")


def test_a_safe_search_path_is_that_of_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONSAFEPATH: the script's directory is not in it, and all of PYTHONPATH is."""
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text("import sys; print(sys.path)")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setattr(sys, "path", ["a launcher's own", str(ROOT), *sys.path])
    search_path = search_path_of((sys.executable, str(path)))
    assert search_path == sys.path[1:]
    with own_parent(search_path=search_path, PYTHONSAFEPATH="1") as (link, _):
        assert start(link, [sys.executable, str(path)], log, tmp_path, PYTHONSAFEPATH="1").wait(20.0) == 0
    assert log.read_text() == f"{search_path}\n"


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
