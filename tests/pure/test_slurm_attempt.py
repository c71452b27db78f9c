"""When the launcher under Slurm takes all coordinators, all ranks, or Slurm for gone."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.terms import Term
from spare_megatron.launch import slurm_attempt, slurm_commands
from spare_megatron.launch.group_restarts import GroupRestarts, Incarnations, LaunchMemory
from spare_megatron.launch.slurm_attempt import STALE_LEASES, WITHOUT_RANKS_S, SlurmAttempt, SlurmLaunch
from spare_megatron.runtime.run_directory import RunDirectory, write_json
from tests.pure.test_run_files import STATUS

LEASE_S, SUSPENSIONS = 5.0, 20


def attempt_in(folder: Path) -> Any:
    """A job attempt whose coordinators run."""
    allocation = Allocation("7", 2, 2, tasks_of_nodes=(1, 1))
    launch = SlurmLaunch(allocation, RunDirectory(folder), ("python",), 1, 2, LEASE_S, (), (), tls_dir="none")
    memory, nothing = LaunchMemory(GroupRestarts(0), Incarnations()), SimpleNamespace()
    attempt: Any = SlurmAttempt(launch, nothing, memory, lambda _: None, nothing)  # type: ignore[arg-type]
    attempt._coordinators = SimpleNamespace(alive=True, status=None)
    return attempt


@pytest.mark.parametrize("suspended", [True, False])
def test_coordinators_that_were_suspended_with_the_launcher_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suspended: bool
) -> None:
    """Slurm suspends the whole job, time slice after time slice; the launcher is the first to run on. Where it ran all
    the time, the coordinators are gone."""
    attempt, now_s = attempt_in(tmp_path), 0.0
    started, looks = list[float](), 0
    silence_s = 2 * STALE_LEASES * LEASE_S

    def newest(_: Term | None) -> Term:
        """The coordinator beats in every tenth look; before each of these nothing is seen for long."""
        nonlocal now_s, looks
        looks += 1
        now_s += (silence_s if looks % 10 == 9 else 0.1) if suspended else silence_s / 9
        over = ExitCode.FINISHED if looks > 10 * SUSPENSIONS else None
        return Term(1, attempt._number, beat=looks // 10, over=over)

    attempt._newest = newest
    attempt._start_coordinators = lambda: started.append(now_s)
    monkeypatch.setattr(slurm_attempt, "POLL_S", 0.0)
    monkeypatch.setattr(slurm_attempt, "GAP_S", silence_s / 8)
    monkeypatch.setattr(slurm_attempt, "time", SimpleNamespace(monotonic=lambda: now_s))
    code = asyncio.run(attempt._until_over())
    assert (code, bool(started)) == ((ExitCode.FINISHED, False) if suspended else (ExitCode.FAILED, True))


@pytest.mark.parametrize(("live", "code"), [({"0": 0}, ExitCode.FINISHED), ({}, ExitCode.FAILED)])
def test_ranks_outlive_the_srun_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: dict[str, int], code: ExitCode
) -> None:
    attempt, now_s = attempt_in(tmp_path), 0.0
    attempt._ranks = SimpleNamespace(alive=False)
    write_json(attempt._dir.status, STATUS | {"life": attempt._number, "phase": "running", "live": live})

    def newest(_: Term | None) -> Term:
        nonlocal now_s
        now_s += slurm_attempt.GAP_S
        over = ExitCode.FINISHED if now_s > 2 * WITHOUT_RANKS_S else None
        return Term(1, attempt._number, beat=round(now_s), over=over)

    attempt._newest = newest
    attempt._groups = SimpleNamespace(alive=False, errors=list)
    monkeypatch.setattr(slurm_attempt, "POLL_S", 0.0)
    monkeypatch.setattr(slurm_attempt, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert asyncio.run(attempt._until_over()) == code


def test_coordinators_outlive_the_srun_of_their_step(tmp_path: Path) -> None:
    attempt, started = attempt_in(tmp_path), list[str]()
    attempt._start_coordinators = lambda: started.append("others")
    for status, silent_s, others in ((-9, 0.0, 0), (-9, LEASE_S, 1), (0, 0.0, 2)):
        attempt._coordinators = SimpleNamespace(alive=False, status=status)
        assert attempt._keep_coordinators(silent_s)
        assert len(started) == others


def test_a_job_is_queued_again_by_a_slurmctld_that_is_just_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm answers the third time it is asked what it knows; then it is away again, until the next request."""
    asked = list[str]()

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        asked.append(words[-2])
        away = len(asked) in (1, 2, 4, 5)
        return subprocess.CompletedProcess(words, int(away), "" if away else "JobId=7 JobState=RUNNING", "no contact")

    monkeypatch.setattr(slurm_commands, "ask", ask)
    monkeypatch.setattr(slurm_commands, "AWAY_LOOK_S", 0.0)
    assert slurm_commands.reported_at_last("7")["JobState"] == "RUNNING"
    assert slurm_commands.requeue(Allocation("7", 2, 2, tasks_of_nodes=(1, 1))) == ""
    assert asked == ["job"] * 4 + ["requeue", "job", "requeue"]
    monkeypatch.setattr(slurm_commands, "AWAY_S", -1.0)
    asked.clear()
    assert slurm_commands.reported_at_last("7") == {}, "it is away for long"
