"""A TCP relay between the members of a ring, with network faults on order.

Every listener of a member gets a front here, which its left neighbour calls instead, and tells its own left neighbour
of; a *way* is one direction of one connection between two groups. The relay passes bytes on until a fault holds the
way: then it neither reads nor writes, as a network that loses everything looks to both ends (connections are still
taken, by this machine's own kernel). The end of a connection is held as bytes are.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.collectives.handshake import CALL_BYTES, PROOF_BYTES, read_call

PORTION_BYTES = 32 << 10


@dataclass(eq=False)
class Way:
    """One direction of one connection."""

    sender: int
    receiver: int
    source: socket.socket
    target: socket.socket
    caller: bool
    kind: str = ""
    """'D' or 'C' once the caller has said it, and who it is."""
    buffer: bytearray = field(default_factory=bytearray)
    passed: int = 0
    resume_s: float = 0.0
    ended: bool = False
    closed: bool = False
    words: bytes = b""
    recorded: bool = False
    back: Way | None = None
    """The other direction."""


class Fault:
    """Holds some ways."""

    def __init__(self, concerns: Callable[[Way], bool]) -> None:
        self.concerns = concerns

    def resume_s(self, way: Way, now_s: float) -> float:
        """When this way may pass something, now or later."""
        raise NotImplementedError


class Silent(Fault):
    """For good."""

    def resume_s(self, way: Way, now_s: float) -> float:
        return math.inf


class Slow(Fault):
    """A delay before every part, and so many bytes a second."""

    def __init__(self, concerns: Callable[[Way], bool], delay_s: float, bytes_s: float) -> None:
        super().__init__(concerns)
        self.delay_s, self.bytes_s = delay_s, bytes_s
        self.seen: dict[Way, tuple[int, float]] = {}

    def resume_s(self, way: Way, now_s: float) -> float:
        passed, resume_s = self.seen.get(way, (way.passed, now_s))
        if passed != way.passed:
            resume_s = now_s + self.delay_s + (way.passed - passed) / self.bytes_s
        self.seen[way] = way.passed, resume_s
        return resume_s


class Stalls(Fault):
    """Every way stands still for a while, again and again, as where packets are lost and sent again."""

    def __init__(self, concerns: Callable[[Way], bool], stall_s: tuple[float, float], rng: random.Random) -> None:
        super().__init__(concerns)
        self.stall_s, self.rng = stall_s, rng
        self.phases: dict[Way, tuple[float, float]] = {}
        """When the present stall ends, and when the next begins."""

    def resume_s(self, way: Way, now_s: float) -> float:
        resume_s, again_s = self.phases.get(way, (now_s, now_s))
        if now_s >= again_s:
            resume_s = now_s + self.rng.uniform(*self.stall_s)
            again_s = resume_s + self.rng.uniform(0.05, 0.3) * self.stall_s[1]
        self.phases[way] = resume_s, again_s
        return resume_s


class Relay:
    """One thread; everything ends with ``close``."""

    def __init__(self) -> None:
        self.recorded: list[bytes] | None = None
        """Where there is a list, the first words of each caller are added to it: its call and its proof."""
        self.struck_s = 0.0
        """When the fault began."""
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._armed: tuple[Fault, Callable[[Way], bool], int] | None = None
        self._fronts: dict[int, tuple[socket.socket, int, int, tuple[str, int]]] = {}
        self._ways: list[Way] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def front(self, sender: int, receiver: int, place: str) -> str:
        """Where ``sender`` is to call, to reach the listener of ``receiver`` at ``place``."""
        host, _, port = place.rpartition(":")
        listener = socket.create_server((host, 0))
        listener.setblocking(False)
        with self._lock:
            self._fronts[listener.fileno()] = listener, sender, receiver, (host, int(port))
        os.eventfd_write(self._wake, 1)
        return f"{host}:{listener.getsockname()[1]}"

    def strike(self, fault: Fault, watched: Callable[[Way], bool] = lambda way: True, after_bytes: int = 0) -> None:
        """From now on, or when a watched way has passed ``after_bytes`` more."""
        with self._lock:
            if after_bytes:
                self._armed = fault, watched, after_bytes
            else:
                self._begin(fault)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for way in self._ways:
            way.source.close()
            way.target.close()
        for listener, *_ in self._fronts.values():
            listener.close()
        os.close(self._wake)

    def _begin(self, fault: Fault) -> None:
        self._fault, self._armed, self.struck_s = fault, None, time.monotonic()

    def _run(self) -> None:
        while not self._closing:
            events = self._poll()
            with self._lock:
                for fd, event in events:
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif fd in self._fronts and event & select.POLLIN:
                        self._connect(*self._fronts[fd])
                now_s = time.monotonic()
                for way in list(self._ways):
                    self._pass(way, now_s)
                self._clear()

    def _poll(self) -> list[tuple[int, int]]:
        """Wait until something can be read, or written, or a way need not be held any more."""
        wanted: dict[int, int] = {self._wake: select.POLLIN}
        now_s, until_s = time.monotonic(), math.inf
        with self._lock:
            wanted |= dict.fromkeys(self._fronts, select.POLLIN)
            for way in self._ways:
                if way.resume_s > now_s:
                    until_s = min(until_s, way.resume_s)
                    continue
                if way.buffer and way.kind:
                    wanted[way.target.fileno()] = wanted.get(way.target.fileno(), 0) | select.POLLOUT
                elif not way.ended:
                    wanted[way.source.fileno()] = wanted.get(way.source.fileno(), 0) | select.POLLIN
        poller = select.poll()
        for fd, events in wanted.items():
            poller.register(fd, events)
        return poller.poll(None if until_s == math.inf else 1 + 1000 * (until_s - now_s))

    def _connect(self, listener: socket.socket, sender: int, receiver: int, place: tuple[str, int]) -> None:
        caller = listener.accept()[0]
        callee = socket.socket()
        try:
            callee.connect(place)  # on this machine: answered at once
        except OSError:
            caller.close()
            callee.close()
            return
        for sock in (caller, callee):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there, back = Way(sender, receiver, caller, callee, True), Way(receiver, sender, callee, caller, False)
        there.back, back.back = back, there
        self._ways += [there, back]

    def _pass(self, way: Way, now_s: float) -> None:
        if not way.ended and len(way.buffer) < PORTION_BYTES and not self._held(way, now_s):
            self._read(way)
        if way.buffer and way.kind and not self._held(way, now_s):
            with contextlib.suppress(BlockingIOError):
                try:
                    number = way.target.send(way.buffer[:PORTION_BYTES])
                except OSError as error:
                    if isinstance(error, BlockingIOError):
                        raise
                    number, way.ended = len(way.buffer), True
                del way.buffer[:number]
                way.passed += number
                self._count(way, number)
        if way.ended and not way.buffer and not way.closed and not self._held(way, now_s):
            way.closed = True
            with contextlib.suppress(OSError):
                way.target.shutdown(socket.SHUT_WR)

    def _held(self, way: Way, now_s: float) -> bool:
        fault = self._fault
        if fault is not None and way.kind:
            way.resume_s = fault.resume_s(way, now_s) if fault.concerns(way) else 0.0
        return way.resume_s > now_s

    def _read(self, way: Way) -> None:
        try:
            more = way.source.recv(PORTION_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        way.buffer += more
        way.ended = not more
        self._record(way, more)
        assert way.back is not None
        if way.caller and not way.kind and len(way.buffer) >= CALL_BYTES:
            call = read_call(bytes(way.buffer[:CALL_BYTES]))
            assert call is not None, "a caller that is no rank"
            way.kind = way.back.kind = call.kind.decode()
            way.sender = way.back.receiver = call.caller.group

    def _record(self, way: Way, more: bytes) -> None:
        if self.recorded is None or not way.caller:
            return
        way.words += more
        if len(way.words) >= CALL_BYTES + PROOF_BYTES and not way.recorded:
            way.recorded = True
            self.recorded.append(way.words[: CALL_BYTES + PROOF_BYTES])

    def _count(self, way: Way, number: int) -> None:
        if self._armed is not None and self._armed[1](way):
            fault, watched, left = self._armed
            if left > number:
                self._armed = fault, watched, left - number
            else:
                self._begin(fault)

    def _clear(self) -> None:
        """Connections that have ended in both directions."""
        for way in [way for way in self._ways if way.caller]:
            assert way.back is not None
            if (way.closed and way.back.closed) or ((way.ended or way.back.ended) and not way.kind):
                self._ways.remove(way)
                self._ways.remove(way.back)
                way.source.close()
                way.target.close()
