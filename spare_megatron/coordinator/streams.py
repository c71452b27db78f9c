"""The coordinator's open streams: one for each group incarnation; orders are queued and written in order.

A stream ends with its connection, or when its group is fenced. Orders to a group without a stream are dropped: the
answer to its next Hello contains everything that it must know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import grpc.aio

from spare_megatron.control_plane.encoded_order import AnyOrder
from spare_megatron.runtime import failpoints


class Stream:
    """One leader's connection."""

    def __init__(self, group: int, incarnation: int, process_nonce: str, context: grpc.aio.ServicerContext) -> None:
        self.group, self.incarnation, self.process_nonce = group, incarnation, process_nonce
        self.neighbour: tuple[int, int] | None = None
        """The (group, incarnation) whose addresses this group received last."""
        self.offer = 0
        """The offer whose donors' addresses this group received last."""
        self._context = context
        self._orders: asyncio.Queue[AnyOrder | None] = asyncio.Queue()

    def send(self, order: AnyOrder) -> None:
        """Queue one order."""
        self._orders.put_nowait(order)

    def end(self) -> None:
        """Close after what is queued."""
        self._orders.put_nowait(None)

    async def write(self) -> None:
        """Write orders until :meth:`end`."""
        while (order := await self._orders.get()) is not None:
            failpoints.hit_message("order", order)
            await self._context.write(order)
            failpoints.hit("order.sent")


class Streams:
    """All streams, by (group, incarnation); a newer connection of the same incarnation replaces the older one."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], Stream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, stream: Stream) -> None:
        """A leader connected."""
        key = (stream.group, stream.incarnation)
        older = self._streams.get(key)
        if older is not None:
            older.end()
        self._streams[key] = stream
        self._empty.clear()

    def remove(self, stream: Stream) -> bool:
        """A connection closed. True if it was the present one of its incarnation."""
        key = (stream.group, stream.incarnation)
        if self._streams.get(key) is not stream:
            return False
        del self._streams[key]
        if not self._streams:
            self._empty.set()
        return True

    def of(self, group: int, incarnation: int) -> Stream | None:
        """The connection of one incarnation of a group; None where it has none."""
        return self._streams.get((group, incarnation))

    def send(self, group: int, incarnation: int, order: AnyOrder) -> None:
        """Send an order to one incarnation of a group, if it is connected."""
        stream = self._streams.get((group, incarnation))
        if stream is not None:
            stream.send(order)

    def send_all(self, groups: Iterable[int], order: AnyOrder) -> None:
        """Send the same order to every connected incarnation of ``groups``."""
        self.send_each(dict.fromkeys(groups, order))

    def send_each(self, orders: Mapping[int, AnyOrder]) -> None:
        """Send each group's order to all its connected incarnations."""
        for (group, _), stream in self._streams.items():
            if group in orders:
                stream.send(orders[group])

    def end(self, group: int, incarnation: int) -> None:
        """Close one stream after what is queued."""
        stream = self._streams.get((group, incarnation))
        if stream is not None:
            stream.end()

    def end_all(self) -> None:
        """Close every stream after what is queued."""
        for stream in self._streams.values():
            stream.end()

    async def wait_empty(self, timeout_s: float) -> None:
        """Wait until nobody is connected any more; after ``timeout_s`` close what is left."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            self.end_all()
