"""Chooses the shape in which a lost group comes back, and brings it home when its host is fit for that again.

Where the host is not fit for all ranks of a group, a smaller shape (:mod:`spare_megatron.config.rows`) needs fewer: it
is taken if the host is fit for it, the largest one first, on the first or the last of the group's devices. Such a group
computes more slowly. The host is looked at again every :data:`HOME_LOOK_S`; once it is fit for the home shape the group
is drained for now, so that it leaves with a commit, and is started again at once. Where the group finds its host unfit
all the same, or fails there before it is a member, it is in the shape that it left again, and waits twice as long
before the next attempt, so it does not go back and forth.

Promises: a group leaves its smaller shape only by a drain that others can do without, or by its own loss; it goes home
in the end, if its host stays fit; a drain that an operator has asked for is not taken back, whenever that was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from spare_megatron.config.job import JobDescription
from spare_megatron.config.plural import counted
from spare_megatron.launch.coordinator_client import Teller, drain_for_now
from spare_megatron.launch.fit_host import found
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.protocol.codec import decode
from spare_megatron.runtime.run_directory import RunDirectory, glance

HOME_LOOK_S = 10.0
"""Time between two looks at whether a host is fit for the home shape."""
HOME_LOOKS_MOST = 32
"""So many of these times a group waits at most that was on its way home and is in a smaller shape again."""
LEAVE_LOOK_S = 0.1
"""Time between two looks at whether a group has left."""

Fault = Callable[[GroupStart], Awaitable[HealthFault | None]]


class WayHome:
    """Brings groups of one job attempt home that are in a smaller shape."""

    def __init__(
        self,
        fault: Fault,
        client: Teller,
        run_dir: RunDirectory,
        announce: Callable[[str], None],
        is_left: Callable[[GroupStart], bool],
    ) -> None:
        """``fault`` says why a start could not be in its home shape now; ``is_left`` whether a process of it is
        there."""
        self._fault, self._client, self._dir = fault, client, run_dir
        self._announce, self._is_left = announce, is_left
        self._ways: dict[int, tuple[GroupStart, int]] = {}
        """Group -> the start that left last to go home, and how many have done so one after the other; until the group
        is a member at home."""
        self._attempts: dict[GroupStart, GroupStart] = {}
        """Start at home that has not been a member -> the one that left for it."""

    async def bring_home(
        self, start: GroupStart, leaves: Callable[[GroupStart], None], stays: Callable[[GroupStart], None]
    ) -> None:
        """While ``start`` is in a smaller shape, wait until its host is fit for the home shape, then have the group
        leave with a commit; ``leaves`` is called before, and whoever starts lost groups again does the rest. ``stays``
        is called where others cannot do without the group, or an operator lets it stay; then it is asked again
        later."""
        self._announce(
            f"group {start.group} is started with {counted(start.stages, 'pipeline stage')} until all its devices are "
            "fit"
        )
        left, ways = self._ways.get(start.group, (start, 0))
        ways = ways if start.incarnation <= left.incarnation + 2 else 0
        reported = ""
        await asyncio.sleep(HOME_LOOK_S * (min(HOME_LOOKS_MOST, 2**ways) - 1))
        while self._is_left(start):
            fault = await found(lambda: self._fault(start))
            if fault is None and self._is_left(start) and self._can_be_asked(start.group):
                leaves(start)
                kept = await self._leave(start)
                if not kept:
                    self._ways[start.group] = start, ways + 1
                    await drain_for_now(self._client, [start.group], f"group {start.group} has left", undo=True)
                    return
                stays(start)
                if kept != reported:
                    reported = kept
                    self._announce(f"group {start.group} stays as it is for now: {kept}")
            await asyncio.sleep(HOME_LOOK_S)

    async def _leave(self, start: GroupStart) -> str:
        """Have a group leave with a commit; why it stays, empty where it has left or the job is over."""
        group, reason, seen = start.group, "all its devices are fit again", False
        answer = await drain_for_now(self._client, [group], reason)
        if answer is None or answer.refusal:
            return "" if answer is None else answer.refusal
        self._announce(f"group {group} leaves with a commit, because {reason}")
        while self._is_left(start):
            free = self._can_be_asked(group)
            if seen and free:
                return "spare-drain --undo has taken back that it is to leave"
            seen = seen or not free  # status.json may be older than the request
            await asyncio.sleep(LEAVE_LOOK_S)
        return ""

    async def try_home(self, start: GroupStart) -> None:
        """``start`` has the home shape; if the group has left for it, wait until it is a member, or is lost."""
        left, _ = self._ways.get(start.group, (start, 0))
        if start.incarnation != left.incarnation + 1:
            return
        self._attempts[start] = left
        while self._is_left(start):
            if (glance(self._dir.status) or {}).get("live", {}).get(str(start.group)) == start.incarnation:
                del self._attempts[start], self._ways[start.group]
                return
            await asyncio.sleep(LEAVE_LOOK_S)

    def before(self, start: GroupStart) -> GroupStart | None:
        """The start in a smaller shape that a group left for ``start``, in which it has not been a member yet; None
        for any other."""
        return self._attempts.get(start)

    def _can_be_asked(self, group: int) -> bool:
        """Whether a group is a member, and nobody has asked it to leave."""
        status = glance(self._dir.status) or {}
        return str(group) in status.get("live", {}) and group not in status.get("drained", [])


class GroupShapes:
    """The shapes of the groups of one job attempt on one host."""

    def __init__(
        self,
        free: Callable[[int], int],
        fault: Fault,
        run_dir: RunDirectory,
        before: Callable[[GroupStart], GroupStart | None],
    ) -> None:
        """``free`` says how many of a group's devices a shape leaves unused; ``fault`` why the host is not fit for a
        start; ``before`` is that of :class:`WayHome`."""
        self._free, self._fault, self._dir, self._before = free, fault, run_dir, before
        self._next: dict[int, GroupStart] = {}
        """Group -> the shape for its next start."""

    async def fault(self, start: GroupStart) -> HealthFault | None:
        """Why a group must not be started again now, in no shape; chooses the shape."""
        before, home = self._before(start), replace(start, stages=0, first=0)
        if before is not None and await self._fault(before) is None:
            self._next[start.group] = before
            return None
        fault = await self._fault(home)
        self._next[start.group] = home
        for stages in allowed_shapes(self._dir) if fault is not None else ():
            for first in (0, self._free(stages)):
                smaller = replace(start, stages=stages, first=first)
                if await self._fault(smaller) is None:
                    self._next[start.group] = smaller
                    return None
        return fault

    def chosen(self, start: GroupStart) -> GroupStart:
        """A start of a group in the shape that was chosen last."""
        shape = self._next.get(start.group)
        return start if shape is None else replace(start, stages=shape.stages, first=shape.first)


def allowed_shapes(run_dir: RunDirectory) -> Sequence[int]:
    """The smaller shapes that the job's own ranks have found possible, as numbers of stages, the largest first."""
    reported = glance(run_dir.job)
    job = None if reported is None else decode(reported)
    return job.smaller_shapes if isinstance(job, JobDescription) else ()
