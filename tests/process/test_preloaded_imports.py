"""What a preloaded parent may import, and for which processes it forks: for those that would have imported the same."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.launch.preload_client import connect, search_path_of
from spare_megatron.launch.preload_wire import ForkRefusedError
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.launch.script_modules import OF_A_JOB, modules_of
from tests import preloaded
from tests.process.harness import ROOT, launch
from tests.process.own_parent import listening, own_parent, start

pytestmark = [pytest.mark.timeout(240)]
LIGHT = "tests/process/light_rank.py"


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
    words[-1] = str(tmp_path / ("p" * 110))
    refused = subprocess.run(words, cwd=ROOT, env=preloaded.environment(), capture_output=True, text=True, check=False)
    assert "bytes; give a shorter path to --listen" in refused.stderr
    assert path.read_text() == "of the user"


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
