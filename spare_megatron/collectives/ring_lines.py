"""All connections of one rank to others: which are polled, which are those to a neighbour, and which are ready.

The two connections of a call, for data and for control, end together. If one of them has ended, the other is not used
in any later epoch, even if it arrives only afterwards. A caller cannot notice on the data connection that nobody reads
it; it notices the end on the control connection, and calls again.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Collection, Iterator, Sequence

from spare_megatron.collectives.backend import Seat
from spare_megatron.collectives.handshake import CONTROL, DATA, Member
from spare_megatron.collectives.link_monitor import LEFT, RIGHT
from spare_megatron.collectives.ring_line import Line

KINDS = (DATA, CONTROL)
"""Of the connections of a call."""


class RingLines:
    """The connections that are open. Not thread-safe, but that :meth:`wait` may run beside everything else."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._poll = select.epoll()
        self._polled: dict[int, Line] = {}
        """By their descriptors, those that are polled now."""
        self._seat: Seat | None = None
        self._roles: tuple[Member | None, ...] = ()
        """The neighbours, and theirs, of the newest seat."""
        self.settled = False
        """All connections have proved themselves, and none has come or ended since :meth:`settle`: those in use are the
        same in any later seat with the same neighbours."""
        self._ended: dict[Member, int] = {}
        """Caller -> number of its newest call of which a connection has ended."""
        self._pairs: dict[tuple[int, bool], dict[bytes, Line]] = {}
        """What :meth:`pair` has found; cleared when something changes of which it depends."""

    def __iter__(self) -> Iterator[Line]:
        return iter(tuple(self._lines))

    def __contains__(self, line: Line) -> bool:
        return line in self._lines

    def take(self, seat: Seat | None) -> None:
        """Look for the pairs of this seat from now on; None: there are none."""
        self._seat = seat
        if seat is not None:
            before, self._roles = self._roles, (seat.before, seat.left, seat.right, seat.after)
            if not self.settled or self._roles != before:
                self._change()

    def settle(self) -> None:
        """Note that this seat has a use for all connections that are here."""
        seat = self._seat
        self.settled = seat is not None and all(line.proven and line.epoch <= seat.epoch for line in self._lines)

    def _change(self) -> None:
        self._pairs.clear()
        self.settled = False

    def add(self, line: Line) -> None:
        """Keep a new connection."""
        self._lines.append(line)
        self._change()

    def refresh(self, line: Line) -> None:
        """Note that more is known of a connection; it is polled for what is due on it now."""
        self._change()
        wanted = line.watched
        if wanted == line.polled:
            return
        if not line.polled:
            self._poll.register(line.sock, wanted)
            self._polled[line.sock.fileno()] = line
        elif wanted:
            self._poll.modify(line.sock, wanted)
        else:
            self._poll.unregister(line.sock)
            del self._polled[line.sock.fileno()]
        line.polled = wanted

    def end(self, line: Line) -> None:
        """Use a connection no more, but leave it open: somebody may be reading it."""
        line.ended = True
        if line.side == LEFT and line.proven and line.peer is not None:
            self._ended[line.peer] = max(line.number, self._ended.get(line.peer, 0))
        self.refresh(line)

    def drop(self, line: Line) -> None:
        """Close a connection."""
        self.end(line)
        self._lines.remove(line)
        line.sock.close()

    def pair(self, side: int, proven: bool = True) -> dict[bytes, Line]:
        """Kind -> connection, of the newest call between this member and a neighbour in the present epoch, without
        those that have ended. If ``proven`` is false, a call of this member counts even if the neighbour has not
        answered with its proof. A call of the left neighbour always needs its proof."""
        seat, proven = self._seat, proven or side == LEFT
        if seat is None:
            return {}
        known = self._pairs.get((side, proven))
        if known is not None:
            return known
        peer = seat.left if side == LEFT else seat.right
        found = _newest([line for line in self._lines if line.side == side and line.peer == peer], proven, seat.epoch)
        self._pairs[side, proven] = found
        return found

    def ready(self, seat: Seat) -> set[Line]:
        """The connections between this member and its neighbours' other neighbours in ``seat``, of its own call also
        those that are not answered yet."""
        before, after = seat.before, seat.after
        lines = [line for line in self._lines if line.peer == (before if line.side == LEFT else after)]
        if not lines or after is None:
            return set()
        mine = _newest([line for line in lines if line.side == RIGHT], False, seat.epoch)
        theirs = _newest([line for line in lines if line.side == LEFT], True, seat.epoch)
        return {*(mine.values() if len(mine) == len(KINDS) else ()), *filter(self.whole, theirs.values())}

    def useless(self, seat: Seat, received_since_s: float, answered: bool) -> set[Line]:
        """The connections of calls that should be ready in ``seat`` and are not usable: of one call a connection has
        ended; or it is a call of this member, and nothing was received on it since ``received_since_s``, or, with
        ``answered``, the other side has not answered it."""
        found = set[Line]()
        for line in self.ready(seat):
            silent = line.side == RIGHT and line.kind == CONTROL and line.received_s <= received_since_s
            unanswered = line.side == RIGHT and answered and not line.proven
            if silent or unanswered or (line.kind == DATA and line.proven and line.broken()):
                found.update(self.of_one_call(line))
        return found

    def older(self, line: Line) -> list[Line]:
        """The connections of earlier calls of the same caller."""
        same = [one for one in self._lines if one.side == LEFT and one.proven and one.peer == line.peer]
        return [one for one in same if one.number < line.number]

    def called(self, peer: Member) -> bool:
        """Whether this member has called ``peer``, which has not ended that."""
        return any(line.side == RIGHT and line.peer == peer for line in self._lines)

    def of_one_call(self, line: Line) -> list[Line]:
        """The connections of the same call, without those whose caller has not proved that they belong to it."""
        same = [one for one in self._lines if (one.side, one.peer, one.number) == (line.side, line.peer, line.number)]
        return same if line.side == RIGHT else [one for one in same if one.proven]

    def whole(self, line: Line) -> bool:
        """Whether no connection of this call has ended. Only for calls whose caller has proved who it is."""
        return line.peer is not None and line.number > self._ended.get(line.peer, 0)

    def poll(self, descriptor: int) -> None:
        """Have :meth:`wait` look for something to read on this descriptor too."""
        self._poll.register(descriptor, select.EPOLLIN)

    def polled(self, descriptor: int) -> Line | None:
        """The connection that is polled under this descriptor."""
        return self._polled.get(descriptor)

    def wait(self, most_s: float) -> list[tuple[int, int]]:
        """Wait for something to happen: descriptors and events."""
        return self._poll.poll(most_s)

    def close(self, used: Collection[Line] = ()) -> None:
        """Close all connections; only shut those down that are ``used``, whose descriptors must not become others'."""
        self._poll.close()
        for line in self._lines:
            if line in used:
                with contextlib.suppress(OSError):
                    line.sock.shutdown(socket.SHUT_RDWR)
            else:
                line.sock.close()


def _newest(lines: Sequence[Line], proven: bool, epoch: int) -> dict[bytes, Line]:
    """Kind -> connection, of the newest call in ``lines``, which are all with one peer; without calls of epochs after
    ``epoch``, without connections that have ended, and if ``proven`` without those that are not proven."""
    newest, found = 0, dict[bytes, Line]()
    for line in lines:
        if line.number < newest or line.epoch > epoch or (proven and not line.proven):
            continue
        if line.number > newest:
            newest, found = line.number, {}
        if not line.ended:
            found[line.kind] = line
    return found
