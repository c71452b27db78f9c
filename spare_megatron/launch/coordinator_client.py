"""Calls of the coordinator from processes that are no ranks: an exit to report, a stop to ask for."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from spare_megatron.control import control_pb2 as pb
from spare_megatron.control.channel import Backoff, Security, call_once, open_channel
from spare_megatron.control.run_directory import RunDirectory

TELL_S = 1.0
"""For one call of the coordinator; it is made again."""


async def tell(
    run_dir: RunDirectory, security: Security, method: str, request: object, over: Callable[[], bool]
) -> pb.Done | None:
    """Tell the coordinator until it has heard it, also one that is being restarted: its answer; None when ``over()``
    came first."""
    backoff = Backoff()
    while not over():
        published = run_dir.coordinator()
        if published is not None:
            try:
                async with open_channel(published.address, security, TELL_S) as channel:
                    return await call_once(channel, method, security, request, TELL_S)
            except grpc.aio.AioRpcError:
                pass
        await backoff.wait()
    return None
