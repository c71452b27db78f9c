"""Two jobs in one run directory: the second one does not begin, and the first one trains on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import time
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.election import LeadershipLease
from spare_megatron.coordinator.terms import Terms
from spare_megatron.launch import only_run
from spare_megatron.launch.only_run import no_other_kind, no_other_slurm_job
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.runtime.run_directory import RunDirectory, write_json

LEASE_S = 0.3


@pytest.mark.parametrize("shared", [True, False], ids=["spare-slurm", "spare-launch"])
def test_coordinators_with_and_without_a_term_keep_each_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """One without appends to the journal that the holder of the lease appends to."""
    monkeypatch.setattr(only_run, "LOCK_S", 0.0)
    run_dir = RunDirectory(tmp_path)
    there = [run_dir.lock("coordinator", "a job", shared=not shared) for _ in range(1 if shared else 3)]
    with pytest.raises(ConfigError, match=r"is in use by a job \(pid \d+ on .*\); end that job or give another"):
        asyncio.run(no_other_kind(run_dir, "another", shared=shared))
    for lock in there:
        lock.release()
    asyncio.run(no_other_kind(run_dir, "another", shared=shared))


def test_candidates_begin_where_a_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    RunDirectory(tmp_path).lock("coordinator", "a job", shared=True).release()
    with pytest.raises(ConfigError, match="cannot be locked: Function not implemented; give a run directory on"):
        RunDirectory(tmp_path).lock("coordinator", "a job")


def test_a_slurm_job_takes_over_from_what_is_left_of_itself_alone(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    first, second = (OwnCheckpoints(run_dir, job) for job in ("7", "8"))
    asyncio.run(no_other_slurm_job(second, LEASE_S))
    terms = Terms(run_dir)
    term = terms.claim(None, 1)
    assert term is not None
    asyncio.run(no_other_slurm_job(second, LEASE_S))  # its holder is dead
    with contextlib.closing(LeadershipLease(terms, term, LEASE_S, time.monotonic())) as lease:
        write_json(run_dir.began, {"job": "7", "accepted": ""})
        with pytest.raises(ConfigError, match="is in use by another Slurm job, whose coordinator 1 goes on; end that"):
            asyncio.run(no_other_slurm_job(second, LEASE_S))
        asyncio.run(no_other_slurm_job(first, LEASE_S))
        lease.close(0)
        asyncio.run(no_other_slurm_job(second, LEASE_S))
