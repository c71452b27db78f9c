"""A TCP proxy before one listener, with a tap that sees, changes, withholds or cuts what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from spare_megatron.config.host_port import join_address, split_address

Tap = Callable[[bool, int, int, bytearray], bool]
"""tap(down, call, at, data): ``data`` comes at offset ``at`` of one direction of the connection of that number; down:
from the listener to its caller. May change it; false: pass it on and then cut the connection."""


def pass_all(down: bool, call: int, at: int, data: bytearray) -> bool:
    return True


class Middle:
    """Passes on what comes to its own address. Closed at the end of a with block."""

    def __init__(self, target: str, tap: Tap = pass_all) -> None:
        self.target, self.tap = target, tap
        self.calls = 0
        self.down = 0
        """Bytes that went to callers."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address("127.0.0.1", self._listener.getsockname()[1])
        self.ends: list[socket.socket] = []
        """Of each call that towards the caller, then that towards the listener."""
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for one in [self._listener, *self.ends]:
            one.close()

    def cut(self) -> None:
        """End all connections."""
        for one in list(self.ends):
            _end(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self.ends.append(near)
                self.calls += 1
                try:
                    far = socket.create_connection(split_address(self.target))
                except OSError:
                    _end(near)
                    continue
                self.ends.append(far)
                for pair in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._carry, args=(*pair, self.calls))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, down: bool, call: int) -> None:
        at, goes_on = 0, True
        with contextlib.suppress(OSError):
            while goes_on and (data := bytearray(source.recv(1 << 18))):
                size = len(data)
                goes_on = self.tap(down, call, at, data)
                at += size
                target.sendall(data)
                self.down += len(data) if down else 0
        _end(source)
        _end(target)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
