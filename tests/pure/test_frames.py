"""Frames over real socket pairs that take and give as few bytes as they like: no segment is ever made of bytes of
another epoch, nor of those with which a frame that was broken off is filled."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.collectives.frames import DesyncError, FrameReceiver, FrameSender

SMALL_BUFFER = 4096


def _pair() -> tuple[socket.socket, socket.socket]:
    left, right = socket.socketpair()
    for one in (left, right):
        one.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, option, SMALL_BUFFER)
    return left, right


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_each_epoch_reads_its_own_frames_only(seed: int) -> None:
    """A sender and a receiver go through epochs at times of their own; the sender breaks off anywhere. What the
    receiver has as a whole in an epoch is what the sender gave in it."""
    rng = random.Random(seed)
    here, there = _pair()
    sender, receiver = FrameSender(here), FrameReceiver(there)
    given_of: dict[int, bytes] = {}
    read_of: dict[int, bytes] = {}
    try:
        epoch_out = epoch_in = 1
        size = rng.choice((1, 100, 30_000))
        out, room = memoryview(rng.randbytes(size)), memoryview(bytearray(size))
        given_of[1] = bytes(out)
        for _ in range(400):
            if rng.random() < 0.5:
                try:
                    number = sender.send(epoch_out, out)
                except BlockingIOError:
                    number = 0
                out = out[number:]
                if not out or rng.random() < 0.05:
                    epoch_out += not out or rng.random() < 0.8
                    fresh = rng.randbytes(size) if epoch_out not in given_of else b""
                    if fresh:
                        given_of[epoch_out] = fresh
                        out = memoryview(fresh)
            else:
                try:
                    number = receiver.receive(epoch_in, room)
                except BlockingIOError:
                    number = 0
                read_of[epoch_in] = read_of.get(epoch_in, b"") + bytes(room[:number])
                room = room[number:]
                if (not room or receiver.ahead(epoch_in) or rng.random() < 0.05) and epoch_in < epoch_out:
                    epoch_in += 1
                    room = memoryview(bytearray(size))
        whole = {epoch: read for epoch, read in read_of.items() if len(read) == size}
        assert all(given_of[epoch] == read for epoch, read in whole.items())
        assert whole
    finally:
        here.close()
        there.close()


def test_a_frame_of_another_size_is_said_to_be_one() -> None:
    here, there = _pair()
    FrameSender(here).send(1, memoryview(b"abc"))
    with pytest.raises(DesyncError, match="3 bytes came where 4 are due"):
        FrameReceiver(there).receive(1, memoryview(bytearray(4)))
    here.close()
    there.close()


def test_a_later_epochs_frame_waits() -> None:
    here, there = _pair()
    receiver, room = FrameReceiver(there), memoryview(bytearray(3))
    FrameSender(here).send(2, memoryview(b"abc"))
    with pytest.raises(BlockingIOError):
        receiver.receive(1, room)
    assert receiver.ahead(1)
    assert receiver.receive(2, room) == 3
    assert bytes(room) == b"abc"
    here.close()
    with pytest.raises(ConnectionResetError):
        receiver.receive(2, room)
    there.close()
