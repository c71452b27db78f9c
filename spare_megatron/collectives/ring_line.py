"""One connection between two ranks of a ring, from its first words to its end."""

from __future__ import annotations

import contextlib
import select
import socket

from spare_megatron.collectives.brief_calls import Room, send
from spare_megatron.collectives.frames import FrameReceiver, FrameSender
from spare_megatron.collectives.handshake import (
    CONTROL,
    DATA,
    Call,
    Callee,
    Caller,
    Identity,
    Member,
    call_from,
    is_for,
)
from spare_megatron.collectives.link_monitor import LEFT, RIGHT, LinkBeat
from spare_megatron.collectives.ring_native import Frames

_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
"""Options of Linux's tcp.h."""
_READ_BYTES = 4096
KEEPALIVE_S = 60


class Line:
    """A connection to a neighbour, or to a process that has not said who it is. Not thread-safe."""

    def __init__(self, sock: socket.socket, me: Identity, born_s: float) -> None:
        sock.setblocking(False)
        self.sock, self.born_s, self._me = sock, born_s, me
        self.side = LEFT
        self.kind = b""
        """DATA or CONTROL; empty while an accepted connection has not said which."""
        self.peer: Member | None = None
        self.epoch = 0
        """The caller's epoch at the call."""
        self.number = 0
        """The number of the call."""
        self.calling = False
        """Whether the connection is still being made."""
        self.received_s = born_s
        """When beats came last."""
        self.newest: tuple[int, LinkBeat] | None = None
        """Of a control connection, the newest message, with its epoch."""
        self.ended = False
        self.polled = 0
        """The events for which it is polled now."""
        self.sender, self.receiver = FrameSender(sock), FrameReceiver(sock)
        self.frames = Frames()
        self.inbox, self.outbox = bytearray(), bytearray()
        self._room = Room(_READ_BYTES)
        self.handshake: Callee | Caller = Callee(me.key, self._is_mine)

    @property
    def received(self) -> bool:
        """Whether the other side's first words have come."""
        return self.handshake.received

    @property
    def proven(self) -> bool:
        """Whether the other side has proved that it knows the token and is the peer; only then it is listened to."""
        return self.handshake.proven

    @property
    def watched(self) -> int:
        """The events to poll for; 0 for none."""
        if self.ended or (self.proven and self.kind == DATA):
            return 0  # who sums polls it
        return select.POLLOUT if self.calling else select.POLLIN

    def call(self, place: tuple[str, int], kind: bytes, epoch: int, number: int, callee: Member) -> None:
        """Connect and begin the handshake. Raises OSError where the connection is refused at once."""
        self.side, self.kind, self.epoch, self.number, self.peer = RIGHT, kind, epoch, number, callee
        self.handshake = Caller(call_from(self._me, kind, callee, number, epoch), self._me.key)
        self.calling = True
        tune(self.sock)
        with contextlib.suppress(BlockingIOError):
            self.sock.connect(place)
        self.send(self.handshake.first)
        self.calling = bool(self.outbox)

    def broken(self) -> bool:
        """Whether a data connection that nobody reads at present has ended."""
        return self._shows(select.POLLRDHUP)

    def failed(self) -> bool:
        """Whether the connection could not be made, or was reset. The socket's error (SO_ERROR) would not tell: the
        first send, which by the loopback device comes after the refusal, takes it away."""
        return self._shows(0)

    def _shows(self, events: int) -> bool:
        poller = select.poll()
        poller.register(self.sock, events)
        return bool(poller.poll(0))

    def greet(self) -> None:
        """Begin the handshake on a connection that was accepted."""
        tune(self.sock)
        self.send(self.handshake.first)

    def send(self, more: bytes) -> None:
        """Send ``more``; what the connection does not take goes with the next call. An error shows when it is read.
        Keeps the interpreter's lock, as reading does."""
        words = bytes(self.outbox) + more if self.outbox else more
        self.outbox[:] = words[send(self.sock, words) :]

    def read(self) -> bool:
        """Read what has arrived. Until the other side is proven, reads only what the handshake needs next. False if the
        connection has ended. Raises StrangerError where the other side is not who it should be."""
        while self.handshake.missing:
            more = self._room.receive(self.sock, self.handshake.missing)
            if more is None:
                return True
            if not more:
                return False
            if reply := self.handshake.take(more):
                self.send(reply)
        if self.kind == DATA:
            return True
        more = self._room.receive(self.sock, _READ_BYTES)
        self.inbox += more or b""
        return more is None or bool(more)

    def _is_mine(self, call: Call) -> bool:
        """Whether a call is for a ring that this rank is in; takes what it says."""
        if call.kind not in (DATA, CONTROL) or not is_for(call, self._me):
            return False
        self.kind, self.epoch, self.number, self.peer = call.kind, call.epoch, call.number, call.caller
        return True


def tune(sock: socket.socket) -> None:
    """Have the kernel send lost packets again at least once a second. Otherwise it doubles its wait after each loss,
    and after a few losses in a row waits for longer than a time-out. And have it say something where nobody does for
    long, so that nothing between the two sides forgets the connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000)):
        with contextlib.suppress(OSError):  # older kernels do not know the second
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
