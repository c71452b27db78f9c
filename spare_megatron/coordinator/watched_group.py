"""What the failure detector remembers of a group, and what it shows of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from spare_megatron.control_plane.reports import LastRank


class GroupStanding(NamedTuple):
    """Where a group is, as last received."""

    last: LastRank | None
    """The rank that is furthest behind; None before it was received."""
    still_s: float
    """For how long that rank has been where it is."""
    silent_s: float
    """For how long the group, or a rank of it, has not been received."""


@dataclass(frozen=True)
class JudgedPlace:
    """The place of a group, and the rank that is there."""

    at: tuple[int, int]
    rank: LastRank
    moved_s: float
    since_s: float
    """The time from which standing still counts against it."""


@dataclass
class WatchedGroup:
    """One incarnation of a group. Times are by the detector's clock."""

    incarnation: int
    size: int
    received_s: float
    """When its leader's last beat came."""
    silence_from_s: float
    """Nobody's silence counts from before this time."""
    moved_s: float
    """When its last rank moved last."""
    stillness_from_s: float
    """Nobody's standing still counts from before this time."""
    last: LastRank | None = None
    waiting: int = 0
    """Ranks that wait for other groups."""
    done: tuple[int, int] = (0, 0)
    """(step, pieces of it that all ranks have done)."""
    late: tuple[int, float] | None = None
    """(position, time since which it is silent) of a rank that is late."""
    closed_s: float | None = None
    closed_ranks: dict[int, float] = field(default_factory=dict)
    """Position -> when its connection to the leader closed."""
    lost: bool = False

    @property
    def stood_since_s(self) -> float:
        """The time from which standing still counts against its last rank."""
        return max(self.moved_s, self.stillness_from_s)

    def standing(self, at_s: float) -> GroupStanding:
        """What is known of it at this time."""
        received_s = self.received_s if self.late is None else min(self.received_s, self.late[1])
        return GroupStanding(self.last, at_s - self.moved_s, at_s - received_s)
