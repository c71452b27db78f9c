"""The four connections of a ring's member, and the thread that listens on them as long as the epoch lasts.

A member connects twice to its right neighbour, and its left neighbour connects twice to it: once for data, which the
owner of the communicator moves, and once for control, which belongs to the thread here. That thread sends and receives
the beats of :mod:`spare_megatron.collectives.hearing`, also while no sum is in hand, and wakes the owner when the epoch
cannot go on. A member that gives up says so on its control connections before it closes anything.

May assume: the members have met, so all of them connect now. Promises: ``cut`` never blocks; the thread ends within
milliseconds of ``close``, and no descriptor is left; a process of another job, fencing number or epoch is refused: each
side begins a connection with a digest of the communicator's prefix and its own rank. The side that accepts sends its
digest at once, without waiting for the other's, so that a link on which only one direction works is found.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import select
import socket
import struct
import threading
import time

from spare_megatron.collectives.backend import BackendError, Seat
from spare_megatron.collectives.hearing import BEATS, ENDED_GRACE_S, LEFT, RIGHT, Hearing, LinkBeat, Traffic
from spare_megatron.controller.messages import Link

DATA, CONTROL = b"D", b"C"
DIGEST_BYTES = 16
LINKS_MAX = 64
"""The most links in one message, which must fit in what a connection takes without blocking. Mute links go first."""
WHY_BYTES = 512
"""The most bytes of the reason in a message."""
_HEAD = struct.Struct("!BHHQ")
"""The head of a message: flags, number of links, bytes of the reason, bytes sent."""
_LINK = struct.Struct("!IIB")
_WANTS, _BYE = 1, 2
_READ_BYTES = 4096
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
"""Options of Linux's tcp.h."""
_TCP_INFO = struct.Struct("8x44xI")
"""The field tcpi_last_data_recv of Linux's tcp_info, in milliseconds."""


def pack(beat: LinkBeat) -> bytes:
    """A beat as the bytes of a message."""
    links = sorted(beat.links, key=lambda link: (not link.mute, link.sender, link.receiver))[:LINKS_MAX]
    why = beat.why.encode()[:WHY_BYTES]
    head = _HEAD.pack(_WANTS * beat.wants | _BYE * beat.bye, len(links), len(why), beat.sent)
    return head + b"".join(_LINK.pack(link.sender, link.receiver, link.mute) for link in links) + why


def unpack(inbox: bytearray) -> LinkBeat | None:
    """Remove the first beat from ``inbox`` and return it; None when it is not complete yet."""
    if len(inbox) < _HEAD.size:
        return None
    flags, count, letters, sent = _HEAD.unpack_from(inbox)
    reason = _HEAD.size + count * _LINK.size
    if len(inbox) < reason + letters:
        return None
    links = frozenset(Link(s, r, bool(mute)) for s, r, mute in _LINK.iter_unpack(inbox[_HEAD.size : reason]))
    why = inbox[reason : reason + letters].decode(errors="ignore")
    del inbox[: reason + letters]
    return LinkBeat(sent, bool(flags & _WANTS), bool(flags & _BYE), links, why)


class _Line:
    """One connection to a neighbour, or to a process that has not said who it is."""

    def __init__(self, sock: socket.socket, side: int, kind: bytes = b"", calling: bool = False) -> None:
        sock.setblocking(False)
        self.sock, self.side = sock, side
        self.kind = kind
        """DATA or CONTROL; empty while the other side of an accepted connection has not said which."""
        self.calling = calling
        """Whether the connection is still being made."""
        self.greeted = False
        self.inbox, self.outbox = bytearray(), bytearray()

    @property
    def watched(self) -> int:
        """The events to poll for; 0 for none."""
        if self.greeted and self.kind == DATA:
            return 0  # the owner polls it
        return select.POLLOUT if self.calling else select.POLLIN

    def send(self, more: bytes) -> None:
        """Send ``more``; what the connection does not take goes with the next call. An error shows when it is read."""
        self.outbox += more
        with contextlib.suppress(OSError):
            del self.outbox[: self.sock.send(self.outbox)]


