"""The server of a group's store: keys and values through which its ranks find each other.

It takes the place of torch's TCPStore, which has no authentication: whoever connects to one may change what the ranks
read. Here every connection begins with :mod:`spare_megatron.collectives.handshake`. A request and its answer have a
fixed format (:mod:`spare_megatron.worker.store_messages`); nothing in them is ever executed.

May assume: whoever has proved the token is a rank of this job. Promises: a client that dies, stops, or does not read
its answers hurts no other; a request that waits for a key is answered as soon as the key is there, or with TIMED_OUT
after its own time-out. When the server's process dies, requests of clients end with an error within milliseconds.
"""

from __future__ import annotations

import collections
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from spare_megatron.collectives.handshake import STORE, Call, Identity, is_for
from spare_megatron.transfer.authenticated_listener import AuthenticatedListener
from spare_megatron.worker import store_messages

_READ_BYTES = 1 << 20


@dataclass(eq=False)
class _Client:
    """One connection."""

    sock: socket.socket
    received: bytearray
    """What came of the next request."""
    unsent: bytearray
    """What is left of answers that the client has not read."""
    waits: store_messages.Request | None = None
    """A request that cannot be answered yet."""
    until_s: float = 0.0
    sends: bool = False
    """Whether it is asked when this client reads on."""


