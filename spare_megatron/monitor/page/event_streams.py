"""The event streams that are open: each gets what is sent to all, a slow one less often. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

STREAMS_MAX = 64
WAITING_MAX = 32
"""Texts that may wait for a slow reader; then it gets everything anew instead."""


class EventStream:
    """One open stream."""

    def __init__(self, whole: Callable[[], list[str]]) -> None:
        self._whole = whole
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self.begin()

    def begin(self) -> None:
        """Forget what waits; everything is sent from here."""
        while not self._texts.empty():
            self._texts.get_nowait()
        for text in self._whole():
            self._texts.put_nowait(text)
        self._most = self._texts.qsize() + WAITING_MAX

    def tell(self, text: str | None) -> None:
        """None: the stream ends."""
        if text is not None and self._texts.qsize() >= self._most:
            self.begin()
        else:
            self._texts.put_nowait(text)

    async def next(self) -> str | None:
        """The next text; None at the end."""
        return await self._texts.get()


class EventStreams:
    """All open streams."""

    def __init__(self, whole: Callable[[], list[str]]) -> None:
        """``whole`` makes the texts with which a stream begins; those sent later change what they say."""
        self._whole, self._open = whole, set[EventStream]()

    @property
    def full(self) -> bool:
        """Whether no further one is opened."""
        return len(self._open) >= STREAMS_MAX

    @contextlib.contextmanager
    def stream(self) -> Iterator[EventStream]:
        """A stream, as long as the context lasts."""
        stream = EventStream(self._whole)
        self._open.add(stream)
        try:
            yield stream
        finally:
            self._open.discard(stream)

    def tell(self, text: str | None) -> None:
        """To all. None: they end."""
        for stream in self._open:
            stream.tell(text)
