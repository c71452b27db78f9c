"""What a launcher shows of the files of its run directory."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from spare_megatron.cli.display import Display
from spare_megatron.runtime.run_directory import RunDirectory


def test_lines_of_another_job_in_the_same_directory_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that is refused because a job has the directory shows its own sentence alone."""
    run_dir = RunDirectory(tmp_path)
    run_dir.create()
    run_dir.coordinator_log.parent.mkdir(exist_ok=True)
    run_dir.coordinator_log.write_text("of an earlier job\n")
    display = Display(run_dir)
    with run_dir.coordinator_log.open("a") as log:
        log.write("of the job that is running\n")
    display.notice("refused")
    display.close()
    assert capsys.readouterr().out == "refused\n"
    assert not run_dir.launcher_log.exists()

    async def show() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(display.run(), 0.05)

    asyncio.run(show())
    display.close()
    assert capsys.readouterr().out == "of the job that is running\n"


def test_lines_of_the_launcher_are_in_its_log(tmp_path: Path) -> None:
    """Nobody may have read its output; a run directory that is gone stays so."""
    run_dir = RunDirectory(tmp_path / "run")
    display = Display(run_dir)
    display.notice("before the directory is there")
    run_dir.create()

    async def show() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(display.run(), 0.05)

    asyncio.run(show())
    display.notice("later")
    assert run_dir.launcher_log.read_text() == "before the directory is there\nlater\n"
    shutil.rmtree(run_dir.path)
    display.notice("gone")
    assert not run_dir.path.exists()
