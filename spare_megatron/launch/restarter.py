"""Starts lost groups again while the others train, and tells the user of each restart in one line.

It starts a group again when the coordinator reports that the job goes on, and
:mod:`spare_megatron.launch.group_restarts` grants it. Where a standby is there, it gets the place at once; the lost
group may have processes yet, on other devices. Else no process may be left where the group is started, and the host
must be fit (:mod:`spare_megatron.launch.group_health`). A host that is not is looked at again: such a look is no
restart. A group whose results were wrong starts on other devices only, those of a standby or of a spare node: on its
own ones the next results would be wrong too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spare_megatron.config.exits import ExitCode, status_words
from spare_megatron.config.plural import counted
from spare_megatron.launch.coordinator_client import CoordinatorClient
from spare_megatron.launch.fit_host import until_fit
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupStart, LaunchMemory, NextStart
from spare_megatron.runtime.disk import words

ASK_AGAIN_S = 0.25
"""Time after an answer that is neither now nor never until the question is asked again."""
DRAINED_S = 1.0
"""That time where the group may start only elsewhere, perhaps for hours: it is drained, or its results were wrong."""
GONE_LOOK_S = 0.05
"""Time between two looks at whether a group has processes."""


class StandbyStock(Protocol):
    """The standbys as a restarter sees them."""

    @property
    def there(self) -> bool:
        """Whether one could take a place now."""

    @property
    def comes(self) -> bool:
        """Whether one may be there later on."""

    def take(self, start: GroupStart, rests: bool) -> str:
        """Give one the place of a group, as ``start``; returns who has it, in words. Where ``rests`` nothing is started
        on the devices that are left. Raises OSError where it cannot be notified."""

    async def come(self, group: int, timeout_s: float) -> None:
        """Wait until another one is there, or there is news for ``group``; ``timeout_s`` at most."""


class NoStandbys:
    """The stock of a launcher that starts none."""

    there = comes = False

    def take(self, start: GroupStart, rests: bool) -> str:
        """Nobody asks for what is not there."""
        raise AssertionError(f"no standby can be {start}")

    async def come(self, group: int, timeout_s: float) -> None:
        """None will."""
        await asyncio.sleep(timeout_s)


@dataclass(frozen=True, kw_only=True)
class RestartedJob:
    """What a restarter needs of the job attempt whose groups it starts again."""

    trains: Callable[[], bool]
    """Whether any rank of the job lives."""
    over: Callable[[], bool]
    """True when nothing may be started any more."""
    fault: Callable[[GroupStart], Awaitable[HealthFault | None]]
    """Why a group must not be started again now; raises OSError where that cannot be found out."""
    begin: Callable[[GroupStart], None]
    """Starts the ranks of a group; raises OSError where none could be started."""
    announce: Callable[[str], None]
    """Shows one line to the user."""
    is_left: Callable[[int], bool] = lambda group: False
    """Whether a process is left where a group would be started again."""
    before: Callable[[GroupStart], GroupStart | None] = lambda start: None
    """The start that a group left for this one, which has not been a member yet; None for any other."""
    has_room: Callable[[int], bool] = lambda group: False
    """Whether a group has, or could get, other machines than those on which it was lost."""


class Restarter:
    """The restarts of one job attempt."""

    def __init__(
        self, job: RestartedJob, client: CoordinatorClient, memory: LaunchMemory, standbys: StandbyStock | None = None
    ) -> None:
        self._job, self._client, self._memory = job, client, memory
        self._standbys: StandbyStock = standbys or NoStandbys()
        self._drained: set[GroupStart] = set()
        """Starts that an operator has let leave: that counts as no restart, and does not wait."""
        self._unstarted: set[GroupStart] = set()
        """Starts that failed at once: the next attempt counts, whatever was asked of the one before."""
        self._resting: set[GroupStart] = set()
        """Those whose groups are still to be out: where they were nothing is started."""
        self._elsewhere: dict[GroupStart, str] = {}
        """Those that must not be started again where they were, and why."""
        self._handled: set[GroupStart] = set()
        self._first_exits: dict[GroupStart, str] = {}
        """How the first rank of each start of a group ended that has lost one."""
        self._kept_out: set[int] = set()
        self._asked: dict[GroupStart, str] = {}
        """Starts that were asked to leave, to come back in another shape or elsewhere, and why that is no restart."""

    @property
    def works(self) -> bool:
        """Whether lost groups are started again at all."""
        return self._memory.restarts.most > 0

    def note(self, start: GroupStart, position: int, status: int) -> None:
        """A rank has ended; the first one of a start is the reason that the user is shown."""
        how = "fenced" if status == ExitCode.FENCED else status_words(status)
        self._first_exits.setdefault(start, f"rank {position}: {how}")

    def note_error(self, start: GroupStart, sentence: str) -> None:
        """A rank of a group that was started again has found a user's error, or none of it has ended and it is gone all
        the same. Most errors stay, but not all: a disk or a coordinator that was not there for a while is one too."""
        self._first_exits.setdefault(start, sentence)

    def only_elsewhere(self, start: GroupStart) -> str:
        """Why a group that has lost ``start`` must not be started on the same devices; empty where it may be."""
        return self._elsewhere.get(start, "")

    def only_away(self, start: GroupStart) -> bool:
        """Whether a group that has lost ``start`` must not be started on the same devices now: as the last answer of
        the coordinator was, which status.json may be behind of."""
        return start in self._resting

    def asked_to_leave(self, start: GroupStart, why: str = "it has left for that") -> None:
        """A start of a group leaves to come back in another shape, or elsewhere: that counts as no restart, and does
        not wait. ``why`` is what the user reads then."""
        self._asked[start] = why

    def stays(self, start: GroupStart) -> None:
        """A start that was asked to leave does not."""
        self._asked.pop(start, None)

    async def bring_back(self, start: GroupStart) -> None:
        """Start a group again that has lost ``start``, now or after a pause, or say why not; a second call for one
        start does nothing."""
        if not self.works or start in self._handled:
            return
        self._handled.add(start)
        group, restarts = start.group, self._memory.restarts
        if await self._known(start) is None:
            return
        while self._job.is_left(group) and not self._standbys.there:
            await asyncio.sleep(GONE_LOOK_S)
        if self._job.over():
            return
        uncounted = self._uncounted(start)
        then = NextStart(0.0, 0) if uncounted else restarts.after_loss(group, time.monotonic())
        if then.pause_s is None:
            self._kept_out.add(group)
            self._job.announce(
                f"group {group} was restarted {counted(then.before, 'time')} within an hour, and has failed again, "
                f"{self._first_exits[start]}: the job goes on without it"
            )
            return
        if start.restarts and start not in self._asked.keys() | self._drained:
            when = f"in {then.pause_s:g} s" if then.pause_s else "now"
            self._job.announce(
                f"group {group} (incarnation {start.incarnation}) has failed again, {self._first_exits[start]}; it is "
                f"started again {when}"
            )
        if then.pause_s:
            await asyncio.sleep(then.pause_s)
        known = await self._room(start)
        if known is None:
            return
        if not uncounted:
            restarts.begins(group, time.monotonic())
        again = GroupStart(group, self._memory.incarnations.next(group, known), start.restarts + 1)
        try:
            if self._standbys.there:
                taken = self._standbys.take(again, start in self._resting)
                reported = f"the place of group {group} is taken by {taken}"
            else:
                self._job.begin(again)
                reported = f"group {group} is started again, as incarnation {again.incarnation}"
        except OSError as error:
            self._first_exits[again] = f"it could not be started: {words(error)}"
            self._unstarted.add(again)
            if why := self.only_elsewhere(start):
                self._elsewhere[again] = why
            await self.bring_back(again)
            return
        why = uncounted or f"restart {then.before + 1} of at most {restarts.most} within an hour"
        self._job.announce(f"{reported}: {why}")

    def _uncounted(self, start: GroupStart) -> str:
        """Why the loss of ``start`` is followed by no restart that counts; empty where it is."""
        if start in self._asked:
            return self._asked[start]
        if start in self._drained:
            return "it was drained, which counts as no restart"
        return "its attempt at home counts as no restart" if self._job.before(start) is not None else ""

    async def _room(self, start: GroupStart) -> int | None:
        """Wait until a standby is there, or no process of the group is and the host is fit for it; returns the highest
        incarnation of it that the coordinator knows, None where it must not be started again."""
        known: int | None = None

        async def goes_on() -> bool:
            nonlocal known
            known = await self._known(start)
            return known is not None and not self._standbys.there

        while await goes_on():
            if self._job.is_left(start.group):
                await self._standbys.come(start.group, ASK_AGAIN_S)
            elif await until_fit(
                lambda: self._job.fault(start),
                f"group {start.group}",
                self._job.announce,
                goes_on,
                partial(self._standbys.come, start.group),
            ):
                break
        return known

    async def _known(self, start: GroupStart) -> int | None:
        """The highest incarnation of the group that the coordinator knows; None where the group must not be started
        again."""
        group, reported = start.group, False
        while group not in self._kept_out and not self._job.over() and self._job.trains():
            answer = await self._client.ask_restart(group, start.incarnation)
            if answer is None:
                return None
            if answer.never:
                if answer.why:
                    self._kept_out.add(group)
                    self._job.announce(f"group {group} is not started again: {answer.why}")
                return None
            if answer.elsewhere:
                self._elsewhere[start] = answer.why
            if answer.drained:
                self._drained |= {start} - self._unstarted
            wrong = self.only_elsewhere(start)
            if answer.now and not wrong:
                self._resting.discard(start)
                return None if self._job.over() or not self._job.trains() else int(answer.highest_incarnation)
            away = answer.now or answer.drained or answer.elsewhere
            if away:
                self._resting.add(start)
                if self._standbys.there or self._job.has_room(group):
                    return int(answer.highest_incarnation)
            if wrong and not self._standbys.comes:
                self._kept_out.add(group)
                self._job.announce(f"group {group} is not started again: {wrong}")
                return None
            if away and not reported:
                reported = True
                self._job.announce(f"group {group} {_waits_for(wrong)}")
            await asyncio.sleep(DRAINED_S if away else ASK_AGAIN_S)
        return None


def _waits_for(wrong: str) -> str:
    """What a group waits for that cannot be started again where it was: its results were ``wrong``, or it is
    drained."""
    if wrong:
        return f"is not started again where it was, only by a standby or on another node: {wrong}"
    return "is drained: it is started again once spare-drain --undo allows it"
