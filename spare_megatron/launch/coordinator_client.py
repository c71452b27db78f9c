"""Calls of the coordinator from processes that are no ranks: an exit to report, a stop to ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from spare_megatron.control import control_pb2 as pb
from spare_megatron.control.channel import Backoff, Security, call_once, open_channel
from spare_megatron.control.run_directory import RunDirectory

TELL_S = 1.0
"""For one call of the coordinator; it is made again."""


class CoordinatorClient:
    """Speaks to the coordinator of one life, whichever process that is at the moment."""

    def __init__(self, run_dir: RunDirectory, security: Security, over: Callable[[], bool]) -> None:
        """``over``: the life has ended, and nobody is there to be told anything."""
        self._dir, self._security, self._over = run_dir, security, over
        self._tasks: set[asyncio.Task[None]] = set()

    def request_stop(self, reason: str) -> None:
        """Ask the coordinator to save and leave."""
        self.beside(self._request_stop(pb.StopRequest(reason=reason)))

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside everything else, until it is done or :meth:`close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def tell(self, method: str, request: object) -> pb.Done | None:
        """Tell the coordinator until it has heard it, also one that is being restarted: its answer; None when the life
        was over first."""
        backoff = Backoff()
        while not self._over():
            published = self._dir.coordinator()
            if published is not None:
                try:
                    async with open_channel(published.address, self._security, TELL_S) as channel:
                        return await call_once(channel, method, self._security, request, TELL_S)
                except grpc.aio.AioRpcError:
                    pass
            await backoff.wait()
        return None

    def close(self) -> None:
        """End what runs beside."""
        for task in self._tasks:
            task.cancel()

    async def _request_stop(self, request: pb.StopRequest) -> None:
        await self.tell("RequestStop", request)
