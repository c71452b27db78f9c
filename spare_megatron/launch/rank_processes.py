"""The rank processes of one job attempt, by group; kills what is left of a group that has lost a rank.

Promises: no two starts of a group have processes in one slot (:mod:`spare_megatron.launch.standby_book`), so no device
has ranks of two; each start of a group has an incarnation and logs of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spare_megatron.launch.group_restarts import FENCED, LATE, Absences, GroupStart, named
from spare_megatron.launch.processes import ListedRank
from spare_megatron.launch.rank_process import RankProcess, RankStarter
from spare_megatron.runtime.run_directory import glance

LOOK_S = 0.5
"""Time between two looks at who is there."""


class RankProcesses:
    """The ranks of one job attempt."""

    def __init__(self, starter: RankStarter) -> None:
        self._starter = starter
        self._starts: dict[GroupStart, list[RankProcess]] = {}
        self._slots: dict[GroupStart, int] = {}

    def start(self, start: GroupStart, slot: int) -> None:
        """Start all ranks of a group; those of the first positions may be there already, ``warm``. Where one cannot be
        started, those before it are killed, and end as any other; OSError where that is the first."""
        ranks = self._starts[start] = list[RankProcess]()
        self._slots[start] = slot
        for position in range(self._starter.ranks_of(start)):
            try:
                ranks.append(self._starter.rank(start, position, slot))
            except OSError:
                if not ranks:
                    raise
                for rank in ranks:
                    rank.child.signal(signal.SIGKILL)
                return

    def adopt(self, start: GroupStart, ranks: Sequence[RankProcess], slot: int) -> None:
        """These processes, which a standby was, are a start of a group from now on."""
        self._starts[start], self._slots[start] = list(ranks), slot

    @property
    def all(self) -> list[RankProcess]:
        """The ranks of every start, also those that have ended."""
        return [rank for _, ranks in sorted(self._starts.items()) for rank in ranks]

    @property
    def living(self) -> list[RankProcess]:
        """Those that have not ended."""
        return [rank for rank in self.all if rank.child.alive]

    def is_left(self, start: GroupStart) -> bool:
        """Whether a process of this start of a group has not ended."""
        return any(rank.child.alive for rank in self._starts.get(start, ()))

    def slot_of(self, start: GroupStart) -> int:
        """The slot in which a start of a group was made."""
        return self._slots[start]

    def in_slot(self, slot: int) -> bool:
        """Whether a process of any start of a group is left in a slot."""
        return any(self._slots[rank.start] == slot for rank in self.living)

    def pids(self) -> dict[int, list[int]]:
        """Group -> its living processes, of groups that have any."""
        found: dict[int, list[int]] = {}
        for rank in self.living:
            found.setdefault(rank.start.group, []).append(rank.child.pid)
        return found

    def log_of(self, start: GroupStart, position: int) -> Path:
        """The output of a rank."""
        return self._starts[start][position].log

    def listed(self) -> list[ListedRank]:
        """The living ranks as processes.json lists them."""
        return [(rank.start.group, rank.position, rank.start.incarnation, rank.child.pid) for rank in self.living]

    async def end_group(self, start: GroupStart, grace_s: float, over: Callable[[], bool]) -> list[RankProcess]:
        """Kill what is left of a group after ``grace_s``, unless the job is ``over`` by then. Processes that a signal
        has stopped are left, and returned: whoever stopped one may want to look at it, or let it go on, and it is then
        fenced."""
        await asyncio.sleep(grace_s)
        left = [rank for rank in self._starts[start] if rank.child.alive and not over()]
        stopped = [rank for rank in left if rank.child.stopped]
        for rank in left:
            if rank not in stopped:
                rank.child.signal(signal.SIGKILL)
        return stopped

    async def end_hung(self, status: Path, over: Callable[[], bool], gone: Callable[[GroupStart, str], None]) -> None:
        """Until the job is ``over``, kill the processes of groups that the coordinator's ``status`` file once named and
        has not named for LEAVE_S: they were fenced, which is final, so an old file does no harm; and of those that it
        should have named. Stopped processes are left. ``gone`` is called once for each such start, with the reason:
        none of its processes may end, where they are stopped or cannot be killed."""
        absences, known = Absences(), set[GroupStart]()
        while not over():
            await asyncio.sleep(LOOK_S)
            reported = glance(status)
            if reported is not None and reported["phase"] == "running":
                starts, now_s = sorted({rank.start for rank in self.living}), time.monotonic()
                found = dict.fromkeys(absences.gone(starts, named(reported), now_s), FENCED)
                found |= dict.fromkeys(absences.late(starts, now_s), LATE)
                for start, why in found.items():
                    if start not in known:
                        known.add(start)
                        gone(start, why)
                    await self.end_group(start, 0.0, over)
