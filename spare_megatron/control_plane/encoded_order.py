"""An order that is encoded before it is written, so that what a thousand groups receive alike is encoded once.

The encodings of two messages, one after the other, are the encoding of both merged: of single fields the later value
counts, repeated ones are joined, messages inside are merged in turn
(https://protobuf.dev/programming-guides/encoding/#last-one-wins).
"""

from __future__ import annotations

from spare_megatron.control_plane import control_pb2 as pb


class EncodedOrder:
    """Stands for a ``pb.Order`` where one is written."""

    __slots__ = ("_data", "_kind")

    def __init__(self, kind: str, *parts: bytes) -> None:
        """``parts`` are encoded orders of this kind, which are merged."""
        self._kind, self._data = kind, b"".join(parts)

    def SerializeToString(self) -> bytes:  # noqa: N802 - as of a message
        """The order on the wire."""
        return self._data

    def WhichOneof(self, _: str) -> str:  # noqa: N802 - as of a message
        """The kind of the order."""
        return self._kind


AnyOrder = pb.Order | EncodedOrder


def order_bytes(order: AnyOrder) -> bytes:
    """An order on the wire."""
    data: bytes = order.SerializeToString()
    return data
