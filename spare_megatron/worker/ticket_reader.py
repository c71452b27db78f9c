"""A rank's place in the ticket stream of its group, and one run of the pipeline along it.

The entries of a step are read in order, each once. What a rank does together with the others of its group follows from
the entries alone; when it does it depends on how fast they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.tickets import AHEAD, Begin, Close, Pause, Ticket, TicketEntry


class LeaveError(Exception):
    """The job is over for this rank: fenced or stopped; ``orders`` says which and why."""

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders.fenced or (orders.stop[1] if orders.stop else "asked to leave"))
        self.orders = orders


class TicketReader:
    """Reads the ticket stream. It belongs to the training thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._at = (0, -1)
        self._found = False
        self._next = 0

    def begin(self, step: int, offer: int = -1) -> None:
        """Read the entries of ``step`` from now on. A joiner reads those behind the ``Begin`` entry of its ``offer``;
        -1 means any."""
        self._at, self._found = (step, offer), False

    def next(self, orders: Orders) -> TicketEntry | None:
        """The next entry of the step, which stays the next one; None where it has not come."""
        while (entry := orders.stream.at(self._next)) is not None:
            if self._found:
                return entry
            step, offer = self._at
            self._found = isinstance(entry, Begin) and entry.step == step and offer in (-1, entry.offer)
            self.move()
        return None

    def move(self) -> None:
        """Go to the next entry. Reports the ticket that was read if few entries behind it have arrived."""
        stream, number = self.session.orders.stream, self._next
        self._next += 1
        few = stream.end - self._next <= self.session.tickets_low
        if self._found and few and isinstance(stream.at(number), Ticket):
            self.session.begun(number)
        self.session.read_tickets(self._next)

    def closes(self, orders: Orders) -> list[int]:
        """The epochs of the consecutive close entries that come next."""
        number, epochs = self._next, list[int]()
        while isinstance(entry := orders.stream.at(number), Close):
            epochs.append(entry.epoch)
            number += 1
        return epochs

    def wait(self) -> TicketEntry:
        """The next entry of the step, as soon as it has come. Raises LeaveError where the job is over before."""
        orders = self.session.orders
        while (entry := self.next(orders)) is None:
            if orders.over:
                raise LeaveError(orders)
            orders = self.session.wait(orders.version)
        return entry

    def ahead(self) -> list[Ticket]:
        """The next tickets of this run that have arrived and are not read yet. Never waits."""
        stream, number, known = self.session.orders.stream, self._next, list[Ticket]()
        while len(known) < AHEAD and isinstance(entry := stream.at(number), Ticket):
            known.append(entry)
            number += 1
        return known


class TicketRun:
    """The tickets up to the next pause, as an iterator that waits for each; none where no ticket is next."""

    def __init__(self, reader: TicketReader, at_end: Callable[[], None]) -> None:
        """``at_end`` is called once, when the end is read and before the iterator says so."""
        self._reader, self._at_end = reader, at_end
        self._ended = False
        self.audits: list[int] = []
        """The audited pieces that were taken."""
        self._pieces: list[Ticket] = []

    def __iter__(self) -> TicketRun:
        return self

    def __next__(self) -> Ticket:
        entry = None if self._ended else self._reader.wait()
        if isinstance(entry, Ticket | Pause):
            self._reader.move()
        if isinstance(entry, Ticket):
            if entry.audited:
                self.audits.append(entry.piece)
            else:
                self._pieces.append(entry)
            return entry
        if not self._ended:
            self._ended = True
            self._at_end()
        raise StopIteration

    def ahead(self) -> Sequence[Ticket]:
        """The next tickets that have arrived."""
        return () if self._ended else self._reader.ahead()

    @property
    def ended(self) -> bool:
        """Whether all tickets were taken."""
        return self._ended

    @property
    def pieces(self) -> list[int]:
        """The summed pieces that were taken."""
        return [ticket.piece for ticket in self._pieces]

    @property
    def joined(self) -> int:
        """How many of the taken pieces are of patches that were added while this run was under way."""
        return sum(ticket.segment > self._pieces[0].segment for ticket in self._pieces)

    def place(self, n: int) -> tuple[int, int]:
        """The segment of the ``n``-th summed piece of this run, and the number of that piece within this segment."""
        segment = self._pieces[n].segment
        return segment, n - next(k for k, ticket in enumerate(self._pieces) if ticket.segment == segment)
