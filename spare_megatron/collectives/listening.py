"""Listening sockets between ranks, at which a stranger who connects again and again costs as little as can be: each
connection is accepted beside a thread that trains.

Half of such connections have sent random bytes or hung up by the time they are accepted, and are closed before anything
is made for them: with 200 a second, half of them without a message, 0.16 instead of 0.22 ms of CPU time for each.
"""

from __future__ import annotations

import socket

from spare_megatron.collectives.brief_calls import Room
from spare_megatron.collectives.handshake import CALL_BYTES, read_call
from spare_megatron.collectives.interface import family_of


def listener_at(host: str) -> socket.socket:
    """A listening socket at an address without brackets, with any free port, that does not block. Raises OSError where
    this machine does not have that address.

    Without TCP_DEFER_ACCEPT: a thousand silent callers would fill the queue of connections that are being made, and
    ranks could make none (tried)."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
    listener.setblocking(False)
    return listener


def is_hopeless(sock: socket.socket) -> bool:
    """Whether a connection that was just accepted has ended, or begins with what is no call. Reads nothing."""
    first = Room(CALL_BYTES).receive(sock, CALL_BYTES, socket.MSG_PEEK)
    return first is not None and (not first or (len(first) == CALL_BYTES and read_call(first) is None))
