"""Runs a job for spare-launch, over all its job attempts: starts it, passes signals on, starts it again where that is
due.

:mod:`spare_megatron.launch.job_attempt` runs a job attempt; :mod:`spare_megatron.launch.restart_policy` decides what
follows it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import SIGNAL_REASON, ExitCode
from spare_megatron.launch.attempt_report import ended_attempt, forget_last_attempt, note_end
from spare_megatron.launch.group_restarts import GroupRestarts, Incarnations, LaunchMemory
from spare_megatron.launch.job_attempt import LocalAttempt
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.only_run import no_other_kind
from spare_megatron.launch.preloaded_ranks import PreloadedRanks
from spare_megatron.launch.processes import Processes, publish_processes
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.launch.restart_policy import JobProgress, Obstacles, RestartDecision, after_attempt
from spare_megatron.runtime.disk import END_PATIENCE_S, SideFiles
from spare_megatron.runtime.save_lock import only_job
from spare_megatron.runtime.stop_signals import TWICE, SignalledStop, hold_stop_signals, stop_signals

SIGNALS_WAIT_S = 0.05
"""A pause after work that blocked the event loop, in which signals that came meanwhile are handled."""
SETTLE_PAUSE_S = 0.5
"""The pause between two attempts to write what could not be written, at the end."""
NO_QUEUE = Obstacles(queue="start the same command again, with --load as --save, to go on")
"""On one machine another job attempt can always begin, but there is no queue: only the user can start the job again."""
NOT_SAVED = Obstacles(queue="as there is no --save, the same command begins where this one began")


class Supervisor:
    """One launch of a job, over all its job attempts."""

    def __init__(self, launch: Launch, notice: Callable[[str], None]) -> None:
        """``notice`` shows one line to the user."""
        self._launch, self._dir, self._notice = launch, launch.run_dir, notice
        self._stop = SignalledStop()
        self._stopped_hard = asyncio.Event()
        most, pause_s = launch.flags.max_group_restarts, launch.flags.group_restart_pause_s
        self._memory = LaunchMemory(GroupRestarts(most, pause_s), Incarnations(), refills=GroupRestarts(most, pause_s))
        self._own = OwnCheckpoints(self._dir, secrets.token_hex(8))
        self._side = SideFiles(self._announce)
        self._job_attempt: LocalAttempt | None = None

    async def run(self, beside: Sequence[Callable[[], Awaitable[None]]] = ()) -> ExitCode:
        """Run the whole job; returns its exit code. Raises ConfigError for a user's error.

        ``beside`` are tasks (progress display) that begin once the run directory is this job's, and are cancelled at
        its end.
        """
        self._dir.create()
        lock = self._dir.lock("launch", "spare-launch")
        await no_other_kind(self._dir, "spare-launch", shared=False)
        shutil.rmtree(self._dir.injected, ignore_errors=True)
        shutil.rmtree(self._dir.standbys, ignore_errors=True)
        on_stop_signals(self._signal)
        tasks, code = [asyncio.ensure_future(make()) for make in beside], ExitCode.FAILED
        try:
            with only_job(self._launch.flags.save_dir, self._dir, self._announce), Processes() as processes:
                async with PreloadedRanks(self._launch, processes, self._announce) as preloaded:
                    code = await self._job_attempts(processes, preloaded)
            return code
        except ConfigError:
            code = ExitCode.BAD_INPUT
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._side.write(self._dir.processes.name, lambda: publish_processes(self._dir.processes, None, ()))
            self._side.write(self._dir.ended.name, lambda: note_end(self._dir, code))
            await self._settle()
            self._dir.sweep()
            lock.release()
            hold_stop_signals()

    async def _settle(self) -> None:
        """Wait for a disk that fails to take the last list of processes, unless a second signal says to end at once."""
        deadline_s = time.monotonic() + END_PATIENCE_S
        while self._dir.path.is_dir() and time.monotonic() < deadline_s and not self._stopped_hard.is_set():
            if self._side.retry():
                return
            await asyncio.sleep(SETTLE_PAUSE_S)

    async def _job_attempts(self, processes: Processes, preloaded: PreloadedRanks) -> ExitCode:
        number, progress = 1, JobProgress()
        while True:
            forget_last_attempt(self._dir)
            memory, announce, hard = self._memory, self._announce, self._stopped_hard
            job_attempt = self._job_attempt = LocalAttempt(
                self._launch,
                processes,
                number,
                memory,
                own=self._own,
                announce=announce,
                side=self._side,
                stopped_hard=hard,
                preloaded=preloaded,
            )
            code = await job_attempt.run(self._stop.reason)
            decision = await self._decide(job_attempt, code, progress)
            if decision.sentence:
                self._announce(decision.sentence)
            if decision.code is not None:
                return decision.code
            number, progress = number + 1, decision.progress

    async def _decide(self, job_attempt: LocalAttempt, code: ExitCode, before: JobProgress) -> RestartDecision:
        """Decide what follows ``job_attempt``, no process of which runs any more."""
        groups = self._launch.num_groups
        ended = ended_attempt(
            self._dir,
            code,
            job_attempt.why_failed,
            self._launch.flags,
            own=self._own,
            groups=groups,
            before=before,
            reported=self._announce,
            killed=job_attempt.killed,
        )
        await asyncio.sleep(SIGNALS_WAIT_S)
        stop_requested = ended.stop_requested or bool(self._stop.reason)
        obstacles = NO_QUEUE if self._launch.flags.save_dir else NOT_SAVED
        return after_attempt(replace(ended, stop_requested=stop_requested, obstacles=obstacles))

    def _announce(self, text: str) -> None:
        self._notice(f"spare-launch: {text}")

    def _signal(self, reason: str) -> None:
        """Ask for a save and an end at the first request; end everything at once at the second."""
        again = bool(self._stop.reason)
        if self._stop.take(reason):
            self._stopped_hard.set()
        elif not again:
            leaves = "saves and leaves" if self._launch.flags.save_dir else "leaves, and saves nothing without --save"
            self._announce(f"{reason}: the job {leaves}; {TWICE}")
            if self._job_attempt is not None:
                self._job_attempt.request_stop(reason)


def on_stop_signals(handle: Callable[[str], None]) -> None:
    """Call ``handle`` in the running loop, with the reason of a stop, for every signal that asks the job to leave."""
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, handle, f"{SIGNAL_REASON} {signal.Signals(number).name}")
