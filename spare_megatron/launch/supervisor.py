"""What spare-launch does over all lives of a job: start it, pass signals on, start it again after a wipe-out.

A life (:mod:`spare_megatron.launch.job_attempt`) that ends in a wipe-out is followed by another one from the last good
checkpoint, if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from spare_megatron.config.exits import ExitCode
from spare_megatron.control.disk import patiently
from spare_megatron.control.run_directory import glance
from spare_megatron.launch.job_attempt import Launch, Life
from spare_megatron.launch.processes import Processes, publish_processes
from spare_megatron.launch.restart_checkpoint import checkpoint_to_start_from

LIVES_WITHOUT_COMMIT = 3
"""Lives in a row that end without a single commit, after which starting again is no use."""


class Supervisor:
    """One launch of a job, over all its lives."""

    def __init__(self, launch: Launch, notice: Callable[[str], None]) -> None:
        """``notice`` shows one line to the user."""
        self._launch, self._dir, self._notice = launch, launch.run_dir, notice
        self._stop_reason = ""
        self._stopped_hard = asyncio.Event()
        self._life: Life | None = None

    async def run(self) -> ExitCode:
        """The whole job; its exit code. Raises ConfigError for a user's error."""
        self._dir.create()
        lock = self._dir.lock("launch", "spare-launch")
        for name in (self._dir.errors, self._dir.injected):
            shutil.rmtree(name, ignore_errors=True)
        for path in (self._dir.summary, self._dir.status):
            patiently(partial(path.unlink, missing_ok=True))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, signal.Signals(number).name)
        try:
            with Processes() as processes:
                return await self._lives(processes)
        finally:
            with contextlib.suppress(OSError):  # nobody decides by it, and the job is over
                publish_processes(self._dir.processes, None, {})
            lock.release()

    async def _lives(self, processes: Processes) -> ExitCode:
        number, idle = 1, 0
        while True:
            self._life = Life(self._launch, processes, number, self._notice, self._stopped_hard)
            code = await self._life.run(self._stop_reason)
            if code not in (ExitCode.WIPE_OUT, ExitCode.RESTART):
                return code
            idle = 0 if self._life.committed_anything() else idle + 1
            why = (glance(self._dir.summary) or {}).get("reason", "every group is lost")
            if code is ExitCode.RESTART and self._stop_reason:
                return ExitCode.REQUEUE
            directories = self._launch.checkpoint_dirs
            checkpoint = patiently(  # no process of the job runs now
                partial(checkpoint_to_start_from, self._dir, directories, self._notice, "spare-launch")
            )
            if checkpoint is None:
                dirs = " or ".join(directories) or "(no --save or --load was given)"
                self._notice(f"spare-launch: {why}; there is no good checkpoint in {dirs} to start again from")
                return ExitCode.NO_CHECKPOINT
            if idle >= LIVES_WITHOUT_COMMIT:
                self._notice(f"spare-launch: {why}; {idle} lives of the job ended without a committed step")
                return ExitCode.FAILED
            if self._stop_reason:
                return ExitCode.REQUEUE
            number += 1
            self._notice(f"spare-launch: {why}; the job starts again from {checkpoint}")

    def _signal(self, name: str) -> None:
        """The first signal asks for a save; the second one ends everything."""
        if self._stop_reason:
            self._stopped_hard.set()
            return
        self._stop_reason = f"signal {name}"
        if self._life is not None:
            self._life.request_stop(self._stop_reason)


def run_launch(
    launch: Launch, notice: Callable[[str], None], beside: Sequence[Callable[[], Awaitable[None]]] = ()
) -> ExitCode:
    """Run a launch to its end, with tasks beside it (progress display) that are cancelled then."""

    async def main() -> ExitCode:
        tasks = [asyncio.ensure_future(make()) for make in beside]
        try:
            return await Supervisor(launch, notice).run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())
