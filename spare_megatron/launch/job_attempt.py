"""Runs one job attempt: its coordinator, which is restarted when it is killed, and its ranks.

It decides nothing about training: it reports exits to the coordinator, ends what is left of a group that lost a rank,
lets :mod:`spare_megatron.launch.restarter` start it again, and returns what the coordinator's exit code says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode, status_words
from spare_megatron.config.plural import counted
from spare_megatron.config.rows import ranks_with
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import security_of
from spare_megatron.launch.attempt_report import (
    LINES_SHOWN,
    code_of,
    end_of_first,
    is_users_error,
    live_groups,
    refusal_of_coordinator,
    tail,
)
from spare_megatron.launch.coordinator_client import CoordinatorClient, with_age
from spare_megatron.launch.coordinator_restarts import COORDINATOR_RESTARTS, CoordinatorRestarts
from spare_megatron.launch.group_health import GroupHealth
from spare_megatron.launch.group_restarts import GroupStart, LaunchMemory
from spare_megatron.launch.group_shapes import GroupShapes, WayHome
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.preloaded_ranks import PreloadedRanks
from spare_megatron.launch.processes import KILLED_S, Child, Processes, publish_processes
from spare_megatron.launch.rank_process import RankStarter
from spare_megatron.launch.rank_processes import LOOK_S, RankProcesses
from spare_megatron.launch.refills import Refills
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.launch.restarter import RestartedJob, Restarter
from spare_megatron.launch.standby_book import StandbyBook
from spare_megatron.launch.standbys import StandbyJob, Standbys
from spare_megatron.runtime.directory_watch import DirectoryWatch
from spare_megatron.runtime.disk import SideFiles, with_retries
from spare_megatron.runtime.run_directory import glance

GROUP_GRACE_S = 0.3
"""Time between the first exit of a rank and the kill of its group's other ranks, in which they can still log why."""
ORDERLY_GRACE_S = 5.0
"""That time where the rank left with exit code 0."""
NO_RANKS_S = 60.0
"""How long a coordinator that was notified of the exit of the last rank has to end the job."""
END_GRACE_S = 15.0
"""How long ranks have to leave when the job is over, before they are killed."""


