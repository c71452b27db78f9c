"""A donor's side of transfers: sends its buffers, with one thread for each learner.

A connection serves the one offer that its call names, to the rank that has proved itself on it. It ends when the
learner connects again, sends a damaged request, or neither asks nor receives anything for the time-out. The learner
then connects anew.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from spare_megatron.collectives.handshake import Call, Member
from spare_megatron.runtime.socket_reads import read_exactly
from spare_megatron.transfer import request_frames as words
from spare_megatron.transfer.offered_state import Missing, OfferedState
from spare_megatron.transfer.request_frames import DamageError, PartAnswer, PartRequest
from spare_megatron.transfer.snapshot_shards import CHUNK_BYTES, SendBuffer

SLICE_BYTES_MAX = 1 << 20
_SLICES_PER_S = 20


class RateLimit:
    """Says how long to wait before each slice of bytes is sent. Thread-safe, and without a clock of its own."""

    def __init__(self, rate_bytes_s: float) -> None:
        """``rate_bytes_s``: 0 for no limit."""
        self._rate_bytes_s = rate_bytes_s
        self.slice_bytes = SLICE_BYTES_MAX
        """The most that may be sent after one wait: little enough that several senders get their turns."""
        if rate_bytes_s:
            self.slice_bytes = max(1, min(SLICE_BYTES_MAX, int(rate_bytes_s / _SLICES_PER_S)))
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When all that was allowed so far is sent."""

    def wait_s(self, size: int, now_s: float) -> float:
        """How long from ``now_s`` on to wait before ``size`` more bytes are sent; they count from now on."""
        if not self._rate_bytes_s:
            return 0.0
        with self._lock:
            start_s = max(now_s, self._free_s)
            self._free_s = start_s + size / self._rate_bytes_s
        return start_s - now_s


LATER_S = 1.0
"""How long a request for what is not there yet is held back, at most, before it is answered."""


class Serving:
    """Answers the requests of all learners from one offered state. Thread-safe."""

    def __init__(self, offered: OfferedState, timeout_s: float, rate_bytes_s: float) -> None:
        """``rate_bytes_s`` is for all learners together; 0 for no limit."""
        self._offered, self._timeout_s, self._limit = offered, timeout_s, RateLimit(rate_bytes_s)
        self._later_s = min(LATER_S, timeout_s / 4)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Guards everything below."""
        self._connections: dict[Member, _Connection] = {}

    def welcome(self, sock: socket.socket, call: Call) -> None:
        """Serve on a connection whose caller has proved itself, in a thread of its own; an older one of the same
        learner ends. Does not wait."""
        connection = _Connection(sock, call)
        connection.thread = threading.Thread(
            target=self._run, args=(connection,), name=f"transfer-to-{call.caller.group}", daemon=True
        )
        with self._lock:
            if self._closing.is_set():
                sock.close()
                return
            older = self._connections.get(call.caller)
            self._connections[call.caller] = connection
            if older is not None:
                _hang_up(older.sock)
            try:
                connection.thread.start()
            except RuntimeError:  # there are too many threads; the learner calls again
                del self._connections[call.caller]
                sock.close()

    def close(self) -> None:
        """End all connections and their threads. Called once, when nobody is welcomed any more."""
        with self._lock:
            self._closing.set()
            left = list(self._connections.values())
            for connection in left:
                _hang_up(connection.sock)
        for connection in left:
            connection.thread.join()

    def _run(self, connection: _Connection) -> None:
        sock = connection.sock
        sock.settimeout(self._timeout_s)
        try:
            while True:
                self._answer(
                    sock, connection.call, words.read_request(read_exactly(sock, words.REQUEST_BYTES, "the learner"))
                )
        except (OSError, DamageError):
            pass  # the learner has hung up or is silent, or receives so that something is wrong
        finally:
            with self._lock:  # nobody hangs up on a descriptor that may be another's
                if self._connections.get(connection.call.caller) is connection:
                    del self._connections[connection.call.caller]
                sock.close()

    def _answer(self, sock: socket.socket, call: Call, request: PartRequest) -> None:
        found = self._offered.ask(call.number, call.caller, request.step, self._later_s)
        if isinstance(found, Missing):
            kind = words.LATER if found is Missing.LATER else words.GONE
            sock.sendall(words.pack_answer(PartAnswer(kind)))
        elif request.kind == words.HEADER:
            header = found.header
            answer = PartAnswer(words.HEADER, found.part, found.parts, len(header), words.checksum(header))
            self._send(sock, call, found, answer, memoryview(header))
        else:
            self._send_part(sock, call, found, request.offset)

    def _send_part(self, sock: socket.socket, call: Call, buffer: SendBuffer, offset: int) -> None:
        while offset < buffer.size:
            if buffer.freed:
                sock.sendall(words.pack_answer(PartAnswer(words.GONE)))
                return
            number = offset // CHUNK_BYTES
            checksum, chunk = buffer.chunk(number)
            data = chunk[offset - number * CHUNK_BYTES :]
            answer = PartAnswer(words.BYTES, buffer.part, buffer.parts, len(data), checksum)
            self._send(sock, call, buffer, answer, data)
            offset += len(data)

    def _send(self, sock: socket.socket, call: Call, buffer: SendBuffer, answer: PartAnswer, data: memoryview) -> None:
        """Send an answer and its bytes, no faster than allowed. Raises ConnectionError when the buffer is freed or
        this rank leaves meanwhile; the learner receives why when it asks again."""
        sock.sendall(words.pack_answer(answer), socket.MSG_MORE)
        for start in range(0, len(data), self._limit.slice_bytes):
            part = data[start : start + self._limit.slice_bytes]
            wait_s = self._limit.wait_s(len(part), time.monotonic())
            if (wait_s and self._closing.wait(wait_s)) or buffer.freed:
                raise ConnectionAbortedError("what is being sent is gone")
            sock.sendall(part)
            self._offered.gave(call.number, len(part))


class _Connection:
    """A connection to a learner, and the thread that serves it."""

    thread: threading.Thread

    def __init__(self, sock: socket.socket, call: Call) -> None:
        self.sock, self.call = sock, call


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever waits on a connection; it closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
