"""The wall clock of a job's host is set by a day, forwards and backwards, while it trains: no duration shows it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from spare_megatron.coordinator.journal import read
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.protocol.messages import Tuned
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.steady_clock import SteadyClock
from tests.process.harness import ROOT, launch

pytestmark = pytest.mark.timeout(180)
DAY_S, STEPS = 86400.0, 40
WORDS = ("--steps", str(STEPS), "--pieces", "2", "--piece-s", "0.05")
SET_CLOCK = """
import os, time
_now, _now_ns = time.time, time.time_ns
def _by_s():
    try:
        with open(os.environ["WALL_CLOCK_SET_BY"]) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0
time.time = lambda: _now() + _by_s()
time.time_ns = lambda: _now_ns() + int(_by_s() * 1e9)
"""
"""In every process of the job time.time() says what a file says more."""


def test_durations_stay_right_when_the_wall_clock_is_set(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SET_CLOCK)
    clock = tmp_path / "set_by"
    environ = {"PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(ROOT))), "WALL_CLOCK_SET_BY": str(clock)}
    save = ("--save", str(tmp_path / "save"), "--save-interval", "auto", "--mtbf-gpu-hours", "0.01")
    inject = ("coordinator-sigkill:group=0,step=28,at=backward", "sigkill:group=1,step=16,at=reduce")
    began_s = time.monotonic()
    job = launch(tmp_path / "run", *WORDS, *save, groups=2, group_size=1, inject=inject, environ=environ)
    for step, by_s in ((4, DAY_S), (12, -DAY_S), (22, DAY_S), (34, 0.0)):
        job.wait_for(f"step {step}", lambda s=step: any(line["step"] >= s for line in job.metrics), 60)
        clock.with_suffix(".new").write_text(str(by_s))
        clock.with_suffix(".new").rename(clock)
    lines = job.finish(timeout_s=120)
    took_s = time.monotonic() - began_s
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(0 < line["step_time_s"] < 30 for line in lines)
    times = [line["time_unix_s"] for line in lines]
    assert times == sorted(times)
    assert times[-1] - times[0] < took_s
    assert 0 < lines[0]["start_s"] < took_s
    records = list(read(tmp_path / "run" / "journal.jsonl"))
    assert [one.time_unix_s for one in records] == sorted(one.time_unix_s for one in records)
    tuned = [one.event for one in records if isinstance(one.event, Tuned)]
    seen = {name: value for event in tuned for name, value in event.figures.items() if name.endswith("_s")}
    assert {"restart_s", "write_s"} <= seen.keys()
    assert all(0 <= float(value or 0) < took_s for value in seen.values()), seen  # type: ignore[arg-type]
    wall_time = RunFiles(RunDirectory(tmp_path / "run")).look().wall_time()
    assert 0 < wall_time.wall_s < took_s
    assert all(0 <= seconds < took_s for seconds in wall_time.parts.values()), wall_time.parts
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 <= summary["stall_s"] < took_s


def test_a_coordinator_that_is_started_again_goes_on_with_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SteadyClock(RunDirectory(tmp_path))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + DAY_S)
    again = SteadyClock(RunDirectory(tmp_path))
    assert abs(again() - first()) < 1


def test_on_another_host_the_time_is_never_before_the_records(tmp_path: Path) -> None:
    (tmp_path / "clock.json").write_text(json.dumps({"boot": "another host's", "boot_unix_s": 5.0}))
    clock = SteadyClock(RunDirectory(tmp_path))
    assert abs(clock() - time.time()) < 5
    recorded_s = time.time() + DAY_S
    clock.not_before(recorded_s)
    assert recorded_s <= clock() < recorded_s + 5
    assert json.loads((tmp_path / "clock.json").read_text())["boot"] != "another host's"


@pytest.mark.parametrize("text", ["[]", "{", '{"boot": 1}', '{"boot": "x", "boot_unix_s": "y"}', ""])
def test_a_damaged_file_is_read_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "clock.json").write_text(text)
    assert abs(SteadyClock(RunDirectory(tmp_path))() - time.time()) < 5
