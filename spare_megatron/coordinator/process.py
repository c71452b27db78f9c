"""Runs a coordinator process to its exit code: alone on its run directory, or as one of several candidates."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spare_megatron.collectives.interface import advertised
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.host_port import listen_address
from spare_megatron.coordinator.backlog import DiskFailedError
from spare_megatron.coordinator.election import LeadershipLease, LeaseLostError, wait_for_lease
from spare_megatron.coordinator.journal import JournalError
from spare_megatron.coordinator.records import announce
from spare_megatron.coordinator.server import Coordinator, Options
from spare_megatron.coordinator.terms import show_last
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.stop_signals import ignore_stop_signals

TURNS_STOOD_BACK = 10
"""How many places a candidate whose disk failed steps back, because the disks of others may work."""


def serve_alone(options: Options) -> ExitCode:
    """Run the only coordinator of a run directory to its end.

    Raises:
        ConfigError: a user's error: a bad address or run directory, another coordinator runs on it, or its journal
            has another format.
        JournalError: the replay of the run directory's journal decides something else than the journal says.
    """
    _check(options)
    lock = options.run_dir.lock("coordinator", "spare-coordinator")
    try:
        code = _run(options)
    finally:
        lock.release()
    announce(f"the coordinator leaves with exit code {int(code)}")
    return code


def serve_in_turn(options: Options, index: int, lease_s: float) -> ExitCode:
    """Run candidate ``index`` of several: wait for the lease, hold it, and wait again when it is lost. Returns the
    job's exit code.

    Raises the errors of :func:`serve_alone`; the other candidates then leave as well.
    """
    _check(options)
    if options.job_attempt < 1 or not lease_s > 0:
        raise ConfigError(
            f"--candidate with --life {options.job_attempt} and --lease-s {lease_s:g}: both must be above 0, and the "
            f"job attempt "
            "the same for all candidates"
        )
    lock = options.run_dir.lock("coordinator", "a candidate of a Slurm job", shared=True)
    try:
        return _serve_terms(options, index, lease_s)
    finally:
        lock.release()


def _serve_terms(options: Options, index: int, lease_s: float) -> ExitCode:
    turn = index
    while True:
        ignore_stop_signals()  # the holder of the lease gets them too, and saves
        lease = asyncio.run(wait_for_lease(options.run_dir, turn, lease_s, options.job_attempt))
        if not isinstance(lease, LeadershipLease):
            return ExitCode(lease)
        announce(f"candidate {index} is coordinator {lease.number}")
        code = _serve_term(replace(options, lease=lease, run_dir=lease.run_dir), lease)
        if code is None:
            turn = index if lease.is_lost() else index + TURNS_STOOD_BACK
            announce(f"candidate {index} waits for the lease again")
            continue
        announce(f"the coordinator leaves with exit code {int(code)}")
        return code


def _serve_term(options: Options, lease: LeadershipLease) -> ExitCode | None:
    """Serve until the job is over, and tell the other candidates its exit code. None where the lease was lost before,
    or given up because the disk failed."""
    code: ExitCode | None = ExitCode.FAILED
    try:
        code = _run(options)
    except Exception as error:
        if isinstance(error, LeaseLostError | DiskFailedError) or lease.is_lost():  # no other error counts then
            announce(f"{error}")
            code = None
            return None
        code = ExitCode.BAD_INPUT if isinstance(error, ConfigError | JournalError) else ExitCode.FAILED
        raise
    finally:
        lease.close(code)
    return code


def _check(options: Options) -> None:
    listen_address(options.listen, "127.0.0.1:0")
    advertised(options.listen)
    options.run_dir.create()


def _run(options: Options) -> ExitCode:
    async def run() -> ExitCode:
        if options.lease is None:
            with_retries(lambda: show_last(options.run_dir))
        coordinator = with_retries(lambda: Coordinator(options))  # it may block: nothing else runs in this loop yet
        return await coordinator.run()

    try:
        return asyncio.run(run())
    except PermissionError as error:
        raise ConfigError(f"cannot use {error.filename}: {error.strerror}") from None
