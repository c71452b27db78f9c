"""Socket calls that never wait and keep the interpreter's lock.

Python's own socket methods give the lock up for every call. Whoever does that beside a thread that computes in Python
gets it back up to a switch interval (5 ms) later, and where many threads wait for it every call changes threads. A
call of some microseconds that cannot block has no use for that; large ones, of sums, go through Python's methods.

May assume: Linux, whose numbers of the flags are used. Raises nothing.
"""

from __future__ import annotations

import ctypes
import errno
import socket

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_LIBC = ctypes.PyDLL(None, use_errno=True)
_LIBC.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.send.restype = ctypes.c_ssize_t
_LIBC.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.recv.restype = ctypes.c_ssize_t


class Room:
    """Where one connection's bytes arrive."""

    def __init__(self, most: int) -> None:
        self._buffer = ctypes.create_string_buffer(most)
        self._view = memoryview(self._buffer)

    def receive(self, sock: socket.socket, most: int, flags: int = 0) -> bytes | None:
        """Some bytes; none where the connection has ended; None where there are none now. ``flags``: further ones, such
        as MSG_PEEK."""
        number = _LIBC.recv(sock.fileno(), self._buffer, min(most, len(self._view)), _FLAGS | flags)
        if number >= 0:
            return bytes(self._view[:number])
        return None if ctypes.get_errno() in (errno.EAGAIN, errno.EINTR) else b""


def send(sock: socket.socket, words: bytes) -> int:
    """Number of bytes that the connection takes now; 0 also where it has ended, which shows when it is read."""
    return max(0, int(_LIBC.send(sock.fileno(), words, len(words), _FLAGS)))
