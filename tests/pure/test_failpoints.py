"""Failpoints: what a spec says, when it strikes, and that the documented places are those of the code."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.failpoints import (
    APPENDED,
    OPERATIONS_OF_APPENDED,
    OPERATIONS_OF_REPLACED,
    PLACES,
    REPLACED,
    VARIABLE,
    act_as,
    cut,
    hit,
    injected,
    parse,
)
from spare_megatron.runtime.run_directory import read_json, write_json

PACKAGE = Path(failpoints.__file__).parents[1]
STREAMS = {"order": [pb.Order], "report": [pb.GroupReport, pb.RankReport]}


def struck(times: int = 8) -> list[bool]:
    """Whether ENOSPC strikes at each of several passings of one place."""
    seen = []
    for _ in range(times):
        number = None
        try:
            hit("order.sent")
        except OSError as error:
            number = error.errno
        seen.append({None: False, errno.ENOSPC: True}[number])
    return seen


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ("", "11111111"),
        (",after=3", "00011111"),
        (",times=2", "11000000"),
        (",after=2,times=3", "00111000"),
        (",for_s=0", "10000000"),
        (",for_s=60", "11111111"),
        (",while=/nowhere", "00000000"),
    ],
)
def test_when_a_fault_strikes(conditions: str, expected: str) -> None:
    with injected(f"order.sent=ENOSPC{conditions}"):
        assert struck() == [one == "1" for one in expected]
    assert struck() == [False] * 8


def test_while_a_file_is_there(tmp_path: Path) -> None:
    full = tmp_path / "full"
    with injected(f"order.sent=ENOSPC,while={full}"):
        assert struck(1) == [False]
        full.touch()
        assert struck(2) == [True, True]
        full.unlink()
        assert struck(1) == [False]


def test_once_for_each_time_that_a_file_is_there(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    with injected(f"order.sent=ENOSPC,once={armed}"):
        assert struck(1) == [False]
        for _ in range(2):
            armed.touch()
            assert struck(3) == [True, False, False]
            assert not armed.exists()


def test_a_fault_is_one_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_role", "")
    with injected("rank-1:order.sent=ENOSPC"):
        for role, expected in (("coordinator", False), ("rank-0-1", False), ("rank-1-0", True), ("rank-10-0", False)):
            act_as(role)
            assert struck(1) == [expected], role


def test_a_write_is_cut_short_and_a_file_keeps_its_old_content(tmp_path: Path) -> None:
    with injected("journal.write=short:7,times=1"):
        assert [cut("journal.write", b"0123456789") for _ in range(2)] == [b"0123456", b"0123456789"]
    path = tmp_path / "group-3.json"
    write_json(path, {"a": 1})
    for operation in ("write", "rename"):
        with injected(f"group-N.json.{operation}=EIO"), pytest.raises(OSError, match=r"group-3\.json"):
            write_json(path, {"a": 2})
        assert read_json(path) == {"a": 1}
    with injected("group-N.json.read=ESTALE"), pytest.raises(OSError, match=r"group-3\.json"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("journal.wrote=ENOSPC", "'journal.wrote' is no place"),
        ("journal.write", "'journal.write' is no place"),
        ("journal.write=ESOMETHING", "'ESOMETHING' is no action"),
        ("journal.sync=short:3", "nothing is cut short at journal.sync"),
        ("journal.write=short:some", "short is 'some', but must be a number"),
        ("journal.write=kill,after=-1", "after is '-1', but must be a number"),
        ("journal.write=kill,before=1", "'before=1' is no condition"),
    ],
)
def test_a_bad_spec_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^SPARE_FAILPOINTS: ") as caught:
        parse(text)
    assert sentence in str(caught.value)


def test_the_environment_reaches_a_process(tmp_path: Path) -> None:
    program = (
        "from spare_megatron.runtime.failpoints import act_as, hit; "
        "act_as('rank-0-0'); hit('order.sent'); print('alive')"
    )

    def run(spec: str) -> subprocess.CompletedProcess[str]:
        environment = {failpoints.VARIABLE: spec, "PYTHONPATH": str(PACKAGE.parent)}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert run("rank:order.sent=kill").returncode == -signal.SIGKILL
    assert run("launch:order.sent=kill").stdout == "alive\n"
    assert "ConfigError: SPARE_FAILPOINTS: 'nothing'" in run("nothing").stderr
    command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(tmp_path / "run")]
    environment = {failpoints.VARIABLE: "x=y", "PYTHONPATH": str(PACKAGE.parent)}
    bad = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1, bad.stderr


# ------------------------------------------------------------------------------------------------ places and the code


def calls(function: str) -> Iterator[ast.Call]:
    """Calls of one of the module's functions in the package."""
    for path in PACKAGE.rglob("*.py"):
        if path == Path(failpoints.__file__) or "failpoints" not in path.read_text():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == function:
                yield node


