"""A group of real Megatron ranks is killed, and what waits for its place takes it: the weights of every step are those
of the run without failures, bit for bit, and so is the state from which they go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.monitor.waiting_counts import waiting_counts
from spare_megatron.runtime.run_directory import RunDirectory
from tests.megatron.test_return import kept, train
from tests.process.returning import RETURNS, check_same, held, is_member, leave_whole, voted


@pytest.mark.timeout(900)
def test_a_standby_takes_the_place_with_the_state_of_the_others(tmp_path: Path) -> None:
    # Steps that only wait for the standby would have to be compared.
    inject = (held(3, by=0, until=(1, 1)),)
    flags = ("--spare-redundancy", "2", *RETURNS, "--spare-standby-groups", "1")
    job = train(tmp_path / "run", "PP2", 2, *flags, inject=inject)
    run_dir = RunDirectory(job.run_dir)
    job.wait_for("who waits", lambda: waiting_counts(run_dir) == {"standby": 1}, timeout_s=300.0)
    killed_s = time.time()
    job.kill(*job.pids(1))
    job.wait_for("group 1", lambda: is_member(job, 1, 1), timeout_s=240.0)
    job.wait_for("full strength", lambda: job.metrics[-1]["live_groups"] == 2)
    print(f"full strength {time.time() - killed_s:.2f} s after the signal")
    found = leave_whole(job, 2, (1, 1))
    failure_free = train(tmp_path / "failure-free", "PP2", 1, "--exit-interval", str(max(found)))
    failure_free.finish(timeout_s=400.0)
    check_same(found, voted(failure_free))
    one, other = (digest(last_good(job.run_dir / "save")[0], optimizer=True) for job in (job, failure_free))
    assert one == other, "weights or optimizer differ"
    assert {norm for _, norm in kept(job)} == {norm for _, norm in kept(failure_free)}, "the script's own state differs"
