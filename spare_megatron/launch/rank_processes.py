"""Starts the ranks of one life, group by group, and kills what is left of a group that lost one.

Promises: a group is started again only when no process of its last start is left, so at most one incarnation of a group
has processes; each start of a group has an incarnation and logs of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.injection import VARIABLE
from spare_megatron.control.run_directory import glance
from spare_megatron.launch.group_restarts import Absences, GroupStart, named
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.processes import Child, ListedRank, Processes

LOOK_S = 0.5
"""Time between two looks at who is there."""


@dataclass(frozen=True)
class RankProcess:
    """One rank of one start of a group."""

    start: GroupStart
    position: int
    log: Path
    child: Child


class RankProcesses:
    """The ranks of one life."""

    def __init__(
        self, launch: Launch, processes: Processes, life: int, ended: Callable[[GroupStart, int, Child], None]
    ) -> None:
        """``ended`` is called with the position of each rank that has ended."""
        self._launch, self._processes, self._life, self._ended = launch, processes, life, ended
        self._groups: dict[int, list[RankProcess]] = {}
        """The newest start of each group."""

    def start(self, start: GroupStart) -> None:
        """Start all ranks of a group. Where one cannot be started, those before it are killed, and end as any other;
        OSError where that is the first."""
        assert not self.is_left(start.group), "the last processes of a group are gone before it is started again"
        run_dir, ranks = self._launch.run_dir, list[RankProcess]()
        self._groups[start.group] = ranks
        for position in range(self._launch.group_size):
            later = start.incarnation if start.restarts else None
            log = run_dir.log_of(start.group, position, later)
            try:
                child = self._processes.start(
                    f"group {start.group} rank {position}",
                    self._launch.command,
                    self._environment(start, position),
                    log,
                    lambda child, position=position: self._ended(start, position, child),  # type: ignore[misc]
                )
            except OSError:
                if not ranks:
                    raise
                for rank in ranks:
                    rank.child.signal(signal.SIGKILL)
                return
            ranks.append(RankProcess(start, position, log, child))

    @property
    def all(self) -> list[RankProcess]:
        """The ranks of the newest start of every group, also those that have ended."""
        return [rank for _, ranks in sorted(self._groups.items()) for rank in ranks]

    @property
    def living(self) -> list[RankProcess]:
        """Those that have not ended."""
        return [rank for rank in self.all if rank.child.alive]

    def is_left(self, group: int) -> bool:
        """Whether a process of the group has not ended."""
        return any(rank.child.alive for rank in self._groups.get(group, ()))

    def pids(self) -> dict[int, list[int]]:
        """Group -> its living processes, of groups that have any."""
        found: dict[int, list[int]] = {}
        for rank in self.living:
            found.setdefault(rank.start.group, []).append(rank.child.pid)
        return found

    def log_of(self, start: GroupStart, position: int) -> Path:
        """The output of a rank of the newest start of a group."""
        return self._groups[start.group][position].log

    def listed(self) -> list[ListedRank]:
        """The living ranks as processes.json lists them."""
        return [(rank.start.group, rank.position, rank.start.incarnation, rank.child.pid) for rank in self.living]

    async def end_group(self, start: GroupStart, grace_s: float, over: Callable[[], bool]) -> list[RankProcess]:
        """Kill what is left of a group after ``grace_s``, unless the job is ``over`` by then. Processes that a signal
        has stopped are left, and returned: whoever stopped one may want to look at it, or let it go on, and it is then
        fenced."""
        await asyncio.sleep(grace_s)
        left = [rank for rank in self._groups[start.group] if rank.start == start and rank.child.alive and not over()]
        stopped = [rank for rank in left if rank.child.stopped]
        for rank in left:
            if rank not in stopped:
                rank.child.signal(signal.SIGKILL)
        return stopped

    async def end_hung(self, status: Path, over: Callable[[], bool]) -> None:
        """Until the job is ``over``, kill the processes of groups that the coordinator's ``status`` file once named and
        has not named for LEAVE_S: they were fenced, which is final, so an old file does no harm. Stopped processes are
        left."""
        absences = Absences()
        while not over():
            await asyncio.sleep(LOOK_S)
            told = glance(status)
            if told is not None and told["phase"] == "running":
                starts = sorted({rank.start for rank in self.living})
                for start in absences.gone(starts, named(told), time.monotonic()):
                    await self.end_group(start, 0.0, over)

    def _environment(self, start: GroupStart, position: int) -> dict[str, str]:
        launch = self._launch
        return {
            "OMP_NUM_THREADS": "1",
            **launch.environ,
            "PYTHONUNBUFFERED": "1",
            "LOCAL_RANK": str(start.group * launch.group_size + position),
            "LOCAL_WORLD_SIZE": str(launch.num_groups * launch.group_size),
            "SPARE_GROUP": str(start.group),
            "SPARE_POSITION": str(position),
            "SPARE_NUM_GROUPS": str(launch.num_groups),
            "SPARE_GROUP_SIZE": str(launch.group_size),
            "SPARE_INCARNATION": str(start.incarnation),
            "SPARE_RESTARTS": str(start.restarts),
            "SPARE_LIFE": str(self._life),
            "SPARE_RUN_DIR": str(launch.run_dir.path),
            "SPARE_LAUNCHER_PID": str(os.getpid()),
            "SPARE_STARTS_AGAIN": "1",
            "SPARE_TLS_DIR": launch.tls_dir,
            VARIABLE: "\n".join(launch.injections),
        }
