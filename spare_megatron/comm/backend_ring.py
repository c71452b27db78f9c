"""A replica communicator on plain TCP sockets: ring all-reduces that another thread can end at any moment.

Why not gloo, which does the same inside a group. gloo's operations cannot be ended from outside: its
``abort()`` does nothing. Shutting its connections down from under it ends nearly all of them within a
millisecond, but 1 in 10 to 50 stays in a wait that only its own time-out ends, its event loop then spins on
messages whose buffers are gone, and late events or the end of the process abort the process. A rank that is
to survive other ranks cannot depend on that. Here every wait is one ``poll`` that also listens for
:meth:`RingBackend.cut`; nothing outlives its owner thread.

May assume: members reach each other by TCP at the address they have on the way to the store, or on the
interface that GLOO_SOCKET_IFNAME names (the variable by which users of torch choose it). Promises: what
:class:`~spare_megatron.comm.backend.Backend` says; a member has two connections, whatever N; a process of
another job, fencing number or epoch cannot take part: each connection begins with a digest of the
communicator's prefix and a rank.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import threading
import time

import psutil
import torch

from spare_megatron.comm.backend import BackendError, Meeting, Seat
from spare_megatron.comm.ring import SEGMENT_BYTES, RingStreams
from spare_megatron.comm.store import StoreClients
from spare_megatron.controller.messages import Link

DIGEST_BYTES = 16
LOST = select.POLLERR | select.POLLHUP | select.POLLRDHUP


class RingBackend:
    """See :class:`~spare_megatron.comm.backend.Backend`."""

    def __init__(self, seat: Seat, clients: StoreClients, timeout_s: float) -> None:
        self._seat = seat
        self._clients = clients
        self._timeout_s = timeout_s
        self._left_rank = (seat.rank - 1) % seat.size
        self._right_rank = (seat.rank + 1) % seat.size
        self._lock = threading.Lock()
        """Guards ``_cut`` and ``_open``: no socket is closed while another thread ends it."""
        self._cut = False
        self._open: list[socket.socket] = []
        self._alarm, self._wake = socket.socketpair()
        """Readable, and forever, once ``cut`` was called: ``_wake`` is the end to write to."""
        self._left: socket.socket | None = None
        self._right: socket.socket | None = None
        self._meeting: Meeting | None = None
        self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)

    def form(self) -> None:
        seat = self._seat
        meeting = self._meeting = Meeting(seat, self._clients, self._timeout_s)
        listener = self._keep(_listen(seat))
        host, port = listener.getsockname()[:2]
        meeting.store.set(f"at/{seat.rank}", f"{host} {port}")
        meeting.arrive()
        until_s = time.monotonic() + self._timeout_s
        host, port = meeting.store.get(f"at/{self._right_rank}").decode().split()
        self._right = self._call(host, int(port), until_s)
        self._left = self._answer(listener, until_s)
        if self._read(self._right, until_s) != self._digest(self._right_rank):
            raise BackendError("the right neighbour is not of this epoch", self._links(self._right_rank))
        self._discard(listener)
        meeting.part(f"at/{seat.rank}")

    def sum(self, wire: torch.Tensor, patient: bool) -> None:
        ring = RingStreams(wire, self._seat.rank, self._seat.size, self._scratch)
        while not ring.over:
            received = self._pull(ring)
            sent = self._push(ring)
            if not (received or sent or ring.over):
                self._await_neighbours(ring, None if patient else self._timeout_s)

    def cut(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._cut = True
            self._wake.shutdown(socket.SHUT_RDWR)
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def unblock(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()

    def release(self) -> None:
        with self._lock:
            for sock in (*self._open, self._alarm, self._wake):
                sock.close()
            self._open.clear()
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
            raise self._lost(self._left_rank, error) from error
        if not number:
            raise self._lost(self._left_rank, "closed by the other side")
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
            raise self._lost(self._right_rank, error) from error
        ring.sent(number)
        return True

    def _await_neighbours(self, ring: RingStreams, timeout_s: float | None) -> None:
        assert self._left is not None
        assert self._right is not None
        watched = {}
        if ring.incoming is not None:
            watched[self._left] = select.POLLIN
        if not ring.all_sent:
            watched[self._right] = select.POLLRDHUP | (select.POLLOUT if ring.outgoing is not None else 0)
        events = self._poll(watched, timeout_s)
        if not events:
            late = self._left_rank if ring.incoming is not None else self._right_rank
            raise BackendError(f"rank {late} of the ring was silent for {timeout_s:g} s", self._links(late))
        if events.get(self._right, 0) & LOST:
            raise self._lost(self._right_rank, "closed by the other side")

    def _poll(self, watched: dict[socket.socket, int], timeout_s: float | None) -> dict[socket.socket, int]:
        """What happened to the sockets; nothing after the time-out; BackendError when this communicator is given up."""
        poller = select.poll()
        poller.register(self._alarm, select.POLLIN)
        for sock, events in watched.items():
            poller.register(sock, events)
        happened = dict(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
        if self._alarm.fileno() in happened:
            raise BackendError("given up")
        return {sock: happened[sock.fileno()] for sock in watched if sock.fileno() in happened}

    def _call(self, host: str, port: int, until_s: float) -> socket.socket:
        """Connect to the right neighbour, and say who calls."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self._keep(socket.socket(family, socket.SOCK_STREAM))
        refused = sock.connect_ex((host, port))
        if refused in (0, errno.EINPROGRESS):
            self._ready(sock, select.POLLOUT, until_s)
            refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if refused:
            raise self._lost(self._right_rank, os.strerror(refused))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.send(self._digest(self._seat.rank))
        except OSError as error:
            raise self._lost(self._right_rank, error) from error
        return sock

    def _answer(self, listener: socket.socket, until_s: float) -> socket.socket:
        """The connection of the left neighbour, after telling it who answers; anybody else's is closed."""
        while True:
            self._ready(listener, select.POLLIN, until_s)
            sock = self._keep(listener.accept()[0])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._read(sock, until_s) == self._digest(self._left_rank):
                sock.send(self._digest(self._seat.rank))
                return sock
            self._discard(sock)

    def _read(self, sock: socket.socket, until_s: float) -> bytes:
        """A digest, or less when the other side ends."""
        read = b""
        while len(read) < DIGEST_BYTES:
            self._ready(sock, select.POLLIN, until_s)
            try:
                more = sock.recv(DIGEST_BYTES - len(read))
            except ConnectionError:
                break
            if not more:
                break
            read += more
        return read

    def _ready(self, sock: socket.socket, event: int, until_s: float) -> None:
        if not self._poll({sock: event}, until_s - time.monotonic()):
            neighbours = (self._left_rank, self._right_rank)
            raise BackendError(f"the ring does not close within {self._timeout_s:g} s", self._links(*neighbours))

    def _digest(self, rank: int) -> bytes:
        return hashlib.sha256(f"{self._seat.prefix} {rank}".encode()).digest()[:DIGEST_BYTES]

    def _keep(self, sock: socket.socket) -> socket.socket:
        """Take charge of a new socket; BackendError when this communicator is given up."""
        sock.setblocking(False)
        with self._lock:
            self._open.append(sock)
            if self._cut:
                raise BackendError("given up")
        return sock

    def _discard(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.remove(sock)
            sock.close()

    def _lost(self, rank: int, what: object) -> BackendError:
        return BackendError(f"the connection to rank {rank} of the ring is lost: {what}", self._links(rank))

    def _links(self, *senders: int) -> tuple[Link, ...]:
        return tuple(Link(sender, self._seat.rank) for sender in senders)


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
        f"GLOO_SOCKET_IFNAME names {name}, an interface without an address; have {sorted(psutil.net_if_addrs())}"
    )


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to ``host`` (no packet is sent)."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
