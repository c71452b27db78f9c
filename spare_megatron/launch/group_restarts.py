"""Decides when the launcher starts a lost group again, and draws the incarnations of groups.

Pure: the time is an argument. One object of each class serves all job attempts of a launch.

Promises:

* Of one group, at most ``most`` restarts begin within WITHIN_S; a group that needs one more is given up.
* The first restart within that time begins at once; each further one waits twice as long as the one before it, from
  a first pause up to PAUSES_MOST of them.
* :class:`Absences` counts a group as gone only after LEAVE_S in which the coordinator did not name it, and not before
  it has come; a group that has not come within COME_S is late.
* A number that :class:`Incarnations` draws for a group is above all that were drawn or known for it before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

WITHIN_S = 3600.0
"""The time within which restarts of a group are counted."""
FIRST_PAUSE_S = 5.0
"""The first pause, unless the user says another one."""
PAUSES_MOST = 60.0
"""The longest pause, in first pauses."""
LEAVE_S = 5.0
"""How long the processes of a group that was fenced have to leave by themselves."""
COME_S = 1800.0
"""How long a start of a group has until the coordinator names it. What its ranks wait for before that has limits of its
own, which are shorter (they meet each other; data are brought); a start that takes longer hangs."""
FENCED = "it was fenced"
LATE = f"it has not reached the coordinator within {COME_S / 60:g} minutes"


def pause_s(before: int, first_s: float = FIRST_PAUSE_S) -> float:
    """How long a restart of a group waits that had ``before`` restarts within WITHIN_S."""
    return 0.0 if before == 0 else first_s * min(PAUSES_MOST, 2.0 ** min(before - 1, 16))


@dataclass(frozen=True, order=True)
class GroupStart:
    """One start of a group."""

    group: int
    incarnation: int
    restarts: int = 0
    """How often the group was started before in this job attempt."""
    stages: int = 0
    """Its pipeline stages in a smaller shape (:mod:`spare_megatron.config.rows`); 0: it has the home shape."""
    first: int = 0
    """The first of its slot's devices that it uses."""

    @property
    def member(self) -> tuple[int, int]:
        """(group, incarnation)."""
        return self.group, self.incarnation


def named(status: Mapping[str, Any]) -> set[tuple[int, int]]:
    """(group, incarnation) of the members and learners that the coordinator's status.json names."""
    return {(int(group), status[who][group]) for who in ("live", "learners") for group in status[who]}


class Absences:
    """Which starts of groups the coordinator has ceased to name."""

    def __init__(self, come: Iterable[GroupStart] = ()) -> None:
        """``come``: those that count as named once before the first look."""
        self._come = {start.member for start in come}
        self._since_s: dict[GroupStart, float] = {}
        self._began_s: dict[GroupStart, float] = {}

    def gone(self, starts: Iterable[GroupStart], there: set[tuple[int, int]], now_s: float) -> list[GroupStart]:
        """Those of ``starts`` that are gone, at a look that finds ``there`` named."""
        self._come |= there
        away = [start for start in starts if start.member in self._come - there]
        self._since_s = {start: self._since_s.get(start, now_s) for start in away}
        return [start for start in away if now_s > self._since_s[start] + LEAVE_S]

    def late(self, starts: Iterable[GroupStart], now_s: float) -> list[GroupStart]:
        """Those of ``starts`` that have not come in the looks of :meth:`gone` up to now, and should have."""
        awaited = [start for start in starts if start.member not in self._come]
        self._began_s = {start: self._began_s.get(start, now_s) for start in awaited}
        return [start for start in awaited if now_s > self._began_s[start] + COME_S]


@dataclass(frozen=True)
class NextStart:
    """What follows the loss of a group."""

    pause_s: float | None
    """How long its restart waits; None: it is given up."""
    before: int
    """Its restarts within WITHIN_S before this one."""


class GroupRestarts:
    """The restarts of all groups of a job."""

    def __init__(self, most: int, first_s: float = FIRST_PAUSE_S) -> None:
        """``most``: restarts of one group within WITHIN_S; 0: a lost group stays lost. ``first_s``: the first pause."""
        self.most, self._first_s = most, first_s
        self._begun: dict[int, list[float]] = {}
        """Group -> when its restarts within WITHIN_S began, or are going to."""

    def after_loss(self, group: int, now_s: float) -> NextStart:
        """What follows a loss of ``group``, no process of which is left at ``now_s``. A restart that it grants is
        counted as one that begins after its pause."""
        begun = [at_s for at_s in self._begun.get(group, ()) if at_s > now_s - WITHIN_S]
        if len(begun) >= self.most:
            return NextStart(None, len(begun))
        pause = pause_s(len(begun), self._first_s)
        self._begun[group] = [*begun, now_s + pause]
        return NextStart(pause, len(begun))

    def begins(self, group: int, now_s: float) -> None:
        """The restart of ``group`` that was granted last begins now: its host was not fit for it earlier."""
        self._begun[group][-1] = max(now_s, self._begun[group][-1])


class Incarnations:
    """Draws the incarnations of groups. Nobody else may draw them."""

    def __init__(self) -> None:
        self._drawn: dict[int, int] = {}

    def first(self, groups: int, known: int) -> int:
        """The incarnation of all groups 0 to ``groups`` - 1 in a new job attempt; ``known``: the highest of any group
        that the coordinator knows, -1 for none."""
        drawn = 1 + max([known, *self._drawn.values()])
        self._drawn = dict.fromkeys(range(groups), drawn)
        return drawn

    def next(self, group: int, known: int) -> int:
        """The next incarnation of one group; ``known``: the highest of it that the coordinator knows, -1 for none."""
        drawn = 1 + max(known, self._drawn.get(group, -1))
        self._drawn[group] = drawn
        return drawn


@dataclass(frozen=True)
class LaunchMemory:
    """What outlives the job attempts of a launch."""

    restarts: GroupRestarts
    incarnations: Incarnations
    refills: GroupRestarts = field(default_factory=lambda: GroupRestarts(0))
    """Of standbys, by slot."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of standbys, of which no two have the same."""
