"""Finding and shutting down sockets of this process that belong to somebody else's library.

gloo has no working abort: the only thing that ends a hung collective at once is that its connections end. gloo
does not tell which file descriptors it uses, so they are recognised by their addresses (each gloo device listens
on a port of its own) and remembered as (descriptor, inode). A descriptor number can be closed and given to a new
file at any time by another thread; the inode cannot. So a descriptor is first duplicated, the duplicate's inode
compared, and only then is the duplicate shut down: whatever other threads do meanwhile, no foreign socket is
shut down.

Looking around duplicates nothing: an event loop that closes a descriptor and relies on the kernel to forget it (gRPC's
does; gloo's while its device shuts down) would get events of a dead connection for as long as a duplicate lives.
"""

from __future__ import annotations

import contextlib
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
    """End the connection for both sides, if the descriptor still is that socket. Never blocks.

    The owner's event loop must be alive: see the module's docstring.
    """
    if _inode(own.fd) != own.inode:
        return
    try:
        copy = socket.socket(fileno=os.dup(own.fd))
    except OSError:
        return
    with copy, contextlib.suppress(OSError):  # the other side may have been quicker
        if os.fstat(copy.fileno()).st_ino == own.inode:
            copy.shutdown(socket.SHUT_RDWR)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host`` (no packet is sent)."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _sockets() -> Iterator[OwnSocket]:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        inode = _inode(fd)
        if inode is None:
            continue
        ends = _ends(fd)
        if ends is not None and _inode(fd) == inode:
            yield OwnSocket(fd, inode, *ends)


def _inode(fd: int) -> int | None:
    """The inode of ``fd`` when it is a socket."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _ends(fd: int) -> tuple[Address, Address] | None:
    """Local and remote address of a connected internet socket. The descriptor stays as it is."""
    try:
        borrowed = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        local, remote = borrowed.getsockname(), borrowed.getpeername()
    except OSError:
        return None  # listening, or not connected yet
    finally:
        borrowed.detach()
    if not (isinstance(local, tuple) and isinstance(remote, tuple)):
        return None
    return (local[0], local[1]), (remote[0], remote[1])
