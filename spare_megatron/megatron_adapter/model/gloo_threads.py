"""Has the gloo process groups of a rank share one I/O thread.

torch gives each group a thread of its own, which wakes a hundred times a second even where nothing is sent, and
megatron-core makes about 18 groups, most of them of one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Inside, new gloo groups use the devices, and with them the threads, of the first one."""
    if not dist.is_gloo_available():
        yield
        return
    plain = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []

    class Sharing(plain):  # type: ignore[misc,valid-type]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            if not devices:
                super().__init__(store, rank, size, timeout=timeout)
                devices.extend(self.options._devices)
                return
            options = plain._Options()
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = plain  # type: ignore[misc]
