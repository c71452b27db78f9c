"""The standbys of one job attempt: groups of ranks that have built their model and wait for the place of a lost group.

Promises: a place is given to one standby, all processes of which live and run, or to none; a standby that has lost a
process gets none and is ended; in the slot that a group leaves, the next standby begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.exits import status_words
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupStart, LaunchMemory
from spare_megatron.launch.rank_process import (
    RankProcess,
    RankStarter,
    WaitingProcess,
    end,
    give_place,
    place_of_start,
    waits_since_s,
)
from spare_megatron.launch.refills import Refills
from spare_megatron.launch.standby_book import StandbyBook, first_choice
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import RunDirectory

STOPPED_S = 1.0
"""Time between two looks whether a signal has stopped a process that waits."""


@dataclass
class _Standby:
    slot: int
    ranks: list[WaitingProcess]
    spent: str = ""
    """Why it gets no place any more."""


@dataclass(frozen=True, kw_only=True)
class StandbyJob:
    """What standbys need of their job attempt."""

    adopt: Callable[[GroupStart, list[RankProcess]], None]
    """Takes over the ranks of a standby that got a place."""
    fault: Callable[[int], Awaitable[HealthFault | None]]
    """Says what is wrong with the host for a slot."""
    beside: Callable[[Coroutine[Any, Any, None]], None]
    """Runs something beside everything else."""
    announce: Callable[[str], None]
    """Shows one line to the user."""
    changed: Callable[[], None]
    """Called when the processes that wait are others."""


class Standbys:
    """The standbys of one job attempt. Used in one event loop."""

    def __init__(
        self,
        run_dir: RunDirectory,
        starter: RankStarter,
        book: StandbyBook,
        memory: LaunchMemory,
        refills: Refills,
        job: StandbyJob,
    ) -> None:
        self._dir, self._starter, self._book, self._memory, self._refills = run_dir, starter, book, memory, refills
        self._job = job
        self._standbys: dict[int, _Standby] = {}
        self._came = asyncio.Event()

    def begin(self) -> None:
        """Start a standby in each free slot."""
        slots = self._book.free
        for slot in slots:
            self._start(slot)
        if slots:
            self._job.beside(self._watch())

    @property
    def waiting(self) -> list[WaitingProcess]:
        """Their living processes."""
        return [one for standby in self._standbys.values() for one in standby.ranks if one.child.alive]

    @property
    def there(self) -> bool:
        """Whether one could take a place now."""
        return bool(self._since_s())

    @property
    def comes(self) -> bool:
        """Whether the job has standbys at all."""
        return self._book.standbys > 0

    async def come(self, group: int, timeout_s: float) -> None:
        """Wait until another standby is started, ``timeout_s`` at most."""
        self._came.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._came.wait(), timeout_s)

    def take(self, start: GroupStart, rests: bool) -> str:
        """Give a standby the place of a group, as ``start``; returns who has it, in words. Where ``rests`` no standby
        begins in the slot that is left. Raises OSError where that cannot be written: that standby is ended, since it
        may have read it all the same."""
        since_s = self._since_s()
        number = first_choice(since_s)
        assert number is not None, "asked before"
        standby, at_s = self._standbys[number], since_s[number]
        name = _name(number)
        try:
            give_place(self._dir, name, place_of_start(start))
        except OSError:
            standby.spent = f"the place of standby {number} could not be written"
            end(standby.ranks)
            raise
        del self._standbys[number]
        left = self._book.takes(number, start.group)
        self._job.adopt(start, [one.became(start, one.position, self._dir) for one in standby.ranks])
        self._job.changed()
        if not rests:
            self._job.beside(self._follow(start, left))
        since = "still about to start" if at_s is None else f"waiting since {time.strftime('%X', time.localtime(at_s))}"
        return f"standby {number}, as incarnation {start.incarnation} ({since})"

    def _since_s(self) -> dict[int, float | None]:
        """Standby that could take a place -> since when it waits, None where it does not yet. One with a process that
        a signal has stopped would not read its place."""
        able = {n: [r.child for r in one.ranks] for n, one in self._standbys.items() if not one.spent}
        runs = [n for n, ranks in able.items() if all(rank.alive and not rank.stopped for rank in ranks)]
        return {n: waits_since_s(self._dir, self._standbys[n].ranks) for n in runs}

    async def _follow(self, start: GroupStart, slot: int) -> None:
        """Start the next standby in the slot that was left for ``start``."""
        await self._refills.after_return(start)
        await self._refills.until_free(slot)
        await self._refill(slot, "")

    async def _refill(self, slot: int, why: str) -> None:
        if await self._refills.granted(slot, "a standby", why, lambda: self._job.fault(slot)):
            self._start(slot)

    async def _watch(self) -> None:
        """Have the list of processes written anew when a signal has stopped one that waits, or lets it go on: nobody
        tells a parent, and one that is stopped gets no place."""
        before: set[int] = set()
        while True:
            stopped = {one.child.pid for one in self.waiting if one.child.stopped}
            if stopped != before:
                before = stopped
                self._job.changed()
            await asyncio.sleep(STOPPED_S)

    def _start(self, slot: int) -> None:
        number, spent = next(self._memory.numbers), ""
        ranks = list[WaitingProcess]()
        try:
            self._starter.standby(_name(number), slot, lambda one: self._ended(number, one), ranks)
        except OSError as error:
            spent = f"standby {number} could not be started: {words(error)}"
            if not ranks:
                self._job.beside(self._refill(slot, spent))
                return
            end(ranks)
        self._book.begins(number, slot)
        self._standbys[number] = _Standby(slot, ranks, spent)
        self._came.set()
        self._job.changed()

    def _ended(self, number: int, one: WaitingProcess) -> None:
        """A process has ended without a place: end the others, and start another standby when the last one is gone."""
        standby = self._standbys.get(number)
        self._job.changed()
        if standby is None:
            return
        end(standby.ranks)
        if not standby.spent:
            status = one.child.status if one.child.status is not None else 1
            standby.spent = f"standby {number} has ended, rank {one.position}: {status_words(status)}"
        if not any(rank.child.alive for rank in standby.ranks):
            del self._standbys[number]
            self._book.ends(number)
            self._job.beside(self._refill(standby.slot, standby.spent))


def _name(number: int) -> str:
    return f"standby-{number}"
