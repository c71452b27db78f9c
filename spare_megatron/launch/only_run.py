"""Keeps a job from beginning in a run directory in which another one trains, before it changes anything there.

A coordinator without a term holds the lock ``coordinator`` for itself, candidates hold it together, so that each kind
keeps the other one out. Coordinators of two Slurm jobs would not: the later one would take over from the earlier one,
as it does from what a start of its own job has left. So a Slurm job begins only where no coordinator of another job
shows signs of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.terms import Term, Terms
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.runtime.run_directory import RunDirectory

LOCK_S = 3.0
"""How long processes of a launch that was killed may hold the lock: they are killed after it."""
LOOK_S = 0.1


async def no_other_kind(run_dir: RunDirectory, owner: str, *, shared: bool) -> None:
    """Raises ConfigError where a coordinator of the other kind is there; ``shared``: this job's are candidates."""
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            run_dir.lock("coordinator", owner, shared=shared, signed=False).release()
            return
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(LOOK_S)


async def no_other_slurm_job(own: OwnCheckpoints, lease_s: float) -> None:
    """Raises ConfigError where a coordinator of another Slurm job holds the lease; else returns within
    a lease, ``lease_s`` or that of the last term."""
    if not (own.run_dir.path / "terms").is_dir() or own.has_begun():
        return
    terms, began_s = Terms(own.run_dir), time.monotonic()
    first: Term | None = None
    while time.monotonic() - began_s < max(lease_s, first.lease_s if first else 0.0):
        with contextlib.suppress(OSError):
            newest = terms.newest()
            if newest is None or newest.over is not None:
                return
            first = first or newest
            if newest != first:
                who = f" (pid {newest.address.pid} on {newest.address.host})" if newest.address else ""
                raise ConfigError(
                    f"the run directory {own.run_dir.path} is in use by another Slurm job, whose coordinator "
                    f"{newest.number}{who} goes on; end that job or give another directory"
                )
        await asyncio.sleep(LOOK_S)
