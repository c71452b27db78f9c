"""The listening socket of a donor's rank or of a group's store, with the callee's side of the handshake
(:mod:`spare_megatron.collectives.handshake`).

Promises: a connection is handed on only when its caller has proved that it is a rank of this job, and its call is one
that the owner wants. Any other caller receives a challenge and nothing else. It costs one descriptor; at most
STRANGERS_MAX of them are open, each for at most STRANGER_S.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from spare_megatron.collectives import handshake
from spare_megatron.collectives.listening import is_hopeless, listener_at
from spare_megatron.config.host_port import join_address

_ACCEPTS = 16
"""How many connections are accepted before the open ones are read again: so a caller that proves itself at once is not
closed as the oldest of many that came in the meantime."""
_PAUSE_S = 0.05
"""Before connections are accepted again when that has failed."""


class AuthenticatedListener:
    """Listens, in a thread of its own, and hands on the connections of callers that have proved themselves."""

    def __init__(
        self,
        me: handshake.Identity,
        host: str,
        welcome: Callable[[socket.socket, handshake.Call], None],
        wants: Callable[[handshake.Call], bool] | None = None,
    ) -> None:
        """Listen at ``host``. ``welcome`` is called in this object's thread, owns the socket, and must not wait.
        ``wants`` says whether a call is for this listener; by default it wants calls to this rank for state. Raises
        OSError where this machine does not have that address."""
        self._me, self._welcome = me, welcome
        self._wants = wants or (lambda call: call.kind == handshake.STATE and handshake.is_for(call, me))
        self._listener = listener_at(host)
        self.address = join_address(host, self._listener.getsockname()[1])
        """Where learners call."""
        self._strangers: list[_Stranger] = []
        """The oldest first."""
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        for waited in (self._listener, self._wake):
            self._selector.register(waited, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="transfer-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and hang up on all strangers. Called once."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._closing:
                happened = self._selector.select(handshake.STRANGER_S / 10 if self._strangers else None)
                for key, _ in happened:
                    if isinstance(key.data, _Stranger):
                        self._receive(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                self._turn_away(time.monotonic())
        finally:
            for stranger in self._strangers:
                stranger.sock.close()
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # of the connection, or no descriptor is free
                time.sleep(_PAUSE_S)
                return
            if is_hopeless(sock):
                sock.close()
                continue
            try:
                stranger = _Stranger(sock, self._me.key, self._wants, time.monotonic())
                self._selector.register(sock, selectors.EVENT_READ, stranger)
            except OSError:  # it has ended already
                sock.close()
                continue
            self._strangers.append(stranger)
            self._receive(stranger)

    def _receive(self, stranger: _Stranger) -> None:
        try:
            call = stranger.receive()
        except (OSError, handshake.StrangerError):
            self._forget(stranger)
            stranger.sock.close()
            return
        if call is not None:
            self._forget(stranger)
            self._welcome(stranger.sock, call)

    def _turn_away(self, now_s: float) -> None:
        surplus = len(self._strangers) - handshake.STRANGERS_MAX
        for number, stranger in enumerate(list(self._strangers)):
            if number < surplus or now_s - stranger.born_s > handshake.STRANGER_S:
                self._forget(stranger)
                stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.sock)


class _Stranger:
    """A connection whose caller has not proved itself."""

    def __init__(self, sock: socket.socket, key: bytes, wants: Callable[[handshake.Call], bool], born_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.born_s = sock, born_s
        self._side = handshake.Callee(key, wants)
        self._greeted = False

    def receive(self) -> handshake.Call | None:
        """Read what has come, no more than the handshake needs next, and answer; the call, once it is proved. Raises
        OSError where the connection has ended, StrangerError where the caller is not who it should be."""
        if not self._greeted:
            self._greeted = True
            self._send(self._side.first)
        while self._side.missing:
            try:
                more = self.sock.recv(self._side.missing)
            except BlockingIOError:
                return None
            if not more:
                raise ConnectionResetError("the caller has hung up")
            if reply := self._side.take(more):
                self._send(reply)
        return self._side.call

    def _send(self, words: bytes) -> None:
        if self.sock.send(words) < len(words):  # a new connection has room for so few bytes
            raise ConnectionResetError("the caller does not read")
