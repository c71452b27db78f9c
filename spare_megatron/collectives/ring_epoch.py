"""What one rank knows of its ring in one epoch, for its owner thread and the thread that listens to the neighbours."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Callable

from spare_megatron.collectives.backend import Seat
from spare_megatron.collectives.link_monitor import LEFT, RIGHT, LinkMonitor, Traffic
from spare_megatron.protocol.messages import Link

_TCP_INFO = struct.Struct("8x44xI")
"""The field tcpi_last_data_recv of Linux's tcp_info, in milliseconds."""


def _nobody() -> None:
    """The default for ``tell``: does nothing."""


class RingEpoch:
    """One epoch of one member. ``formed``, ``over`` and ``traffic`` may be read from any thread; all else is for who
    holds the lock of :class:`~spare_megatron.collectives.ring_links.RingLinks`."""

    def __init__(
        self,
        seat: Seat,
        timeout_s: float,
        suspects: frozenset[int] = frozenset(),
        tell: Callable[[], None] = _nobody,
    ) -> None:
        """
        Args:
            suspects: ranks whose link to this one was silent in the epoch before.
            tell: called without a lock, from any thread, when ``formed`` or ``over`` has changed.
        """
        self.seat, self.traffic, self.tell = seat, Traffic(), tell
        self.formed = False
        """Both neighbours are connected and here: the owner may use the data connections."""
        self.in_use = False
        """The owner uses them now."""
        self.alarm = -1
        """A descriptor that becomes readable, for good, when this epoch is over for this member; -1 until the owner has
        a use for it."""
        self._timeout_s, self._suspects = timeout_s, suspects
        self._published = (False, False)
        self._monitor: LinkMonitor | None = None
        self._why = ""

    @property
    def over(self) -> str:
        """Why this member can sum no more in this epoch; empty while it can."""
        return (self._monitor.over if self._monitor is not None else "") or self._why

    @property
    def evidence(self) -> frozenset[Link]:
        """What is known about links, in ranks."""
        return self._monitor.links if self._monitor is not None else frozenset()

    @property
    def version(self) -> int:
        """Grows when there is more evidence to tell the neighbours."""
        return self._monitor.version if self._monitor is not None else 0

    def begin(self, now_s: float) -> None:
        """Listen from now on."""
        seat = self.seat
        self._monitor = LinkMonitor(seat.rank, seat.size, self._timeout_s, self._suspects, now_s)

    @property
    def monitor(self) -> LinkMonitor:
        """What is learned of the neighbours, once the epoch has begun."""
        assert self._monitor is not None, "a neighbour speaks before the epoch began"
        return self._monitor

    def look(self, now_s: float, left: socket.socket | None) -> None:
        """Judge the links after time has passed; ``left``: the connection on which data comes."""
        self.monitor.look(self.traffic, now_s, _data_age_s(left) if left is not None else math.inf)

    def give_up(self, why: str) -> None:
        """Give the epoch up, unless it is given up already, and wake its owner."""
        self._why = self._why or why
        if self._monitor is not None:
            self._monitor.give_up(why)
        self.sound()

    def arm(self) -> None:
        """Note that the owner uses the data connections now, and is to be woken when the epoch is over."""
        self.in_use = True
        if self.alarm < 0:
            self.alarm = os.eventfd(0, os.EFD_NONBLOCK)
            self.sound()

    def sound(self) -> None:
        """Wake the owner, for good, if the epoch is over."""
        if self.alarm >= 0 and self.over:
            os.eventfd_write(self.alarm, 1)

    def changed(self) -> bool:
        """Whether ``tell`` is due, which the caller then calls without the lock."""
        before, self._published = self._published, (self.formed, bool(self.over))
        return self._published != before

    def blamed(self) -> frozenset[int]:
        """The sides on which a link was silent, in either direction."""
        seat, links = self.seat, [link for link in self.evidence if link.silent]
        if not links:
            return frozenset()
        sides = {LEFT: (seat.rank - 1) % seat.size, RIGHT: (seat.rank + 1) % seat.size}
        pairs = {frozenset((link.sender, link.receiver)) for link in links}
        return frozenset(side for side, rank in sides.items() if frozenset((seat.rank, rank)) in pairs)

    def free(self) -> None:
        """Close what wakes the owner; nothing is sent any more."""
        self.tell = _nobody
        if self.alarm >= 0:
            os.close(self.alarm)
            self.alarm = -1


def _data_age_s(sock: socket.socket) -> float:
    """For how long no data has reached this machine on a connection, whether or not it was read."""
    with contextlib.suppress(OSError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return float(_TCP_INFO.unpack(info)[0]) / 1000
    return math.inf
