"""Whoever reads a run directory says one sentence where a file says odd things, and no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spare_megatron.cli import drain, report, status, timeline
from spare_megatron.config.errors import ConfigError
from spare_megatron.control_plane.exit_report import read_exit_reports
from spare_megatron.coordinator.journal import JournalError, verify
from spare_megatron.coordinator.records import Records
from spare_megatron.launch.attempt_report import live_groups, own_ends
from spare_megatron.launch.node_agent import launcher_address
from spare_megatron.monitor.page.exposition import exposition
from spare_megatron.monitor.page.followed_run import FollowedRun
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.runtime.run_directory import RunDirectory, glance, read_json, write_json
from tests.pure.scripted_job import ScriptedJob
from tests.pure.written_job import Written

TRIES = 60
ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e400,
    float("nan"),
    "",
    "x",
    [],
    {},
    [1],
    {"x": 1},
    [[]],
    "0",
    0.5,
    {"0": None},
]
FILES = (
    *("status.json", "processes.json", "summary.json", "coordinator.json", "accepted-1.json", "job.json", "clock.json"),
    "launcher.json",
    *("leaders/group-0.json", "errors/group-0-rank-0.words.json", "metrics.jsonl", "journal.jsonl"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with all files."""
    path = tmp_path_factory.mktemp("odd") / "run"
    path.mkdir()
    made = Written(path, ScriptedJob())
    for _ in range(4):
        made.job.step()
    made.go_on()
    made.status()
    known = json.loads((path / "status.json").read_text())
    place = {
        "step": 4,
        "phase": "reduce",
        "rank": 0,
        "pieces": 2,
        "still_s": 0.1,
        "silent_s": 0.1,
        "speed": 0.5,
        "left": 1,
    }
    train = {"steps": 9, "without_failures_s": 9.0, "predicted_s": 9.5, "steps_done": 1, "at_this_pace_s": 9.9}
    moved = {"step": 3, "moved": {"1": {"0": 1}}}
    more = {"groups": dict.fromkeys(known["live"], place), "time_to_train": train, "relieved": moved}
    slow = {"slow_for_long": {"1": {"slowness": 1.5, "share": 1, "since": 2}}, "adopted": {"1": [0]}, "drained": [1]}
    write_json(path / "status.json", {**known, **more, **slow})
    rank = {"group": 0, "position": 0, "incarnation": 0, "pid": 1, "host": "here"}
    waiting = [{"name": "warm-0", "position": 0, "pid": 1}]
    write_json(path / "processes.json", {"coordinator": {"pid": 1}, "ranks": [rank], "waiting": waiting})
    write_json(path / "summary.json", {"outcome": "finished", "reason": "all", "steps": 4, "live_groups": [0, 1]})
    address = {"address": "127.0.0.1:1", "fencing": 1, "life": 1, "highest_incarnation": 0, "pid": 1, "host": "here"}
    write_json(path / "coordinator.json", address)
    write_json(path / "accepted-1.json", {"directory": "/nowhere"})
    write_json(path / "job.json", {"type": "JobDescription", "identity": {}, "train_iters": 4})
    write_json(path / "clock.json", {"boot": "b", "boot_unix_s": 1.0})
    write_json(path / "launcher.json", {"address": "127.0.0.1:1", "host": "here", "pid": 1})
    (path / "leaders").mkdir()
    write_json(path / "leaders" / "group-0.json", {"incarnation": 0, "address": "127.0.0.1:1"})
    (path / "errors").mkdir()
    last = {"group": 0, "incarnation": 0, "position": 0, "time_unix_s": 1.0, "error": "E", "lines": "l", "log": ""}
    write_json(path / "errors" / "group-0-rank-0.words.json", last)
    return path


def departed(run_dir: RunDirectory) -> None:
    """What spare-drain looks at while it waits; it would wait on for a group that has not left."""
    for found in drain.departures(run_dir, [], 0):
        assert found


def watched(run_dir: RunDirectory) -> None:
    run = FollowedRun(0, "run", run_dir)
    run.look()
    run.whole()
    exposition([run])
    if run.trouble:
        raise ConfigError(run.trouble)


def waits(run_dir: RunDirectory) -> None:
    RunFiles(run_dir).look()


def launched(run_dir: RunDirectory) -> None:
    """What launchers and ranks read, for whom an odd file is one that is not there yet."""
    live_groups(run_dir)
    own_ends(run_dir, 1, ())
    read_exit_reports(run_dir.errors)
    run_dir.coordinator()
    run_dir.leader(0, 0)
    glance(run_dir.processes)