class RingLinks:
    """One member's connections. Made before the members meet, so that it can be cut at any time."""

    def __init__(self, seat: Seat, timeout_s: float, suspects: frozenset[int], traffic: Traffic) -> None:
        self._seat, self._timeout_s, self._suspects, self._traffic = seat, timeout_s, suspects, traffic
        self._lock = threading.Lock()
        """Guards everything below."""
        self._why_cut = ""
        self.alarm, self._raise = socket.socketpair()
        """``alarm`` becomes readable, for good, when this epoch is over for this member: then ``_raise`` is shut
        down."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._hearing: Hearing | None = None
        self._listener: socket.socket | None = None
        self._lines: list[_Line] = []
        self._beat_s = 0.0
        self._told = -1
        """The version of the evidence in the last bye; -1 before there is one."""
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> str:
        """Why this member can sum no more in this epoch; empty while it can."""
        return self._hearing.over if self._hearing is not None else self._why_cut

    @property
    def evidence(self) -> frozenset[Link]:
        """What is known about links, in ranks; more may come until ``close``."""
        with self._lock:
            return self._hearing.links if self._hearing is not None else frozenset()

    def connect(self, listener: socket.socket, host: str, port: int) -> tuple[socket.socket, socket.socket]:
        """Connect to the right neighbour, which listens at ``host``, and accept the left one.

        Returns the data connections to the left and the right one when all four connections stand; raises BackendError
        when the epoch is over before that. In either case the thread listens to the neighbours from then on."""
        with self._lock:
            if self._why_cut:
                raise BackendError(self._why_cut)
            seat = self._seat
            now_s = time.monotonic()
            self._hearing = Hearing(seat.rank, seat.size, self._timeout_s, self._suspects, now_s)
            self._listener = listener
            listener.setblocking(False)
            for kind in (DATA, CONTROL):
                self._call(host, port, kind, now_s)
        hearing = self._hearing
        while not (hearing.over or hearing.connected):
            self._round(hearing)
        self._thread = threading.Thread(target=self._run, args=(hearing,), name=f"replicas-e{seat.epoch}-links")
        self._thread.daemon = True
        self._thread.start()
        with self._lock:
            if hearing.over:
                raise BackendError(hearing.over)
            [left] = [line.sock for line in self._lines if line.kind == DATA and line.side == LEFT]
            [right] = [line.sock for line in self._lines if line.kind == DATA and line.side == RIGHT]
            return left, right

    def lose(self, side: int) -> None:
        """Note that the owner has found a data connection ended."""
        with self._lock:
            if self._hearing is not None:
                self._hearing.end(side, time.monotonic())
                self._speak(time.monotonic())
                self._stir()

    def cut(self, why: str) -> None:
        """Give up: tell the neighbours, then end the data connections. From any thread, and more than once."""
        with self._lock:
            self._why_cut = self._why_cut or why
            if self._hearing is not None:
                self._hearing.give_up(why)
                self._speak(time.monotonic())
            self._sound()
            for line in self._lines:
                if line.kind == DATA:
                    with contextlib.suppress(OSError):
                        line.sock.shutdown(socket.SHUT_RDWR)
            self._stir()

    def close(self) -> None:
        """End the thread and free everything. Called once, as the last call."""
        self._closing = True
        with self._lock:
            self._stir()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for line in self._lines:
                line.sock.close()
            self._lines.clear()
            self._hang_up()
            self.alarm.close()
            self._raise.close()
            os.close(self._wake)
            self._wake = -1

    # --------------------------------------------------------------------------------------------- the thread

    def _run(self, hearing: Hearing) -> None:
        try:
            while not self._closing:
                self._round(hearing)
        finally:  # whatever ended it, nobody may wait for it
            self.cut("nobody listens to the neighbours any more")

    def _round(self, hearing: Hearing) -> None:
        happened = self._wait()
        now_s = time.monotonic()
        with self._lock:
            for fd in happened:
                self._attend(fd, now_s)
            hearing.look(self._traffic, now_s, self._data_age_s())
            self._speak(now_s)
            if hearing.over:
                self._sound()

    def _wait(self) -> list[int]:
        """Wait for something to read, or for a connection that is being made, until the next beat at most; returns the
        descriptors on which something happened."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        with self._lock:
            if self._listener is not None:
                poller.register(self._listener, select.POLLIN)
            for line in self._lines:
                if line.watched:
                    poller.register(line.sock, line.watched)
            wait_s = ENDED_GRACE_S / 2 if self.over else self._beat_s - time.monotonic()
        happened = [fd for fd, _ in poller.poll(1000 * min(max(wait_s, 0.0), self._timeout_s / BEATS))]
        if self._wake in happened:
            os.eventfd_read(self._wake)
        return happened

    def _data_age_s(self) -> float:
        """For how long no data has reached this machine from the left neighbour, whether or not the owner has read
        it."""
        for line in self._lines:
            if (line.side, line.kind) == (LEFT, DATA):
                with contextlib.suppress(OSError):
                    info = line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                    return _TCP_INFO.unpack(info)[0] / 1000
        return math.inf

    def _attend(self, fd: int, now_s: float) -> None:
        if self._listener is not None and fd == self._listener.fileno():
            self._accept(now_s)
        for line in [line for line in self._lines if line.sock.fileno() == fd]:
            if line.calling:
                self._called(line, now_s)
            else:
                self._read(line, now_s)

    def _call(self, host: str, port: int, kind: bytes, now_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        line = _Line(socket.socket(family, socket.SOCK_STREAM), RIGHT, kind, calling=True)
        self._lines.append(line)
        if line.sock.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
            self._drop(line, now_s)
            return
        _tune(line.sock)
        line.send(self._digest(self._seat.rank) + kind)
        line.calling = bool(line.outbox)

    def _called(self, line: _Line, now_s: float) -> None:
        if line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop(line, now_s)
            return
        line.calling = False
        line.send(b"")

    def _accept(self, now_s: float) -> None:
        """Accept all waiting connections and send each this member's digest; its own digest decides whether it stays.

        What a connection has already sent is read at once: each time that this thread waits beside one that computes,
        it may be a while until it runs again."""
        while self._listener is not None:
            try:
                line = _Line(self._listener.accept()[0], LEFT)
            except OSError:
                return
            self._lines.append(line)
            _tune(line.sock)
            line.send(self._digest(self._seat.rank))
            self._read(line, now_s)

    def _read(self, line: _Line, now_s: float) -> None:
        greeting = DIGEST_BYTES + (line.side == LEFT)
        try:
            more = line.sock.recv(_READ_BYTES if line.greeted else greeting - len(line.inbox))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        line.inbox += more
        if not more:
            self._drop(line, now_s)
        elif not line.greeted and len(line.inbox) == greeting:
            self._greet(line, now_s)
        while line.greeted and (beat := unpack(line.inbox)) is not None:
            self._heard(line.side).hear(line.side, beat, now_s)

    def _greet(self, line: _Line, now_s: float) -> None:
        digest, kind = bytes(line.inbox[:DIGEST_BYTES]), bytes(line.inbox[DIGEST_BYTES:]) or line.kind
        expected = (self._seat.rank + (1 if line.side == RIGHT else -1)) % self._seat.size
        taken = any(other.greeted and (other.side, other.kind) == (line.side, kind) for other in self._lines)
        if digest != self._digest(expected) or kind not in (DATA, CONTROL) or taken:
            self._drop(line, now_s)
            return
        line.kind, line.greeted = kind, True
        line.inbox.clear()
        hearing = self._heard(line.side)
        if sum(other.greeted for other in self._lines if other.side == line.side) == 2:
            hearing.connect(line.side, now_s)
            self._beat_s = now_s
        if hearing.connected:
            self._hang_up()
            for stranger in [other for other in self._lines if not other.greeted]:
                self._drop(stranger, now_s)

    def _drop(self, line: _Line, now_s: float) -> None:
        """Close a connection that has ended. It is no evidence if the other side never said who it is."""
        self._lines.remove(line)
        line.sock.close()
        if line.kind:
            self._heard(line.side).end(line.side, now_s)

    def _speak(self, now_s: float) -> None:
        """Send a beat when it is due; once this member gives up, a bye, and another when there is more evidence."""
        hearing = self._hearing
        assert hearing is not None
        if (self._told == hearing.version) if hearing.over else (now_s < self._beat_s):
            return
        self._beat_s = now_s + self._timeout_s / BEATS
        self._told = hearing.version if hearing.over else -1
        for line in self._lines:
            if line.kind == CONTROL and not line.calling:
                line.send(b"" if line.outbox and not hearing.over else pack(hearing.beat(line.side, self._traffic)))

    def _stir(self) -> None:
        """Wake the thread that polls, so that it looks at everything again."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _sound(self) -> None:
        with contextlib.suppress(OSError):
            self._raise.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _heard(self, side: int) -> Hearing:
        assert self._hearing is not None, f"side {side} speaks before the start"
        return self._hearing

    def _digest(self, rank: int) -> bytes:
        return hashlib.sha256(f"{self._seat.prefix} {rank}".encode()).digest()[:DIGEST_BYTES]


def _tune(sock: socket.socket) -> None:
    """Have the kernel send lost packets again at least once a second. Otherwise it doubles its wait after each loss,
    and after a few losses in a row waits for longer than a time-out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000)):
        with contextlib.suppress(OSError):  # older kernels do not know the second
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