class LocalAttempt:
    """One start of the whole job, to the end of its coordinator."""

    def __init__(
        self,
        launch: Launch,
        processes: Processes,
        number: int,
        memory: LaunchMemory,
        *,
        own: OwnCheckpoints,
        announce: Callable[[str], None],
        side: SideFiles,
        stopped_hard: asyncio.Event,
        preloaded: PreloadedRanks,
    ) -> None:
        """``announce`` shows one line to the user, behind the launcher's name. ``side`` writes processes.json.
        ``stopped_hard`` ends the job attempt at once."""
        self._launch, self._dir, self._processes, self._number = launch, launch.run_dir, processes, number
        self._memory, self._announce, self._stopped_hard = memory, announce, stopped_hard
        self._preloaded, self._own = preloaded, own
        security = security_of(self._dir, launch.tls_dir, create=True)
        self._client = CoordinatorClient(self._dir, security, lambda: self._exit.done())
        self._side = side
        self._coordinator: Child | None = None
        self._restarts = CoordinatorRestarts()
        self._given_up = ""
        """Why no other coordinator is started; empty while one would be."""
        self._ending = self._asked_to_stop = False
        starter = self._starter = RankStarter(launch, processes, number, self._rank_ended, preloaded.fork)
        ranks = self._ranks = RankProcesses(starter)
        health = GroupHealth(launch, processes.guard, ranks.pids)
        book = self._book = StandbyBook(launch.num_groups, launch.flags.standby_groups)
        refills = Refills(memory.refills, self._dir.status, ranks.is_left, ranks.in_slot, announce, self._is_over)
        waited_for = StandbyJob(
            adopt=lambda start, taken: ranks.adopt(start, taken, book.slot_of(start.group)),
            fault=lambda slot: health.fault(slot, None),
            beside=self._client.beside,
            announce=announce,
            changed=self._publish,
        )
        self._standbys = Standbys(self._dir, starter, book, memory, refills, waited_for)
        self._way_home = WayHome(
            lambda start: health.fault(book.slot_of(start.group), start.group),
            self._client,
            self._dir,
            announce,
            ranks.is_left,
        )
        self._shapes = GroupShapes(
            lambda stages: launch.group_size - ranks_with(launch.group_size, launch.flags.pipeline, stages),
            lambda start: health.fault(book.slot_of(start.group), start.group, starter.ranks_of(start), start.first),
            self._dir,
            self._way_home.before,
        )
        restarted = RestartedJob(
            trains=lambda: bool(ranks.living),
            over=self._is_over,
            fault=self._shapes.fault,
            begin=self._start_again,
            announce=announce,
            is_left=lambda group: ranks.in_slot(book.slot_of(group)),
            before=self._way_home.before,
        )
        self._restarter = Restarter(restarted, self._client, memory, self._standbys)
        self._first_incarnation = 0
        before = with_retries(self._dir.coordinator_for_sure)
        self._journal_attempt = 1 + (before.job_attempt if before else 0)
        self._listening = asyncio.Event()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._config_error: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._first_failure: Path | None = None
        """The log of the first rank that failed."""
        self._first_how = ""
        """Which rank that was, and how it ended, before further words; empty where there was none."""
        self._first_exits: dict[int, tuple[GroupStart, int]] = {}
        """Group -> its newest start of which a process has ended by itself, and the status of the first one."""

    async def run(self, stop_reason: str) -> ExitCode:
        """Run the job attempt until the coordinator has ended it; returns how it ended.

        ``stop_reason``: why the job attempt is to end at once, if it is. Raises ConfigError where any process found a
        user's error."""
        try:
            hard: asyncio.Future[Any] = asyncio.create_task(self._stopped_hard.wait())
            await self._start_coordinator()
            begun: asyncio.Future[Any] = asyncio.create_task(self._can_begin())
            await asyncio.wait({begun, self._exit, self._config_error, hard}, return_when=asyncio.FIRST_COMPLETED)
            if begun.done():  # the coordinator has read what an earlier launch, which may have died, has accepted
                self._starter.saved_step = self._own.begin(self._launch.flags, self._announce)
                self._start_ranks()
            begun.cancel()
            self._client.beside(self._watch_directory())
            if stop_reason:
                self.request_stop(stop_reason)
            ends: set[asyncio.Future[Any]] = {self._exit, self._config_error, hard}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            hard.cancel()
            if self._config_error.done():
                raise ConfigError(self._config_error.result())
            if not self._exit.done():
                return ExitCode.FAILED
            await self._let_ranks_leave()
            if self._config_error.done():
                raise ConfigError(self._config_error.result())
            return code_of(self._exit.result())
        finally:
            self._ending = True
            self._client.close()
            await self._end_everything()

    async def _can_begin(self) -> None:
        """Wait until the coordinator listens, and ranks can be started."""
        await self._listening.wait()
        await self._preloaded.settled()

    def request_stop(self, reason: str) -> None:
        """Ask the coordinator to save and leave; by a signal where it cannot be called."""
        self._asked_to_stop = True
        self._client.request_stop(reason, self._signal_coordinator)

    def _signal_coordinator(self) -> None:
        if self._coordinator is not None and self._coordinator.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._coordinator.pid, signal.SIGTERM)

    @property
    def killed(self) -> frozenset[int]:
        """The groups whose newest start lost its first process by a signal."""
        return frozenset(group for group, (_, status) in self._first_exits.items() if status < 0)

    def why_failed(self) -> str:
        """Why the job attempt failed, where its coordinator gave no reason."""
        if self._given_up:
            return self._given_up
        if self._stopped_hard.is_set():
            return "it was asked to stop a second time, and ended at once"
        logs = [self._first_failure or self._dir.coordinator_errors]
        return self._first_how + end_of_first(logs, f"see {self._dir.logs}")

    # --------------------------------------------------------------------------------------------------- coordinator

    async def _start_coordinator(self) -> None:
        """Start a coordinator and wait until it listens or ends; if it is killed, ``_coordinator_ended`` starts it
        again."""
        launch = self._launch
        command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(self._dir.path)]
        command += ["--listen", launch.listen, "--life", str(self._journal_attempt)]
        if launch.tls_dir:
            command += ["--tls-dir", launch.tls_dir]
        if launch.flags.on_event:
            command += ["--on-event", launch.flags.on_event]
        child = self._coordinator = self._processes.start(
            "coordinator",
            command,
            launch.environ,
            self._dir.coordinator_log,
            ended=self._coordinator_ended,
            err=self._dir.coordinator_errors,
        )
        self._publish()
        while child.alive:
            published = self._dir.coordinator()
            if published is not None and published.pid == child.pid:
                if not self._ranks.all:
                    known, groups = published.highest_incarnation, self._launch.num_groups
                    self._first_incarnation = self._memory.incarnations.first(groups, known)
                self._listening.set()
                return
            await asyncio.sleep(0.005)

    def _coordinator_ended(self, child: Child) -> None:
        """Start a coordinator that was killed again, to go on from its journal. Where it exited by itself, the job
        attempt is over."""
        status = child.status if child.status is not None else 1
        self._publish()
        if self._exit.done() or self._ending:
            return
        why = f"was killed by signal {-status}" if status < 0 else "could not write its journal"
        killed = status < 0 or status == ExitCode.DISK_FAILED
        if killed and self._restarts.another(time.monotonic()):
            self._announce(f"the coordinator {why}; it is started again")
            self._client.beside(self._start_coordinator())
            return
        if killed:
            times = counted(COORDINATOR_RESTARTS, "time")
            self._given_up = f"the coordinator {why}, after it was started again {times} within an hour"
        if status == ExitCode.BAD_INPUT:
            self._refuse(refusal_of_coordinator(self._dir))
        else:
            self._exit.set_result(status if status >= 0 else int(ExitCode.FAILED))

    async def _watch_directory(self) -> None:
        watch = DirectoryWatch(self._dir.path)
        while not self._is_over():
            sentence = await asyncio.to_thread(watch.gone)
            if sentence:
                self._refuse(sentence)
            await asyncio.sleep(LOOK_S)

    def _refuse(self, sentence: str) -> None:
        """End the job attempt with a user's error; only the first one is shown."""
        if not self._config_error.done():
            self._config_error.set_result(sentence)

    # --------------------------------------------------------------------------------------------------------- ranks

    def _start_ranks(self) -> None:
        for group in range(self._launch.num_groups):
            self._ranks.start(GroupStart(group, self._first_incarnation), self._book.slot_of(group))
        self._client.beside(self._start_waiting())
        if self._restarter.works:
            self._client.beside(self._ranks.end_hung(self._dir.status, self._is_over, self._group_gone))
        self._publish()

    async def _start_waiting(self) -> None:
        """Start what waits for a place once the job runs: nobody can have a place before, and groups start sooner."""
        while not self._is_over():
            reported = glance(self._dir.status)
            if reported is not None and reported["phase"] == "running":
                self._standbys.begin()
                return
            await asyncio.sleep(LOOK_S)

    def _start_again(self, start: GroupStart) -> None:
        start = self._shapes.chosen(start)
        self._ranks.start(start, self._book.slot_of(start.group))
        if start.stages:
            self._client.beside(self._way_home.bring_home(start, self._restarter.asked_to_leave, self._restarter.stays))
        else:
            self._client.beside(self._way_home.try_home(start))
        self._publish()

    def _rank_ended(self, start: GroupStart, position: int, child: Child) -> None:
        """Report a rank's exit to the coordinator, and end the rest of its group."""
        status = child.status if child.status is not None else 1
        self._publish()
        if self._exit.done() or self._ending:
            return
        first = self._first_exits.get(start.group, (None, 0))[0] != start
        if first:
            self._first_exits[start.group] = start, status
        if status == ExitCode.BAD_INPUT:
            sentence, exits = self._error_of(start, position), [code for _, code in self._first_exits.values()]
            if not start.restarts and is_users_error(self._number, self._launch.num_groups, exits):
                self._refuse(sentence)
                return
            if first and not start.restarts:
                self._announce(f"group {start.group} cannot start: {sentence}")
            self._restarter.note_error(start, sentence)
        elif self._first_failure is None and status not in (ExitCode.FINISHED, ExitCode.FENCED, ExitCode.WIPE_OUT):
            self._first_failure = self._ranks.log_of(start, position)
            how = status_words(status)
            self._first_how = f"rank {position} of group {start.group} was the first to end, {how}; "
        self._restarter.note(start, position, status)
        exited = pb.Exited(group=start.group, incarnation=start.incarnation, position=position, status=status)
        self._client.beside(self._report(exited, start, time.monotonic()))
        self._client.beside(self._end_group(start, ORDERLY_GRACE_S if status == 0 else GROUP_GRACE_S))

    def _group_gone(self, start: GroupStart, why: str) -> None:
        """A start of a group has been fenced, or hangs, and none of its processes need end: bring the group back."""
        self._restarter.note_error(start, why)
        self._client.beside(self._end_group(start, 0.0))
        self._client.beside(self._restarter.bring_back(start))

    async def _report(self, exited: pb.Exited, lost: GroupStart, ended_s: float) -> None:
        """Report an exit, by which a start of a group is lost, and bring the group back. After the last exit of all,
        the coordinator ends the job; a job that never began is ended here."""
        telling = asyncio.ensure_future(self._client.tell("ReportExit", partial(with_age, exited, ended_s)))
        try:
            while not telling.done():
                await asyncio.wait({telling}, timeout=NO_RANKS_S)
                if not telling.done() and not self._ranks.living:
                    self._announce(f"no rank is left, and the coordinator has not answered for {NO_RANKS_S:g} s")
                    self._end_failed()
                    return
            answer = await telling
        finally:
            telling.cancel()
        if answer is None:
            return
        if self._ranks.living:
            await self._restarter.bring_back(lost)
            return
        if answer.opened or self._asked_to_stop:
            await asyncio.wait({self._exit}, timeout=NO_RANKS_S)
        self._end_failed()

    def _end_failed(self) -> None:
        if not self._exit.done():
            self._exit.set_result(int(ExitCode.FAILED))

    def _error_of(self, start: GroupStart, position: int) -> str:
        """The user's error that a rank has found: its sentence, or else the end of its log."""
        sentences = self._dir.reported_errors(start.group)
        log = self._ranks.log_of(start, position)
        text = tail(sentences[0], LINES_SHOWN) if sentences else tail(log, LINES_SHOWN)
        return text or f"a rank found bad input; see {log}"

    async def _end_group(self, start: GroupStart, grace_s: float) -> None:
        """Kill what is left of a group; stopped processes only at the end of the job."""
        stopped = await self._ranks.end_group(start, grace_s, self._exit.done)
        stays = self._book.slot_of(start.group) == self._ranks.slot_of(start) and not self._standbys.there
        if stopped and self._restarter.works and stays:
            pids = ", ".join(str(rank.child.pid) for rank in stopped)
            self._announce(f"group {start.group} is not started again before its stopped processes have ended: {pids}")

    async def _let_ranks_leave(self) -> None:
        """Wait until the ranks of the live groups have left, for :data:`END_GRACE_S` at most: they know that the job is
        over."""
        live = live_groups(self._dir)
        leaving = [rank.child for rank in self._ranks.living if rank.start.group in live]
        deadline_s = time.monotonic() + END_GRACE_S
        while time.monotonic() < deadline_s and not self._stopped_hard.is_set():
            if not any(rank.alive and not rank.stopped for rank in leaving):
                return
            await asyncio.sleep(0.02)

    async def _end_everything(self) -> None:
        """Kill the ranks, stopped ones too, and the coordinator if it still runs, and wait for their end, for
        :data:`KILLED_S` at most: a process that waits for a dead disk cannot be killed."""
        ranks = [rank.child for rank in self._ranks.all]
        ranks += [one.child for one in self._standbys.waiting]
        children = [*ranks, *([self._coordinator] if self._coordinator else [])]
        for child in children:
            if child.alive:
                child.signal(signal.SIGKILL)
        deadline_s = time.monotonic() + KILLED_S
        while any(child.alive for child in children) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.005)
        left = [str(child.pid) for child in children if child.alive]
        if left:
            self._announce(f"processes that were killed are still there after {KILLED_S:g} s: {', '.join(left)}")
        self._publish()

    # --------------------------------------------------------------------------------------------------------- common

    def _is_over(self) -> bool:
        return self._ending or self._exit.done() or self._config_error.done() or self._stopped_hard.is_set()

    def _publish(self) -> None:
        path = self._dir.processes
        waiting = [(one.name, one.position, one.child.pid, one.child.stopped) for one in self._standbys.waiting]
        self._side.write(path.name, lambda: publish_processes(path, self._coordinator, self._ranks.listed(), waiting))
