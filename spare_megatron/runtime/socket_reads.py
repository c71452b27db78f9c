"""Reads a known number of bytes from a socket that waits for them."""

from __future__ import annotations

import socket

_MOST_BYTES = 1 << 20
"""Of one call, so that a length that a stranger names takes no memory before its bytes are there."""


def read_exactly(sock: socket.socket, size: int, who: str) -> bytes:
    """The next ``size`` bytes. Raises ConnectionResetError, naming ``who``, where the connection ends before; OSError
    where it breaks or a time-out of the socket is over."""
    found = bytearray()
    while len(found) < size:
        more = sock.recv(min(size - len(found), _MOST_BYTES))
        if not more:
            raise ConnectionResetError(f"{who} has hung up")
        found += more
    return bytes(found)
