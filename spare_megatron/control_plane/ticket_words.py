"""Words of the ticket stream as numbers, three for each: there may be hundreds in one message."""

from __future__ import annotations

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.protocol.tickets import Begin, Close, Pause, Ticket, TicketStream, Word

_BEGIN, _PAUSE, _CLOSE, _TICKET = range(4)
_AUDITED, _COMPARED = 1, 2
"""Added to the kind of a ticket."""


def order_of(stream: TicketStream) -> pb.Order:
    """The order that tells a rank these words."""
    words = [number for word in stream.words for number in _numbers(word)]
    return pb.Order(tickets=pb.Tickets(first=stream.first, words=words))


def stream_of(message: pb.Tickets) -> TicketStream:
    """The inverse of :func:`order_of`."""
    numbers = message.words
    return TicketStream(message.first, tuple(map(_word, numbers[::3], numbers[1::3], numbers[2::3])))


def _numbers(word: Word) -> tuple[int, int, int]:
    if isinstance(word, Ticket):
        return _TICKET + _AUDITED * word.audited + _COMPARED * word.compared, word.piece, word.segment
    if isinstance(word, Begin):
        return _BEGIN, word.step, word.offer
    return (_CLOSE, word.epoch, 0) if isinstance(word, Close) else (_PAUSE, 0, 0)


def _word(kind: int, first: int, second: int) -> Word:
    if kind >= _TICKET:
        marks = kind - _TICKET
        return Ticket(first, second, bool(marks & _AUDITED), bool(marks & _COMPARED))
    if kind == _BEGIN:
        return Begin(first, second)
    return Close(first) if kind == _CLOSE else Pause()
