"""Frames: with them one connection carries the sums of many epochs, and need not be made again for each.

Each segment of a sum is sent as one frame: the epoch and the number of bytes, the bytes, and a last byte that says
whether the frame is complete. If an epoch ends in the middle of a frame, the sender fills that frame with zeros and
marks it as incomplete in its last byte. The receiver accepts a segment only when its frame is complete, and discards
frames of older epochs than its own; a frame of a newer epoch stays in the connection until the receiver is in that
epoch. So no segment ever contains bytes of two epochs, or the zeros, no matter when each side learns of the new epoch.

May assume: an ordered connection without loss (TCP), non-blocking. Both objects belong to the connection and outlive
epochs; one thread at a time uses them. They raise BlockingIOError where nothing can be moved now, and other OSErrors
where the connection has ended.
"""

from __future__ import annotations

import socket
import struct

_HEAD = struct.Struct("!QI")
"""Epoch, number of bytes that follow."""
_WHOLE, _BROKEN = b"\1", b"\0"
_ZEROS = memoryview(bytes(1 << 16))
_WASTE_BYTES = 1 << 16


class DesyncError(OSError):
    """A frame is not the one that the present sum needs: the other side sums something else."""


class FrameSender:
    """Sends frames on one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._open = False
        """A frame is in hand."""
        self._epoch = 0
        """Of the frame in hand."""
        self._head = memoryview(b"")
        """The part of its head that is not sent yet."""
        self._due = 0
        """Number of its bytes, between head and last byte, that are not sent yet."""
        self._withheld = 0
        """Number of bytes, at most one, that are sent but not counted, because the last byte is not sent yet."""

    def send(self, epoch: int, rest: memoryview) -> int:
        """Send some bytes of ``rest``: the remaining bytes of the present frame of this epoch, else those of a new
        frame. Returns how many bytes of ``rest`` were sent."""
        while self._open and self._epoch != epoch:
            self._move(_ZEROS[: self._due], _BROKEN if self._due <= len(_ZEROS) else b"")
        if not self._open:
            self._open, self._epoch, self._due, self._withheld = True, epoch, len(rest), 0
            self._head = memoryview(_HEAD.pack(epoch, len(rest)))
        assert len(rest) == self._due + self._withheld, "the frame in hand is another one"
        number = self._withheld + self._move(rest[: self._due], _WHOLE)
        self._withheld = int(self._open and not self._due)
        if number == self._withheld:
            raise BlockingIOError
        return number - self._withheld

    def _move(self, rest: memoryview, last: bytes) -> int:
        number = self._sock.sendmsg([self._head, rest, last])
        of_head = min(number, len(self._head))
        of_rest = min(number - of_head, len(rest))
        self._head = self._head[of_head:]
        self._due -= of_rest
        self._open = number == of_head + of_rest
        return of_rest


class FrameReceiver:
    """Receives frames on one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._open = False
        """A frame is in hand."""
        self._head = bytearray()
        self._epoch = 0
        """Of the frame in hand."""
        self._due = 0
        """Number of its bytes that have not come yet, without the last one."""
        self._withheld = 0
        """Number of bytes that have come but are not counted, because the last byte has not come yet."""
        self._broken = 0
        """The newest epoch of which a frame is not whole: nothing more of it comes."""
        self._waste = memoryview(bytearray(_WASTE_BYTES))

    def ahead(self, epoch: int) -> bool:
        """Whether nothing more comes in ``epoch``: the other side is in a later one, or has broken off."""
        return self._broken >= epoch or (self._open and self._epoch > epoch)

    def receive(self, epoch: int, room: memoryview, *, in_parts: bool = False) -> int:
        """Receive some bytes of the frame in hand, or of the next one of this epoch, into ``room``, which is as large
        as what is left of it; returns how many. Raises BlockingIOError also where :meth:`ahead` is true. Where a
        frame is received ``in_parts``, its size is not known yet, and ``room`` is for some of it: it must not end."""
        while not self.ahead(epoch):
            if not self._open:
                self._begin()
            elif self._epoch < epoch:
                self._take(self._waste[: self._due])
            elif in_parts:
                number = self._take(room[: self._due])
                if number and not self._open:
                    raise DesyncError("a frame ended where more of it is due")
                if number:
                    return number
            elif len(room) != self._due + self._withheld:
                raise DesyncError(f"a frame of {self._due} bytes came where {len(room)} are due")
            elif number := self._take(room[self._withheld :]):
                return number
        raise BlockingIOError

    def _begin(self) -> None:
        self._head += self._read(_HEAD.size - len(self._head))
        if len(self._head) == _HEAD.size:
            self._epoch, self._due = _HEAD.unpack(self._head)
            self._head.clear()
            self._open, self._withheld = True, 0

    def _take(self, room: memoryview) -> int:
        """Receive some bytes of the frame in hand; returns how many count now."""
        if self._due:
            number = self._sock.recv_into(room)
            if not number:
                raise ConnectionResetError("closed by the other side")
            self._due -= number
            if self._due:
                return number
            self._withheld = number
        whole = self._read(1) == _WHOLE
        self._open = False
        if not whole:
            self._broken = max(self._broken, self._epoch)
        return self._withheld if whole else 0

    def _read(self, most: int) -> bytes:
        more = self._sock.recv(most)
        if not more:
            raise ConnectionResetError("closed by the other side")
        return more
