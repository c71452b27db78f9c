"""Accepts the connections of the page's server, and ends without leaving one behind.

asyncio's own server loses a connection that it has accepted just before it is closed, tries a closed socket again a
second after the process had no free descriptor, and gives a traceback for each connection that it could not accept.

May assume: used on one event loop. Promises: after ``stop`` no connection comes any more, and each that came is known
to ``Visitors``; a shortage of descriptors is reported once, and accepting goes on ACCEPT_AGAIN_S later.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from spare_megatron.monitor.page.visitors import Visitors

ACCEPT_AGAIN_S = 1.0
BACKLOG = 128
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""What binding to an address fails with that this machine has not, such as IPv6's of "localhost"."""


class PageListener:
    """The listening sockets of one server."""

    def __init__(self, visitors: Visitors, server: Callable[[], asyncio.Protocol]) -> None:
        self._visitors, self._server = visitors, server
        self._sockets: list[socket.socket] = []
        self._arriving: set[asyncio.Task[object]] = set()
        self._again: dict[socket.socket, asyncio.TimerHandle] = {}
        """Those that wait out a shortage of descriptors."""

    async def start(self, host: str, port: int) -> int:
        """Listen on every address of ``host``; returns the port. Raises OSError where no address can be had."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        absent: OSError | None = None
        for family, *_, address in dict.fromkeys(found):
            try:
                one = socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno not in ABSENT:
                    self._close()
                    raise
                absent = error
                continue
            one.setblocking(False)
            self._sockets.append(one)
        if not self._sockets:
            raise absent or OSError(errno.EADDRNOTAVAIL, "no address")
        for one in self._sockets:
            loop.add_reader(one, self._accept, one)
        return int(self._sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Accept no more, and pass on what has been accepted."""
        self._close()
        if self._arriving:
            await asyncio.wait(self._arriving)

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        for timer in self._again.values():
            timer.cancel()
        for one in self._sockets:
            loop.remove_reader(one)
            one.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in SHORTAGES:
                self._visitors.once(
                    f"connections cannot be accepted now: {error.strerror}; raise ulimit -n, or close some"
                )
                loop.remove_reader(listening)
                self._again[listening] = loop.call_later(
                    ACCEPT_AGAIN_S, loop.add_reader, listening, self._accept, listening
                )
            return  # else the caller has gone, or the network has failed: the next one may be well
        arriving: asyncio.Task[object] = loop.create_task(self._arrive(connection))
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arriving.discard)

    async def _arrive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self._visitors.protocol(self._server), connection)
        except OSError:
            connection.close()
