"""Calls that keep the interpreter's lock, on real connections: open, empty, full, ended."""

from __future__ import annotations

import socket

from spare_megatron.collectives.brief_calls import Room, send


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_bytes_come_as_they_were_sent_and_none_are_no_end() -> None:
    one, other = _pair()
    with one, other:
        room = Room(8)
        assert room.receive(other, 8) is None
        assert send(one, b"a" + bytes(3) + b"longer") == 10
        other.setblocking(False)
        assert room.receive(other, 3) == b"a\0\0"
        assert room.receive(other, 100) == b"\0longer", "no more than the room has"
        one.close()
        assert room.receive(other, 8) == b""


def test_what_a_connection_does_not_take_is_said_and_nothing_waits() -> None:
    one, other = _pair()
    with one, other:
        words = bytes(1 << 20)
        took = [send(one, words) for _ in range(64)]
        assert took[-1] == 0
        assert sum(took) > 0


def test_a_closed_connection_takes_and_brings_nothing() -> None:
    one, other = _pair()
    other.close()
    one.close()
    assert send(one, b"x") == 0
    assert Room(8).receive(one, 8) == b""
