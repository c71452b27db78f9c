"""The report that a launcher leaves: whatever happens to it, the launcher goes on, and says why there is none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spare_megatron.cli import report
from spare_megatron.monitor import html_report
from spare_megatron.runtime.run_directory import RunDirectory

NUMBERS = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def interrupted(number: signal.Signals) -> Callable[..., None]:
    def write(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(20.0)
        except Exception as error:
            raise AssertionError("code that catches errors has caught the signal") from error

    return write


def too_long(*_: object) -> None:
    time.sleep(20.0)


def fails(*_: object) -> None:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (interrupted(signal.SIGUSR1), "SIGUSR1 came"),
        (interrupted(signal.SIGTERM), "SIGTERM came"),
        (interrupted(signal.SIGINT), "SIGINT came"),
        (too_long, "not within 0.2 s"),
        (fails, "Stale file handle"),
    ],
)
def test_a_report_that_cannot_be_written_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None], why: str
) -> None:
    monkeypatch.setattr(html_report, "write_report", write)
    monkeypatch.setattr(report, "LEFT_S", 0.2 if write is too_long else 30.0)
    run_dir, reported, before = RunDirectory(tmp_path), list[str](), list(map(signal.getsignal, NUMBERS))
    run_dir.metrics.write_text("")
    run_dir.journal.write_text("")
    report.leave_report(run_dir, reported.append)
    assert [why in one for one in reported] == [True], reported
    assert list(map(signal.getsignal, NUMBERS)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_folder_that_cannot_be_looked_at_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", fails)
    reported: list[str] = []
    report.leave_report(RunDirectory(tmp_path), reported.append)
    assert ["Stale" in one for one in reported] == [True]
