"""A learner's side of the connection to one donor: connects, sends requests, receives, and reconnects after a break.

After a break the donor continues from the byte that was reached. A damaged chunk is requested once more, from its
beginning; a second damaged chunk in one snapshot shard is an error. *Silence* is an error too: it is the time that this
side has waited for the donor without receiving anything new. Time in which this process did not run does not count.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from spare_megatron.collectives.handshake import STATE, Identity, StrangerError, call_from, call_in
from spare_megatron.collectives.interface import family_of
from spare_megatron.config.host_port import split_address
from spare_megatron.transfer import request_frames as words
from spare_megatron.transfer.request_frames import DamageError, PartAnswer, PartRequest
from spare_megatron.transfer.snapshot_shards import HEADER_BYTES_MAX, ReceiveBuffer
from spare_megatron.transfer.transport import FetchError, FetchOverError, GoneError, Source

Had = TypeVar("Had")
TICK_S = 0.25
"""The longest single wait for bytes."""
CALL_S = 5.0
"""How long a call may take until the connection stands."""
PAUSE_S, PAUSE_S_MAX = 0.05, 1.0
"""Before the next call, when one has failed; twice as long after each, until something new comes."""


class PartHeader(NamedTuple):
    """What a donor reports of a snapshot shard."""

    header: bytes
    part: int
    parts: int


class StateFetchClient:
    """Fetches one donor's parts of the snapshot shards of one offer. One thread at a time, except for :meth:`stop`."""

    def __init__(self, me: Identity, number: int, source: Source, timeout_s: float) -> None:
        self._me, self._number, self.source, self._timeout_s = me, number, source, timeout_s
        group, incarnation = source.member
        self.donor = f"group {group}, incarnation {incarnation} at {source.address}"
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        """Guards the socket against being closed while another thread hangs up on it."""
        self._sock: socket.socket | None = None
        self._step = 0
        self._damaged = False
        """Something of the present snapshot shard came damaged."""
        self._silent_s = 0.0
        self._pause_s = PAUSE_S
        self._trouble = "it does not answer"
        """What went wrong last."""

    def header(self, step: int) -> PartHeader:
        """Wait for the header of a step's snapshot shard. Raises FetchError, or FetchOverError when stopped."""
        self._step, self._damaged = step, False
        self._received()
        return self._persist(self._ask_header)

    def take(self, buffer: ReceiveBuffer) -> None:
        """Take the donor's part of the snapshot shard whose header was the last one. Raises as :meth:`header` does."""
        self._received()
        self._persist(lambda: self._receive(buffer))

    def stop(self) -> None:
        """End for good, and what another thread does here. From any thread."""
        self._stopped.set()
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None

    # ------------------------------------------------------------------------------------------- asking

    def _persist(self, attempt: Callable[[], Had]) -> Had:
        """Try until it succeeds; each time on a connection that stands."""
        while True:
            if self._stopped.is_set():
                raise FetchOverError("nobody wants the snapshot shard any more")
            try:
                if self._sock is None:
                    self._call()
                return attempt()
            except DamageError as error:
                self.close()
                if self._damaged:
                    raise self._error(f"gave {error} of step {self._step} damaged, for the second time") from error
                self._damaged = True
            except (OSError, StrangerError) as error:
                self.close()
                self._trouble = str(error)
                self._pause()

    def _ask_header(self) -> PartHeader:
        answer = self._ask(PartRequest(words.HEADER, self._step))
        while answer.kind == words.LATER and not self._stopped.is_set():
            self._received()
            answer = self._ask(PartRequest(words.HEADER, self._step))
        if answer.kind != words.HEADER or answer.length > HEADER_BYTES_MAX:
            raise DamageError("its words")
        header = self._read(answer.length)
        if words.checksum(header) != answer.checksum:
            raise DamageError("the header of its part")
        return PartHeader(header, answer.part, answer.parts)

    def _receive(self, buffer: ReceiveBuffer) -> None:
        if buffer.done:
            return
        answer = self._ask(PartRequest(words.BYTES, self._step, buffer.reached))
        while True:
            if answer.kind != words.BYTES or answer.length != buffer.due:
                raise DamageError("its words")
            while room := buffer.room():
                buffer.advance(self._receive_into(room))
                self._received()
            if not buffer.settle(answer.checksum):
                raise DamageError(f"chunk {buffer.chunk} of its part")
            if buffer.done:
                return
            answer = self._answer()

    def _ask(self, request: PartRequest) -> PartAnswer:
        assert self._sock is not None
        self._sock.sendall(words.pack_request(request))
        return self._answer()

    def _answer(self) -> PartAnswer:
        answer = words.read_answer(self._read(words.ANSWER_BYTES))
        if answer.kind == words.GONE:
            raise GoneError(f"{self.donor}, does not serve step {self._step} of offer {self._number} any more")
        return answer

    def _read(self, size: int) -> bytes:
        """The next ``size`` bytes, of words or a header."""
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            rest = rest[self._receive_into(rest) :]
        return bytes(found)

    def _receive_into(self, room: memoryview) -> int:
        """Receive some bytes, at least one."""
        assert self._sock is not None
        while True:
            with self._waiting(TICK_S):
                try:
                    size = self._sock.recv_into(room)
                except TimeoutError:
                    continue
            if not size:
                raise ConnectionResetError("it has closed the connection")
            return size

    # ------------------------------------------------------------------------------------------- calling

    def _call(self) -> None:
        """Connect, and prove each other. Raises OSError or StrangerError."""
        host, port = split_address(self.source.address)
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        with self._lock:
            self._sock = sock
        if self._stopped.is_set():
            raise FetchOverError("nobody wants the snapshot shard any more")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        call_s = min(CALL_S, self._timeout_s)
        sock.settimeout(call_s)
        with self._waiting(call_s):
            sock.connect((host, port))
        sock.settimeout(TICK_S)
        call_in(call_from(self._me, STATE, self.source.member, self._number), self._me.key, sock.sendall, self._read)
        self._trouble = "it does not answer"

    def _pause(self) -> None:
        with self._waiting(self._pause_s):
            self._stopped.wait(self._pause_s)
        self._pause_s = min(PAUSE_S_MAX, 2 * self._pause_s)

    # ------------------------------------------------------------------------------------------- silence

    def _received(self) -> None:
        """Note that something new came."""
        self._silent_s, self._pause_s = 0.0, PAUSE_S

    @contextlib.contextmanager
    def _waiting(self, most_s: float) -> Iterator[None]:
        """Count the time in here as silence, at most ``most_s`` of it. Raises FetchError when it is enough."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._silent_s += min(most_s, time.monotonic() - started_s)
        if self._silent_s >= self._timeout_s:
            raise self._error(f"has given nothing of step {self._step} for {self._timeout_s:g} s: {self._trouble}")

    def _error(self, what: str) -> FetchError:
        return FetchError(f"{self.donor}, {what}")
