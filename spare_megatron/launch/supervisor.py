"""Runs a job for spare-launch, over all its lives: starts it, passes signals on, starts it again where that is due.

:mod:`spare_megatron.launch.job_attempt` runs a life; :mod:`spare_megatron.launch.restart_policy` decides what follows
it.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from spare_megatron.config.exits import SIGNAL_REASON, ExitCode
from spare_megatron.launch.group_restarts import GroupRestarts, Incarnations, LaunchMemory
from spare_megatron.launch.job_attempt import Life
from spare_megatron.launch.life_report import ended_life, forget_last_life
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.preloaded_ranks import PreloadedRanks
from spare_megatron.launch.processes import Processes, publish_processes
from spare_megatron.launch.restart_policy import JobProgress, Obstacles, RestartDecision, after_life
from spare_megatron.runtime.disk import END_PATIENCE_S, SideFiles
from spare_megatron.runtime.stop_signals import TWICE, SignalledStop, hold_stop_signals, stop_signals

SIGNALS_WAIT_S = 0.05
"""A pause after work that blocked the event loop, in which signals that came meanwhile are handled."""
SETTLE_PAUSE_S = 0.5
"""The pause between two attempts to write what could not be written, at the end."""
NO_QUEUE = Obstacles(queue="start the same command again, with --load as --save, to go on")
"""On one machine another life can always begin, but there is no queue: only the user can start the job again."""


class Supervisor:
    """One launch of a job, over all its lives."""

    def __init__(self, launch: Launch, notice: Callable[[str], None]) -> None:
        """``notice`` shows one line to the user."""
        self._launch, self._dir, self._notice = launch, launch.run_dir, notice
        self._stop = SignalledStop()
        self._stopped_hard = asyncio.Event()
        most, pause_s = launch.max_group_restarts, launch.group_restart_pause_s
        self._memory = LaunchMemory(GroupRestarts(most, pause_s), Incarnations(), refills=GroupRestarts(most, pause_s))
        self._side = SideFiles(self._say)
        self._life: Life | None = None

    async def run(self, beside: Sequence[Callable[[], Awaitable[None]]] = ()) -> ExitCode:
        """Run the whole job; returns its exit code. Raises ConfigError for a user's error.

        ``beside`` are tasks (progress display) that begin once the run directory is this job's, and are cancelled at
        its end.
        """
        self._dir.create()
        lock = self._dir.lock("launch", "spare-launch")
        shutil.rmtree(self._dir.injected, ignore_errors=True)
        shutil.rmtree(self._dir.standbys, ignore_errors=True)
        on_stop_signals(self._signal)
        tasks = [asyncio.ensure_future(make()) for make in beside]
        try:
            with Processes() as processes:
                async with PreloadedRanks(self._launch, processes, self._say) as preloaded:
                    return await self._lives(processes, preloaded)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._side.write(self._dir.processes.name, lambda: publish_processes(self._dir.processes, None, ()))
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

    async def _lives(self, processes: Processes, preloaded: PreloadedRanks) -> ExitCode:
        number, progress = 1, JobProgress()
        while True:
            forget_last_life(self._dir)
            memory, say, hard = self._memory, self._say, self._stopped_hard
            life = self._life = Life(self._launch, processes, number, memory, say, self._side, hard, preloaded)
            code = await life.run(self._stop.reason)
            decision = await self._decide(life, code, progress)
            if decision.sentence:
                self._say(decision.sentence)
            if decision.code is not None:
                return decision.code
            number, progress = number + 1, decision.progress

    async def _decide(self, life: Life, code: ExitCode, before: JobProgress) -> RestartDecision:
        """Decide what follows ``life``, no process of which runs any more."""
        directories = self._launch.checkpoint_dirs
        groups = self._launch.num_groups
        ended = ended_life(self._dir, code, life.why_failed, directories, groups, before, self._say, life.killed)
        await asyncio.sleep(SIGNALS_WAIT_S)
        stop_requested = ended.stop_requested or bool(self._stop.reason)
        return after_life(replace(ended, stop_requested=stop_requested, obstacles=NO_QUEUE))

    def _say(self, text: str) -> None:
        self._notice(f"spare-launch: {text}")

    def _signal(self, reason: str) -> None:
        """Ask for a save and an end at the first request; end everything at once at the second."""
        again = bool(self._stop.reason)
        if self._stop.take(reason):
            self._stopped_hard.set()
        elif not again:
            self._say(f"{reason}: the job saves and leaves; {TWICE}")
            if self._life is not None:
                self._life.request_stop(reason)


def on_stop_signals(handle: Callable[[str], None]) -> None:
    """Call ``handle`` in the running loop, with the reason of a stop, for every signal that asks the job to leave."""
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, handle, f"{SIGNAL_REASON} {signal.Signals(number).name}")
