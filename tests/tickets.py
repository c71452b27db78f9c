"""Runs for engines that a test drives by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spare_megatron.protocol.tickets import KnownTickets, Ticket


def run_of(pieces: Iterable[int], audits: Iterable[int] = (), compared: Collection[int] = ()) -> KnownTickets:
    """The tickets of ``audits``, then of ``pieces``, all known."""
    audited = [Ticket(piece, audited=True) for piece in audits]
    return KnownTickets([*audited, *(Ticket(piece, compared=piece in compared) for piece in pieces)])


class Late:
    """Tickets of several segments as one run: each segment is known only when those before it were taken."""

    def __init__(self, segments: Iterable[Iterable[int]]) -> None:
        self._later = [[Ticket(piece, number) for piece in segment] for number, segment in enumerate(segments)]
        self._known: list[Ticket] = []

    def __iter__(self) -> Late:
        return self

    def __next__(self) -> Ticket:
        while not self._known and self._later:
            self._known = self._later.pop(0)
        if not self._known:
            raise StopIteration
        return self._known.pop(0)

    def ahead(self) -> list[Ticket]:
        return self._known
