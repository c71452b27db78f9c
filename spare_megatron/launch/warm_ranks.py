"""Has the warm ranks of one life: processes that have imported all that a rank needs, and wait to become one, of any
group."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

from spare_megatron.config.exits import status_words
from spare_megatron.config.plural import counted
from spare_megatron.control.disk import words
from spare_megatron.control.run_directory import RunDirectory
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


class WarmRanks:
    """The warm ranks of one life. Used in one event loop."""

    def __init__(
        self,
        run_dir: RunDirectory,
        starter: RankStarter,
        count: int,
        memory: LaunchMemory,
        refills: Refills,
        beside: Callable[[Coroutine[Any, Any, None]], None],
        changed: Callable[[], None],
    ) -> None:
        """``count``: how many there are to be; ``changed`` is called when the processes that wait are others."""
        self._dir, self._starter, self._count, self._memory = run_dir, starter, count, memory
        self._refills, self._beside, self._changed = refills, beside, changed
        self._seats: dict[int, WaitingProcess] = {}

    def begin(self) -> None:
        """Start all of them."""
        for seat in range(self._count):
            self._start(seat)

    @property
    def waiting(self) -> list[WaitingProcess]:
        """Those that live."""
        return [one for one in self._seats.values() if one.child.alive]

    def take(self, start: GroupStart, slot: int, most: int) -> list[RankProcess]:
        """Give up to ``most`` of them, those that wait first, the first positions of a group that is started in a
        slot."""
        made: list[RankProcess] = []
        taken: list[int] = []
        ready = {seat: waits_since_s(self._dir, [one]) for seat, one in self._seats.items() if one.child.alive}
        for seat in sorted(ready, key=lambda seat: (ready[seat] or math.inf, seat))[:most]:
            one = self._seats.pop(seat)
            taken.append(seat)
            environ = {**place_of_start(start), **self._starter.seat(len(made), slot)}
            try:
                give_place(self._dir, one.name, environ)
            except OSError:
                end([one])  # it may have read it all the same
                continue
            made.append(one.became(start, len(made), self._dir))
        if taken:
            self._beside(self._follow(start, taken))
            self._changed()
        return made

    async def _follow(self, start: GroupStart, seats: list[int]) -> None:
        await self._refills.after_return(start)
        for seat in seats:
            await self._refill(seat, "")

    async def _refill(self, seat: int, why: str) -> None:
        if await self._refills.granted(-1 - seat, "a warm rank", why, None):
            self._start(seat)

    def _start(self, seat: int) -> None:
        name = f"warm-{next(self._memory.numbers)}"
        try:
            self._seats[seat] = self._starter.warm(name, lambda one: self._ended(seat, one))
        except OSError as error:
            self._beside(self._refill(seat, f"a warm rank could not be started: {words(error)}"))
            return
        self._changed()

    def _ended(self, seat: int, one: WaitingProcess) -> None:
        """A process has ended without a place."""
        self._changed()
        if self._seats.get(seat) is one:
            del self._seats[seat]
            status = one.child.status if one.child.status is not None else 1
            self._beside(self._refill(seat, f"a warm rank has ended: {status_words(status)}"))


def in_words(warm: list[RankProcess]) -> str:
    """What is said of a group that is started with them."""
    return f", {counted(len(warm), 'rank')} of it in warm processes" if warm else ""
