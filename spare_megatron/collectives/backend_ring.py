"""A replica communicator on plain TCP sockets: ring all-reduces that another thread can end at any moment.

gloo, which does the same inside a group, is not used, because its operations cannot be ended from outside: its
``abort()`` does nothing. Shutting its connections down from under it ends nearly all of them within a
millisecond, but 1 in 10 to 50 stays in a wait that only its own time-out ends, its event loop then spins on
messages whose buffers are gone, and late events or the end of the process abort the process. A rank that is
to survive other ranks cannot depend on that. Here every wait is one ``poll`` that also listens for
:meth:`RingBackend.cut`; nothing outlives its owner thread.

The owner thread moves the bytes of the sums and has no time-outs: the thread of
:mod:`spare_megatron.collectives.ring_links` listens to the neighbours, finds out who is silent, and ends its waits.

May assume: members reach each other by TCP at the address they have on the way to the store, or on the
interface that GLOO_SOCKET_IFNAME names (the variable by which users of torch choose it). Promises: what
:class:`~spare_megatron.collectives.backend.Backend` says; a member has four connections, whatever N.
"""

from __future__ import annotations

import os
import select
import socket

import psutil
import torch

from spare_megatron.collectives.backend import BackendError, Meeting, Seat
from spare_megatron.collectives.hearing import LEFT, RIGHT, Traffic
from spare_megatron.collectives.ring import SEGMENT_BYTES, RingStreams
from spare_megatron.collectives.ring_links import RingLinks
from spare_megatron.collectives.store import StoreClients
from spare_megatron.controller.messages import Link

LOST = select.POLLERR | select.POLLHUP | select.POLLRDHUP


class RingBackend:
    """The :class:`~spare_megatron.collectives.backend.Backend` on TCP sockets."""

    reads_sources = True
    linger_s = 0.5
    """Longer than a failed reduction waits before it ends; in that time the evidence of other members still arrives."""

    def __init__(
        self, seat: Seat, clients: StoreClients, timeout_s: float, suspects: frozenset[int] = frozenset()
    ) -> None:
        """``suspects``: ranks whose link to this one was mute in the epoch before."""
        self.seat = seat
        self._clients = clients
        self._timeout_s = timeout_s
        self._suspects = suspects
        self._traffic = Traffic()
        self._links = RingLinks(seat, timeout_s, suspects, self._traffic)
        self._listener: socket.socket | None = None
        self._left: socket.socket | None = None
        self._right: socket.socket | None = None
        self._meeting: Meeting | None = None
        self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)

    @property
    def evidence(self) -> frozenset[Link]:
        return self._links.evidence

    @property
    def over(self) -> str:
        return self._links.over

    def form(self) -> None:
        seat = self.seat
        meeting = self._meeting = Meeting(seat, self._clients, self._timeout_s, self._suspects)
        if self._links.over:  # cut before there was a meeting to leave
            raise BackendError(self._links.over)
        listener = self._listener = _listen(seat)
        host, port = meeting.arrive(self.place(listener)).split()
        self._left, self._right = self._links.connect(listener, host, int(port))
        meeting.part()

    def place(self, listener: socket.socket) -> str:
        """The host and port at which the left neighbour connects to ``listener``."""
        host, port = listener.getsockname()[:2]
        return f"{host} {port}"

    def sum(self, wire: torch.Tensor, patient: bool, source: torch.Tensor | None = None) -> None:
        ring = RingStreams(wire, self.seat.rank, self.seat.size, self._scratch, source)
        self._traffic.patient = patient
        try:
            while not ring.over:
                received = self._pull(ring)
                sent = self._push(ring)
                if not (received or sent or ring.over):
                    self._await_neighbours(ring)
        finally:
            self._traffic.wants = self._traffic.offers = False

    def cut(self, why: str) -> None:
        self._links.cut(why)

    def unblock(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()

    def release(self) -> None:
        self._links.close()
        if self._listener is not None:
            self._listener.close()
        self._left = self._right = None
        if self._meeting is not None:
            self._meeting.end()

    def _pull(self, ring: RingStreams) -> bool:
        room = ring.incoming
        if room is None:
            return False
        assert self._left is not None
        try:
            number = self._left.recv_into(room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(LEFT, error) from error
        if not number:
            raise self._lost(LEFT, "closed by the other side")
        self._traffic.received += number
        ring.received(number)
        return True

    def _push(self, ring: RingStreams) -> bool:
        ready = ring.outgoing
        if ready is None:
            return False
        assert self._right is not None
        try:
            number = self._right.send(ready)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(RIGHT, error) from error
        self._traffic.sent += number
        ring.sent(number)
        return True

    def _await_neighbours(self, ring: RingStreams) -> None:
        assert self._left is not None
        assert self._right is not None
        traffic, alarm = self._traffic, self._links.alarm
        traffic.wants, traffic.offers = ring.incoming is not None, ring.outgoing is not None
        poller = select.poll()
        poller.register(alarm, select.POLLIN)
        if traffic.wants:
            poller.register(self._left, select.POLLIN)
        if not ring.all_sent:
            poller.register(self._right, select.POLLRDHUP | (select.POLLOUT if traffic.offers else 0))
        happened = dict(poller.poll())
        if alarm.fileno() in happened:
            raise BackendError(self._links.over)
        if happened.get(self._right.fileno(), 0) & LOST:
            raise self._lost(RIGHT, "closed by the other side")

    def _lost(self, side: int, what: object) -> BackendError:
        """The error for a data connection that ended. Most often the neighbour has said why, on its control
        connection."""
        why = self._links.over
        self._links.lose(side)
        rank = (self.seat.rank + (1 if side == RIGHT else -1)) % self.seat.size
        return BackendError(why or f"the connection to rank {rank} of the ring is lost: {what}")


def _listen(seat: Seat) -> socket.socket:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    host = _interface_address(interface) if interface else _address_towards(seat.store_host, seat.store_port)
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _interface_address(name: str) -> str:
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if address.family == family:
                return str(address.address)
    raise BackendError(
        f"GLOO_SOCKET_IFNAME names {name}, which has no address; the interfaces are {sorted(psutil.net_if_addrs())}"
    )


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to ``host`` (no packet is sent)."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
