"""The ticket stream of a group: what its ranks compute, in which order, and where they stop for their sums.

The leader writes the stream, every rank of the group reads the same one, each at its own pace, and none decides
anything about the order itself. So ranks that compute together agree by construction, whichever views they have seen:

* :class:`Begin`: what follows belongs to this step, and to this offer where the group is brought up to date;
* :class:`Ticket`: this piece is next;
* :class:`Pause`: finish what is begun; tickets after it warm the pipeline up again;
* :class:`Close`: sum inside the group; a rank that knows no newer epoch then reduces in this one.

Entries keep the numbers that they were written with, so a stream can be sent in parts and again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

AHEAD = 8
"""How many tickets a run looks ahead, to read their samples early."""


@dataclass(frozen=True)
class Begin:
    """A step begins, for all that follows up to the next Begin."""

    step: int
    offer: int = 0
    """The newest offer by which the group got its state; 0: none. A joiner that gets another one begins anew."""


@dataclass(frozen=True)
class Ticket:
    """One piece to compute."""

    piece: int
    segment: int = 0
    """The segment of the group's plan that has it; those after the first are patches."""
    audited: bool = False
    """It is computed as its owner computes it, and added to nothing."""
    compared: bool = False
    """It is added, and the checksum of its gradient is kept, because an auditor computes it too."""


@dataclass(frozen=True)
class Pause:
    """All tickets so far are computed to their end before the next one is begun."""


@dataclass(frozen=True)
class Close:
    """All pieces that the group's plan has in ``epoch`` are inside."""

    epoch: int


TicketEntry = Begin | Ticket | Pause | Close


@dataclass(frozen=True)
class TicketStream:
    """A part of a ticket stream that ends with its newest entry."""

    first: int = 0
    """The number of the first entry here."""
    entries: tuple[TicketEntry, ...] = ()

    @property
    def end(self) -> int:
        """The number of the entry that comes next."""
        return self.first + len(self.entries)

    def at(self, number: int) -> TicketEntry | None:
        """The entry of this number; None if it has not come yet. It must not be dropped already."""
        assert number >= self.first, f"entry {number} is asked for, those before {self.first} are dropped"
        return self.entries[number - self.first] if number < self.end else None

    def since(self, number: int) -> TicketStream:
        """The entries from this number on, of those that are here."""
        first = min(max(number, self.first), self.end)
        return TicketStream(first, self.entries[first - self.first :])

    def joined(self, more: TicketStream) -> TicketStream:
        """This stream with what ``more`` has beyond its end; itself where that leaves a gap, or is nothing."""
        if more.first > self.end or more.end <= self.end:
            return self
        return TicketStream(self.first, (*self.entries, *more.entries[self.end - more.first :]))


class Tickets(Iterator[Ticket], Protocol):
    """The pieces of one run of a pipeline, in order. Iterating waits for what is to be computed next, and ends where
    the pipeline is to be drained."""

    def ahead(self) -> Sequence[Ticket]:
        """The next :data:`AHEAD` tickets, as far as they are known. Never waits."""


class KnownTickets:
    """Tickets that are all known."""

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._left = deque(tickets)

    def __iter__(self) -> KnownTickets:
        return self

    def __next__(self) -> Ticket:
        if not self._left:
            raise StopIteration
        return self._left.popleft()

    def ahead(self) -> Sequence[Ticket]:
        """The next ones."""
        return list(islice(self._left, AHEAD))