def opened(run_dir: RunDirectory) -> None:
    """What a coordinator reads when it is started."""
    Records(run_dir)
    verify(run_dir.journal)
    for read in (run_dir.coordinator_for_sure, run_dir.accepted, lambda: read_json(run_dir.job)):
        read()


READERS: dict[str, Callable[[RunDirectory], object]] = {
    "drain": departed,
    "page": watched,
    "files": waits,
    "launch": launched,
    "coordinator": opened,
    "agent": launcher_address,
}
COMMANDS: dict[str, Callable[[str, str], int]] = {
    "status": lambda run, _: status.main([run]),
    "status --json --wall-time": lambda run, _: status.main([run, "--json", "--wall-time"]),
    "report": lambda run, out: report.main([run, "-o", f"{out}/report.html"]),
    "timeline": lambda run, out: timeline.main([run, "-o", f"{out}/trace"]),
}


def sentence_of(reader: Callable[[RunDirectory], object], run: Path) -> str:
    """What the reader says of the directory; empty where it reads it. Other errors go on to the test."""
    try:
        reader(RunDirectory(run))
    except (ConfigError, JournalError) as error:
        return str(error)
    except ValueError as error:
        if str(run) not in str(error):
            raise
        return str(error)
    return ""


def read_by_all(run: Path, out: str) -> None:
    """Every command ends with 0, or with 2 and one line; every other reader with one sentence at most."""
    for name, command in COMMANDS.items():
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = command(str(run), out)
        reported = errors.getvalue()
        assert (code, reported.count("\n")) in ((0, 0), (2, 1)), (name, code, reported)
    for name, reader in READERS.items():
        reported = sentence_of(reader, run)
        assert "\n" not in reported, (name, reported)


def changed(plain: Any, path: list[int], odd: Any) -> Any:
    """A copy in which the value that ``path`` leads to is another; where it leads too far, the last one before."""
    if not path or not isinstance(plain, (dict, list)) or not plain:
        return odd
    keys = list(plain) if isinstance(plain, dict) else list(range(len(plain)))
    key = keys[path[0] % len(keys)]
    copy = dict(plain) if isinstance(plain, dict) else list(plain)
    if odd == "remove" and (len(path) == 1 or not isinstance(plain[key], (dict, list))):
        del copy[key]
    else:
        copy[key] = changed(plain[key], path[1:], odd)
    return copy


def test_the_files_as_they_are_are_read_by_all(whole: Path, tmp_path: Path) -> None:
    for name, command in COMMANDS.items():
        assert command(str(whole), str(tmp_path)) == 0, name
    for reader in READERS.values():
        reader(RunDirectory(whole))


@settings(
    max_examples=TRIES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(FILES),
    line=st.integers(0, 1 << 16),
    path=st.lists(st.integers(0, 1 << 16), max_size=4),
    odd=st.sampled_from([*ODD, "remove"]),
)
@example("status.json", 0, [2], "x")
@example("metrics.jsonl", 0, [], None)
def test_odd_values(whole: Path, name: str, line: int, path: list[int], odd: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(whole, f"{folder}/run"))
        lines = (run / name).read_text().splitlines()
        number = line % len(lines) if name.endswith("l") else 0
        text = lines[number] if name.endswith("l") else (run / name).read_text()
        new = json.dumps(changed(json.loads(text), path, odd))
        (run / name).write_text(
            "\n".join([*lines[:number], new, *lines[number + 1 :]]) + "\n" if name.endswith("l") else new
        )
        read_by_all(run, folder)


@settings(
    max_examples=TRIES // 3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(FILES),
    content=st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"[" * 5000, b"null", b"[]\n", b"3\n"])),
)
def test_odd_bytes(whole: Path, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(whole, f"{folder}/run"))
        (run / name).write_bytes(content)
        read_by_all(run, folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone(whole: Path, tmp_path: Path, name: str) -> None:
    """Its steps have a job attempt of which the journal knows nothing, where the journal is."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / name).unlink()
    read_by_all(run, str(tmp_path))


def test_steps_of_a_job_attempt_that_the_journal_does_not_have(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["life"] = 9
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read_by_all(run, str(tmp_path))


def test_the_recursion_limit_is_the_usual_one() -> None:
    """[[[[... of 5000 is deeper than json reads."""
    assert sys.getrecursionlimit() <= 5000
