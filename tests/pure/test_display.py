"""What a launcher shows of the files of its run directory."""

from __future__ import annotations

import asyncio
import contextlib
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

    async def show() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(display.run(), 0.05)

    asyncio.run(show())
    display.close()
    assert capsys.readouterr().out == "of the job that is running\n"
