"""Bounds the connections of the page's server: how many there are, and how long one may stay without a request.

A connection is a *stranger* until a request of it has been let through (``page_door``). Strangers are few and do not
stay: beyond STRANGERS_MAX the one that has been there longest is closed for the next where it has had YOUNG_S to ask,
beyond CROWD_MAX in any case. So who asks at once is answered, however many others hold connections open and ask
nothing. That is reported once.

May assume: used on one event loop. Promises: at most CROWD_MAX + KNOWN_MAX connections are open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

STRANGERS_MAX, CROWD_MAX = 64, 512
KNOWN_MAX = 512
"""Connections from which a request was let through; eight times as many as there are event streams."""
YOUNG_S = 1.0
HEAD_S = 10.0
"""A connection from which no request has been let through for so long is closed."""


class Visitors:
    """The connections of one server."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._strangers: dict[Visit, None] = {}
        self._known: dict[object, Visit] = {}
        self._reported: set[str] = set()

    def protocol(self, server: Callable[[], asyncio.Protocol]) -> Visit:
        """The protocol of a new connection; ``server`` makes the one that answers requests."""
        return Visit(self, server())

    def came(self, visit: Visit) -> None:
        """A connection is open."""
        oldest, number = next(iter(self._strangers), None), len(self._strangers)
        if oldest is not None and number >= (STRANGERS_MAX if oldest.age_s > YOUNG_S else CROWD_MAX):
            self.once(f"more than {STRANGERS_MAX} connections have asked for nothing: the oldest of them are closed")
            oldest.close()
        self._strangers[visit] = None

    def let_in(self, protocol: object) -> bool:
        """A request of this protocol's connection may be answered; False where too many are there already."""
        if protocol in self._known:
            return True
        if len(self._known) >= KNOWN_MAX:
            self.once(f"{KNOWN_MAX} connections are open, and no more are served")
            return False
        for visit in self._strangers:
            if visit.inner is protocol:
                del self._strangers[visit]
                visit.stays()
                self._known[protocol] = visit
                break
        return True

    def left(self, visit: Visit) -> None:
        """A connection is closed."""
        self._strangers.pop(visit, None)
        self._known.pop(visit.inner, None)

    async def close(self) -> None:
        """Close every connection."""
        for visit in (*self._strangers, *self._known.values()):
            visit.close()
        await asyncio.sleep(0)

    def once(self, text: str) -> None:
        """Say something that anybody can cause again and again, the first time."""
        if text not in self._reported:
            self._reported.add(text)
            self._announce(f"{text} (said once)")


class Visit(asyncio.Protocol):
    """One connection: passes on what happens to it."""

    def __init__(self, visitors: Visitors, inner: asyncio.Protocol) -> None:
        self._visitors, self.inner = visitors, inner
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, self.close)
        self.inner.connection_made(transport)
        self._visitors.came(self)

    @property
    def age_s(self) -> float:
        """For how long the connection has been there."""
        return time.monotonic() - self._began_s

    def stays(self) -> None:
        """It has asked for something that it may have."""
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """End the connection at once."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()
        self._visitors.left(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stays()
        self._visitors.left(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()
