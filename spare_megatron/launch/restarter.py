"""Starts lost groups again while the others train, and tells the user of each restart in one line.

It starts a group again when no process of it is left, the coordinator says that the job goes on and that the group was
not lost for a fault that stays, :mod:`spare_megatron.launch.group_restarts` grants it, and the host is fit for it
(:mod:`spare_megatron.launch.group_health`). A host that is not is looked at again, with pauses as between restarts but
without an end: that costs the others nothing, and somebody may mend it. Such a look is no restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from spare_megatron.config.exits import ExitCode, status_words
from spare_megatron.config.plural import counted
from spare_megatron.control.disk import words
from spare_megatron.launch.coordinator_client import CoordinatorClient
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupStart, LaunchMemory, pause_s

ASK_AGAIN_S = 0.25
"""Time after an answer that is neither now nor never until the question is asked again."""
DRAINED_S = 1.0
"""That time where the group is drained, which may be for hours."""


class Restarter:
    """The restarts of one life."""

    def __init__(
        self,
        lives: Callable[[], bool],
        client: CoordinatorClient,
        memory: LaunchMemory,
        fault: Callable[[GroupStart], Awaitable[HealthFault | None]],
        begin: Callable[[GroupStart], None],
        say: Callable[[str], None],
        over: Callable[[], bool],
    ) -> None:
        """``lives`` says whether any rank of the job lives; ``fault`` why a group must not be started again now, and
        raises OSError where it cannot find out; ``begin`` starts its ranks, and raises OSError where none could be
        started; ``say`` shows one line to the user; ``over`` returns True when nothing may be started any more."""
        self._lives, self._client, self._memory, self._begin = lives, client, memory, begin
        self._fault, self._say, self._over = fault, say, over
        self._first_exits: dict[GroupStart, str] = {}
        """How the first rank of each start of a group ended that has lost one."""
        self._kept_out: set[int] = set()

    @property
    def works(self) -> bool:
        """Whether lost groups are started again at all."""
        return self._memory.restarts.most > 0

    def note(self, start: GroupStart, position: int, status: int) -> None:
        """A rank has ended; the first one of a start is the reason that the user is told."""
        how = "fenced" if status == ExitCode.FENCED else status_words(status)
        self._first_exits.setdefault(start, f"rank {position}: {how}")

    def note_error(self, start: GroupStart, sentence: str) -> None:
        """A rank of a group that was started again has found a user's error. Most of these stay, but not all: a disk or
        a coordinator that was not there for a while is one too."""
        self._first_exits.setdefault(start, sentence)

    async def bring_back(self, start: GroupStart) -> None:
        """Start a group again of whose ``start`` no process is left, now or after a pause, or say why not."""
        group, restarts = start.group, self._memory.restarts
        known = await self._known(start) if self.works else None
        if known is None:
            return
        then = restarts.after_loss(group, time.monotonic())
        if then.pause_s is None:
            self._kept_out.add(group)
            self._say(
                f"group {group} was restarted {counted(then.before, 'time')} within an hour, and has failed again, "
                f"{self._first_exits[start]}: the job goes on without it"
            )
            return
        if start.restarts:
            when = f"in {then.pause_s:g} s" if then.pause_s else "now"
            self._say(
                f"group {group} (incarnation {start.incarnation}) has failed again, {self._first_exits[start]}; it is "
                f"started again {when}"
            )
        if then.pause_s:
            await asyncio.sleep(then.pause_s)
        known = await self._fit(start)
        if known is None:
            return
        restarts.begins(group, time.monotonic())
        again = GroupStart(group, self._memory.incarnations.next(group, known), start.restarts + 1)
        try:
            self._begin(again)
        except OSError as error:
            self._first_exits[again] = f"it could not be started: {words(error)}"
            await self.bring_back(again)
            return
        self._say(
            f"group {group} is started again, as incarnation {again.incarnation}: restart {then.before + 1} of at most "
            f"{restarts.most} within an hour"
        )

    async def _fit(self, start: GroupStart) -> int | None:
        """Wait until the host is fit for a group; returns the highest incarnation of it that the coordinator knows,
        None where it must not be started again. A fault is told when it is new, not each time that it is found."""
        told, looks = "", 0
        while True:
            try:
                fault = await self._fault(start)
            except OSError as error:
                fault = HealthFault("probe", f"the check cannot be started: {words(error)}")
            known = await self._known(start)
            if fault is None or known is None:
                return known
            looks += 1
            if fault.kind != told:
                told = fault.kind
                self._say(
                    f"group {start.group} is not started again yet, {fault.sentence}; looked at again in "
                    f"{pause_s(looks):g} s, and then less and less often"
                )
            await asyncio.sleep(pause_s(looks))

    async def _known(self, start: GroupStart) -> int | None:
        """The highest incarnation of the group that the coordinator knows; None where the group must not be started
        again."""
        group, told = start.group, False
        while group not in self._kept_out and not self._over() and self._lives():
            answer = await self._client.ask_restart(group, start.incarnation)
            if answer is None:
                return None
            if answer.never:
                if answer.why:
                    self._kept_out.add(group)
                    self._say(f"group {group} is not started again: {answer.why}")
                return None
            if answer.now:
                return None if self._over() or not self._lives() else int(answer.highest_incarnation)
            if answer.drained and not told:
                told = True
                self._say(f"group {group} is drained: it is started again once spare-drain --undo allows it")
            await asyncio.sleep(DRAINED_S if answer.drained else ASK_AGAIN_S)
        return None
