"""Decides when used standby processes are replaced: not before the group that took them is back, and under the rules
for groups that are started again (pauses, at most so many within an hour, a fit host)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from spare_megatron.config.plural import counted
from spare_megatron.launch.fit_host import until_fit
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupRestarts, GroupStart, named
from spare_megatron.runtime.run_directory import glance

LOOK_S = 0.1
BACK_S = 60.0
"""How long the return of a group is waited for."""


class Refills:
    """Decides for one job attempt when what waited is started anew."""

    def __init__(
        self,
        counts: GroupRestarts,
        status: Path,
        is_left: Callable[[GroupStart], bool],
        in_slot: Callable[[int], bool],
        announce: Callable[[str], None],
        over: Callable[[], bool],
    ) -> None:
        """``counts``: the starts of each key within an hour, over all job attempts; ``status``: the coordinator's
        status.json; ``is_left`` says whether a start of a group has processes, ``in_slot`` whether any start has some
        in a slot."""
        self._counts, self._status, self._announce, self._over = counts, status, announce, over
        self._is_left, self._in_slot = is_left, in_slot

    async def after_return(self, start: GroupStart) -> None:
        """Wait until ``start`` is a member, has ended, or BACK_S are over: other starts would take from its return what
        the host has."""
        deadline_s = time.monotonic() + BACK_S
        while self._is_left(start) and time.monotonic() < deadline_s and not self._over():
            reported = glance(self._status)
            if reported is not None and start.member in named({"live": reported["live"], "learners": {}}):
                return
            await asyncio.sleep(LOOK_S)

    async def until_free(self, slot: int) -> None:
        """Wait until no process of a group is left in a slot."""
        while self._in_slot(slot) and not self._over():
            await asyncio.sleep(LOOK_S)

    async def granted(
        self, key: int, who: str, why: str, fault: Callable[[], Awaitable[HealthFault | None]] | None
    ) -> bool:
        """Wait until ``who`` may be started; False where it is given up, or the job is over.

        ``why``: what has happened to the one before, empty where it got a place; ``fault``: what is wrong with the
        host, None where that need not be asked."""
        if self._over():
            return False
        then = self._counts.after_loss(key, time.monotonic())
        if then.pause_s is None:
            times = f"that was done {counted(then.before, 'time')} within an hour"
            self._announce(f"{f'{why}; ' if why else ''}{who} is not started again: {times}")
            return False
        if why:
            when = f"in {then.pause_s:g} s" if then.pause_s else "now"
            self._announce(f"{why}; it is started again {when}")
        await asyncio.sleep(then.pause_s)
        if fault is not None and not await until_fit(fault, who, self._announce, self._goes_on):
            return False
        self._counts.begins(key, time.monotonic())
        return not self._over()

    async def _goes_on(self) -> bool:
        return not self._over()
