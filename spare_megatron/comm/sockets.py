"""Finding and shutting down sockets of this process that belong to somebody else's library.

gloo has no working abort: the only thing that ends a hung collective at once is that its connections end.
gloo does not tell which file descriptors it uses, so they are recognised by their addresses (each gloo device
listens on a port of its own) and remembered as (descriptor, inode). A descriptor number can be closed and
given to a new file at any time by another thread; the inode cannot. So a descriptor is first duplicated, the
duplicate's inode compared, and only then is the duplicate shut down: whatever other threads do meanwhile, no
foreign socket is ever touched.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Address = tuple[str, int]
"""Numeric host and port."""


@dataclass(frozen=True)
class OwnSocket:
    """One connected socket of this process."""

    fd: int
    inode: int
    local: Address
    remote: Address


def connected(belongs: Callable[[Address, Address], bool]) -> list[OwnSocket]:
    """All connected TCP sockets of this process for which ``belongs(local, remote)`` holds."""
    return [own for own in _sockets() if belongs(own.local, own.remote)]


def shut(own: OwnSocket) -> None:
    """End the connection for both sides, if the descriptor still is that socket. Never blocks."""
    copy = _duplicate(own.fd)
    if copy is None:
        return
    with copy:
        if os.fstat(copy.fileno()).st_ino == own.inode:
            try:
                copy.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the other side was quicker


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host`` (no packet is sent)."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _sockets() -> Iterator[OwnSocket]:
    for name in os.listdir("/proc/self/fd"):
        copy = _duplicate(int(name))
        if copy is None:
            continue
        with copy:
            try:
                local, remote = copy.getsockname(), copy.getpeername()
            except OSError:
                continue  # listening, or not connected yet
            if isinstance(local, tuple) and isinstance(remote, tuple):
                inode = os.fstat(copy.fileno()).st_ino
                yield OwnSocket(int(name), inode, (local[0], local[1]), (remote[0], remote[1]))


def _duplicate(fd: int) -> socket.socket | None:
    """A duplicate of ``fd`` when that is an internet socket."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    if not stat.S_ISSOCK(os.fstat(copy).st_mode):
        os.close(copy)
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.close()
        return None
    return sock
