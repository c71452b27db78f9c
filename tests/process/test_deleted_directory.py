"""The run directory is deleted under a job that trains: one sentence, and all its processes end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.runtime.run_directory import RunDirectory
from tests.polling import until
from tests.process.harness import ROOT, Job, launch


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["deleted", pytest.param("replaced", marks=pytest.mark.full)])
def test_the_job_ends_and_says_why(tmp_path: Path, how: str) -> None:
    run_dir = tmp_path / "run"
    words = ("--steps", "100000", "--pieces", "2", "--piece-s", "0.1")
    job = launch(run_dir, *words, groups=2, group_size=1)
    job.wait_for("step 3", lambda: any(line["step"] >= 3 for line in job.metrics), 60)
    coordinator = RunDirectory(str(run_dir)).coordinator()
    assert coordinator is not None
    pids = {coordinator.pid, *job.pids(0), *job.pids(1)}  # which a preloaded parent has forked
    processes = [psutil.Process(pid) for pid in pids]
    assert len(processes) == 3
    processes += [one for one in psutil.Process(job.process.pid).children(recursive=True) if one.pid not in pids]
    with (run_dir / "launch.out").open() as output:  # it can be read when its name is gone
        text = _gone(run_dir, tmp_path / "aside", how, job, output)
    assert text.count(f"the run directory {run_dir} was deleted or replaced while the job ran, so the job ends") == 1
    assert "Traceback" not in text
    until_s = time.monotonic() + 30
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
        assert time.monotonic() < until_s, [one for one in processes if one.is_running()]
        time.sleep(0.1)
    sys.stdout.write(text)


def _gone(run_dir: Path, aside: Path, how: str, job: Job, output: TextIO) -> str:
    """What the launcher shows after its run directory is gone."""
    run_dir.rename(aside)
    shutil.rmtree(aside)
    if how == "replaced":
        run_dir.mkdir()
    assert job.process.wait(timeout=90) == ExitCode.BAD_INPUT
    return output.read()


def test_a_coordinator_without_a_launcher_ends_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            until("its start", (run_dir / "status.json").exists, 60)
            run_dir.rename(tmp_path / "aside")
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == ExitCode.BAD_INPUT
    assert errors.startswith(f"spare-coordinator: the run directory {run_dir} was deleted or replaced"), errors
    assert errors.count("\n") == 1