class StoreServer:
    """A store that is served, in threads of its own, until :meth:`close`."""

    def __init__(self, me: Identity, host: str, number: int = 0) -> None:
        """Listen at ``host``, for calls to ``me`` with this ``number``. Raises OSError where this machine does not have
        that address."""
        self._number, self._me = number, me
        self._values: dict[bytes, bytes] = {}
        self._clients: set[_Client] = set()
        self._waiting: dict[bytes, list[_Client]] = {}
        """Key -> clients whose request waits for it, and perhaps for others behind it."""
        self._woken: collections.deque[_Client] = collections.deque()
        """Clients that have an answer and may have asked on."""
        self._arrived: collections.deque[socket.socket] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._listener = AuthenticatedListener(me, host, self._welcome, self._wants)
        self.address = self._listener.address
        """host:port."""
        self._thread = threading.Thread(target=self._run, name="group-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; requests that wait end with an error. Called once."""
        self._listener.close()
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _wants(self, call: Call) -> bool:
        return call.kind == STORE and call.number == self._number and is_for(call, self._me)

    def _welcome(self, sock: socket.socket, _: Call) -> None:
        self._arrived.append(sock)
        os.eventfd_write(self._wake, 1)

    # ----------------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._pause_s()):
                    client = key.data
                    if client is None:
                        self._begin()
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._send(client)
                    if events & selectors.EVENT_READ and client in self._clients:
                        self._read(client)
                self._time_out()
                while self._woken:
                    self._take(self._woken.popleft())
        finally:
            for client in list(self._clients):
                self._end(client)
            self._selector.close()

    def _begin(self) -> None:
        os.eventfd_read(self._wake)
        while self._arrived:
            client = _Client(self._arrived.popleft(), bytearray(), bytearray())
            self._clients.add(client)
            self._selector.register(client.sock, selectors.EVENT_READ, client)
            self._read(client)

    def _pause_s(self) -> float | None:
        until_s = min((one.until_s for one in self._clients if one.waits is not None), default=None)
        return None if until_s is None else max(0.0, until_s - time.monotonic())

    def _time_out(self) -> None:
        now_s = time.monotonic()
        for client in [one for one in self._clients if one.waits is not None and one.until_s <= now_s]:
            self._waits_no_more(client)
            self._answer(client, store_messages.Answer(store_messages.TIMED_OUT))
            self._woken.append(client)

    def _read(self, client: _Client) -> None:
        try:
            while True:
                more = client.sock.recv(_READ_BYTES)
                if not more:
                    self._end(client)
                    return
                client.received += more
                if len(more) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self._end(client)
            return
        self._take(client)

    def _take(self, client: _Client) -> None:
        """Carry out the complete requests of a client in order. A request that waits for a key holds up those behind
        it."""
        while client in self._clients and client.waits is None and len(client.received) >= store_messages.HEADER_BYTES:
            size = store_messages.body_bytes(client.received)
            if size is None:
                self._end(client)
                return
            if len(client.received) < store_messages.HEADER_BYTES + size:
                return
            request = store_messages.read_request(bytes(client.received[: store_messages.HEADER_BYTES + size]))
            del client.received[: store_messages.HEADER_BYTES + size]
            if request is None:
                self._end(client)
            else:
                self._do(client, request)

    def _do(self, client: _Client, request: store_messages.Request) -> None:
        answer = self._answer_to(request)
        if answer is not None:
            self._answer(client, answer)
            return
        if client.waits is None:
            client.waits, client.until_s = request, time.monotonic() + request.timeout_s
        missing = next(key for key in request.keys if key not in self._values)
        self._waiting.setdefault(missing, []).append(client)

    def _waits_no_more(self, client: _Client) -> None:
        if client.waits is not None:
            for key in client.waits.keys:
                there = self._waiting.get(key, [])
                if client in there:
                    there.remove(client)
                    if not there:
                        del self._waiting[key]
            client.waits = None

    def _answer_to(self, request: store_messages.Request) -> store_messages.Answer | None:
        """Carry out a request; None where it has to wait for a key."""
        op, keys, values, known = request.op, request.keys, request.values, self._values
        if op in (store_messages.Op.GET, store_messages.Op.WAIT):
            if not all(key in known for key in keys):
                return None
            return store_messages.Answer(
                store_messages.DONE, tuple(known[key] for key in keys) if op is store_messages.Op.GET else ()
            )
        if op is store_messages.Op.CHECK:
            return store_messages.Answer(store_messages.DONE, (b"1" if all(key in known for key in keys) else b"0",))
        if op is store_messages.Op.COUNT:
            return store_messages.Answer(store_messages.DONE, (b"%d" % len(known),))
        if op is store_messages.Op.DELETE:
            return store_messages.Answer(store_messages.DONE, (b"0" if known.pop(keys[0], None) is None else b"1",))
        if op is store_messages.Op.SET:
            known.update(zip(keys, values, strict=True))
            answer = store_messages.Answer(store_messages.DONE)
        elif op is store_messages.Op.APPEND:
            known[keys[0]] = known.get(keys[0], b"") + values[0]
            answer = store_messages.Answer(store_messages.DONE)
        elif op is store_messages.Op.ADD:
            try:
                known[keys[0]] = b"%d" % (int(known.get(keys[0], b"0")) + int(values[0]))
            except ValueError:
                return store_messages.Answer(store_messages.REFUSED, (b"the value is no number",))
            answer = store_messages.Answer(store_messages.DONE, (known[keys[0]],))
        else:  # COMPARE_SET: (expected, desired)
            expected, desired = values
            if known.get(keys[0], b"") == expected:
                known[keys[0]] = desired
            answer = store_messages.Answer(store_messages.DONE, (known.get(keys[0], expected),))
        self._wake_who_waits(keys)
        return answer

    def _wake_who_waits(self, keys: tuple[bytes, ...]) -> None:
        for key in keys:
            for client in self._waiting.pop(key, ()):
                request = client.waits
                assert request is not None
                if all(one in self._values for one in request.keys):
                    client.waits = None
                    self._woken.append(client)
                self._do(client, request)

    def _answer(self, client: _Client, answer: store_messages.Answer) -> None:
        client.unsent += store_messages.pack_answer(answer)
        self._send(client)

    def _send(self, client: _Client) -> None:
        try:
            while client.unsent:
                del client.unsent[: client.sock.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(client)
            return
        if client.sends != bool(client.unsent):
            client.sends = bool(client.unsent)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.sends else 0)
            self._selector.modify(client.sock, wanted, client)

    def _end(self, client: _Client) -> None:
        if client in self._clients:
            self._waits_no_more(client)
            self._clients.discard(client)
            self._selector.unregister(client.sock)
            client.sock.close()