def literals(function: str, argument: int) -> set[str]:
    """Texts given to a function as one of its arguments; a part that is computed is written ``*``."""
    return {_text(call.args[argument]) for call in calls(function)}


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    assert isinstance(node, ast.Constant), ast.dump(node)
    return str(node.value)


def test_every_place_is_in_the_code_and_documented() -> None:
    streams = literals("hit_message", 0)
    assert streams == set(STREAMS)
    kinds = {
        f"{stream}.{field.name}"
        for stream in streams
        for message in STREAMS[stream]
        for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields
    }
    of_files = {place for place in literals("hit", 0) if place.startswith("*.")}
    assert literals("hit", 0) - of_files | kinds == set(PLACES)
    assert of_files | literals("cut", 0) == {f"*.{operation}" for operation in OPERATIONS_OF_APPENDED}


def test_every_operation_is_in_the_code_and_documented() -> None:
    assert literals("hit_file", 1) == set(OPERATIONS_OF_REPLACED)


def test_every_file_is_in_the_code_and_documented() -> None:
    """The names that the code gives to the files of a run directory and of a checkpoint directory."""
    modules: tuple[str, ...] = ("runtime/run_directory", "worker/rendezvous", "coordinator/server", "coordinator/terms")
    names = set()
    modules += ("coordinator/journal_parts", "launch/slurm_job", "launch/restart_checkpoint", "checkpoint/folder")
    modules += ("megatron_adapter/checkpoint/manifest_version",)
    for module in modules:
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant) and isinstance(getattr(node, "value", ""), str):
                names.add(_text(node).replace("*", "N"))
    assert set(REPLACED) <= names
    written = {name for name in names if name.endswith((".json", ".txt")) and " " not in name and name[0].isalpha()}
    assert written - {"metadata.json"} <= {*REPLACED, "N.txt"}
    made = [
        _text(node.args[1])
        for module in ("journal", "records")
        for node in ast.walk(ast.parse((PACKAGE / "coordinator" / f"{module}.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AppendedFile"
    ]
    assert list(dict.fromkeys(made)) == list(APPENDED)


STOPS = """
import threading, time
from spare_megatron.runtime import failpoints
failpoints.act_as("x")
here = open({path!r}, "w", buffering=1)
def far():
    failpoints.hit("checkpoint.publish")
    here.write("beyond\\n")
thread = threading.Thread(target=far)
thread.start()
while True:
    sum(range(1000))
"""


def test_a_thread_that_is_stopped_does_not_run_on(tmp_path: Path) -> None:
    """The signal is for the thread: another one, which computes without letting go, would take it later."""
    path = tmp_path / "beyond"
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", STOPS.format(path=str(path))],
            env={**os.environ, VARIABLE: "checkpoint.publish=stop"},
            stderr=subprocess.DEVNULL,
        )
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert path.read_text() == ""
        finally:
            process.kill()
            process.wait()
