"""Entries of the ticket stream as numbers, three for each: there may be hundreds in one message."""

from __future__ import annotations

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.protocol.tickets import Begin, Close, Pause, Ticket, TicketEntry, TicketStream

_BEGIN, _PAUSE, _CLOSE, _TICKET = range(4)
_AUDITED, _COMPARED = 1, 2
"""Added to the kind of a ticket."""


def order_of(stream: TicketStream) -> pb.Order:
    """The order that tells a rank these entries."""
    entries = [number for entry in stream.entries for number in _numbers(entry)]
    return pb.Order(tickets=pb.Tickets(first=stream.first, entries=entries))


def stream_of(message: pb.Tickets) -> TicketStream:
    """The inverse of :func:`order_of`."""
    numbers = message.entries
    return TicketStream(message.first, tuple(map(_entry, numbers[::3], numbers[1::3], numbers[2::3])))


def _numbers(entry: TicketEntry) -> tuple[int, int, int]:
    if isinstance(entry, Ticket):
        return _TICKET + _AUDITED * entry.audited + _COMPARED * entry.compared, entry.piece, entry.segment
    if isinstance(entry, Begin):
        return _BEGIN, entry.step, entry.offer
    return (_CLOSE, entry.epoch, 0) if isinstance(entry, Close) else (_PAUSE, 0, 0)


def _entry(kind: int, first: int, second: int) -> TicketEntry:
    if kind >= _TICKET:
        marks = kind - _TICKET
        return Ticket(first, second, bool(marks & _AUDITED), bool(marks & _COMPARED))
    if kind == _BEGIN:
        return Begin(first, second)
    return Close(first) if kind == _CLOSE else Pause()
