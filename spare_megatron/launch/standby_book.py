"""Keeps the books of standbys: which of them takes a lost group's place, and whose devices are whose. Pure.

This host has one *slot* of M devices for each of the N groups and S standbys: ranks of slot s have the local ranks from
s x M on. A group begins in the slot of its number. When a standby takes its place, the group moves to the standby's
slot, and the next standby begins in the one that is free.

Promises: a slot has at most one group or standby.
"""

from __future__ import annotations

from collections.abc import Mapping


class StandbyBook:
    """The slots of one job attempt."""

    def __init__(self, groups: int, standbys: int) -> None:
        self.standbys, self._slots = standbys, groups + standbys
        self._of_group = {group: group for group in range(groups)}
        self._of_standby: dict[int, int] = {}
        """Number of a standby that lives and has no place -> its slot."""

    def slot_of(self, group: int) -> int:
        """Where a group runs, or is started again."""
        return self._of_group[group]

    @property
    def free(self) -> list[int]:
        """The slots of neither a group nor a standby."""
        return sorted({*range(self._slots)} - {*self._of_group.values()} - {*self._of_standby.values()})

    def begins(self, standby: int, slot: int) -> None:
        """A standby is started in a slot that is free."""
        assert slot in self.free, f"slot {slot} is not free"
        self._of_standby[standby] = slot

    def takes(self, standby: int, group: int) -> int:
        """A standby gets the place of a group; returns the slot that the group leaves."""
        left = self._of_group[group]
        self._of_group[group] = self._of_standby.pop(standby)
        return left

    def ends(self, standby: int) -> None:
        """A standby has ended without a place."""
        self._of_standby.pop(standby)


def first_choice(waits_since_s: Mapping[int, float | None]) -> int | None:
    """The standby, of those whose processes all live, that is next to take a place; None where there is none.

    ``waits_since_s``: number -> when its last process began to wait, None for one that is still about to start. The
    longest waiting is first; where all are still about to start, the oldest, which is ahead of new processes too."""
    waiting = {number: at_s for number, at_s in waits_since_s.items() if at_s is not None}
    if waiting:
        return min(waiting, key=lambda number: (waiting[number], number))
    return min(waits_since_s, default=None)
