"""One gloo device for all process groups of a rank, to which no stranger can connect once they have formed.

megatron-core makes some eighteen process groups, also in a world of one rank, and torch makes a gloo device for each of
them: a listening socket and a thread that wakes a hundred times a second, whether there is anything to send or not
(gloo/transport/tcp/loop.cc waits 10 ms at a time). Together they wake 1,800 times a second in each rank, which costs it
2 to 4 % of a core and interrupts its training thread as often. A device serves any number of process groups, so here
they have one.

gloo accepts whoever connects to a device, asks for no proof, and keeps the connection for as long as the device lives:
a thousand idle ones end a rank that is out of file descriptors. So the device of a group on one host listens on the
loopback address, and once the process groups of the block are connected, which is for good, the kernel drops whatever
comes to the device's listening socket (a socket filter, which needs no privilege). Connections that are there go on. A
process group that is made later has a device of its own, without a filter.

May assume: a rank's collectives follow one another, as megatron-core's do, so that one thread is enough to receive.
Promises: torch is as it was when the block ends; process groups live on after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of the classic BPF: return 0 bytes of every packet."""


@contextlib.contextmanager
def shared_gloo_device(host: str = "") -> Iterator[None]:
    """Process groups of gloo that are made inside of the block have the same devices: one that listens on ``host``, or
    those that torch would choose for each, one for each interface that GLOO_SOCKET_IFNAME names, or the default one.
    All of them are connected when the block ends, and nobody can connect any more."""
    if not dist.is_gloo_available():
        yield
        return
    gloo = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []
    others: set[int] = set()

    class OneDevice(gloo):  # type: ignore[misc,valid-type]
        """A process group of gloo with the devices of this block; its parameters are those that torch gives. ``more``:
        what newer versions give too, 'enable_reconfigure' from 2.14 on; where the options lack such a parameter, the
        group has a device of its own."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            options = gloo._Options()
            if not all(hasattr(options, name) for name in more):
                super().__init__(store, rank, size, timeout=timeout, **more)
                return
            if not devices:
                others.update(_listening())
                devices[:] = _devices(gloo, host)
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            for name, value in more.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = gloo  # type: ignore[misc]
    if devices:
        _shut(set(_listening()) - others)


def _devices(gloo: Any, host: str) -> list[Any]:
    if host:
        return [gloo.create_device(hostname=host)]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def _listening() -> Iterator[int]:
    """The descriptors of this process's sockets that listen."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if entry.is_socket():
                with _borrowed(int(entry.name)) as own:
                    if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield int(entry.name)


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """The socket with this descriptor, which stays open. It is no duplicate: while one lives, whoever waits for events
    of the socket learns of them after it is closed."""
    own = socket.socket(fileno=number)
    try:
        yield own
    finally:
        own.detach()


def _shut(listeners: set[int]) -> None:
    """Let the kernel drop whatever comes to these listening sockets."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    for number in listeners:
        with _borrowed(number) as listener:
            try:
                listener.setsockopt(
                    socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
                )
            except OSError as error:
                log.warning("strangers can connect to gloo's port %s: %s", listener.getsockname()[1], error.strerror)
