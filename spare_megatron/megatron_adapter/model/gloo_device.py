"""One gloo device for all process groups of a rank.

megatron-core makes some eighteen process groups, also in a world of one rank, and torch makes a gloo device for each of
them: a listening socket and a thread that wakes a hundred times a second, whether there is anything to send or not
(gloo/transport/tcp/loop.cc waits 10 ms at a time). Together they wake 1,800 times a second in each rank, which costs it
2 to 4 % of a core and interrupts its training thread as often. A device serves any number of process groups, so here
they have one.

May assume: a rank's collectives follow one another, as megatron-core's do, so that one thread is enough to receive.
Promises: torch is as it was when the block ends; process groups live on after it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextlib.contextmanager
def shared_gloo_device() -> Iterator[None]:
    """Process groups of gloo that are made inside of the block have the same devices: those that torch would choose
    for each, one for each interface that GLOO_SOCKET_IFNAME names, or the default one."""
    if not dist.is_gloo_available():
        yield
        return
    gloo = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []

    class OneDevice(gloo):  # type: ignore[misc,valid-type]
        """A process group of gloo with the devices of this block; its parameters are those that torch gives."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            if not devices:
                names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
                devices[:] = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
            options = gloo._Options()
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = gloo  # type: ignore[misc]
