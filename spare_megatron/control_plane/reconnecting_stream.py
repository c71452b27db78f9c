"""A stream from a rank to its leader, or from a leader to the coordinator, that is opened again when it breaks.

After each connect the owner sends its greeting again. Everything that must not be lost is in the greeting, or is sent
again on a view of the same epoch (protocol rule 9), so messages that were queued when a connection broke are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Backoff, Security, call_stream, open_channel
from spare_megatron.control_plane.tls_files import tls_fault
from spare_megatron.runtime import failpoints

TLS_S = 2.0
"""How long the other side may take for TLS, where it does not answer gRPC."""


class ReconnectingStream:
    """The stream, opened again until :meth:`close`, a refusal, or too long a time without a connection."""

    def __init__(
        self,
        *,
        service: str,
        report: Any,
        security: Security,
        find: Callable[[], str | None],
        greet: Callable[[], Sequence[Any]],
        take: Callable[[pb.Order], Awaitable[None]],
        done: Callable[[], bool],
        patience_s: float,
        look_s: float = 0.0,
    ) -> None:
        """
        Args:
            service: the gRPC service to join.
            report: the type of the messages that are sent.
            security: the credentials of every call.
            find: returns the address to connect to, None where it is not known yet.
            greet: returns the first messages of a connection.
            take: is called with each order that arrives.
            done: says whether the stream is needed no more when it ends.
            patience_s: how long the other side may be silent.
            look_s: how often to ask ``find``, while connected, whether the address has changed; 0 for never.
        """
        self._service, self._report, self._security = service, report, security
        self._find, self._greet, self._take, self._done = find, greet, take, done
        self._patience_s, self._look_s = patience_s, look_s
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting: list[Any] = []
        self._closing = asyncio.Event()
        self._connected_once = False
        self._examined: set[str] = set()
        """Addresses that never answered, of which it is known whether TLS is the reason."""
        self.error = ""
        """Why the last attempt failed."""
        self.refused = ""
        """Why no further attempt makes sense, with the fix; empty while one does."""

    def send(self, report: Any, waits: bool = False) -> None:
        """Queue a message; it is dropped when the connection breaks before it is sent. One that ``waits`` goes with the
        next that does not."""
        if waits:
            self._waiting.append(report)
        else:
            self._queue.put_nowait(report)

    async def run(self, first_s: float, again_s: float) -> None:
        """Connect, and connect again after each loss.

        Returns after :meth:`close`, after a refusal, when ``done`` says so, or when there was no connection for
        ``first_s`` (before the first one) or ``again_s`` (later).
        """
        backoff = Backoff()
        while not (self._closing.is_set() or self.refused or self._done()):
            address = self._find()
            if address is not None and await self._attempt_or_move(address):
                backoff.reset()
                continue
            if backoff.waited_s > (again_s if self._connected_once else first_s):
                return
            await _first_of(backoff.wait(), self._closing.wait())

    def close(self) -> None:
        """Send what is queued, then end the stream; :meth:`run` returns when the other side has ended it too."""
        self._closing.set()
        self.send(None)

    async def _attempt_or_move(self, address: str) -> bool:
        """Run one connection, and give it up as soon as ``find`` returns another address. True if the next attempt
        needs no pause: the other side had answered, or the address has changed."""
        if not self._look_s:
            return await self._attempt(address)
        attempt, moved = asyncio.ensure_future(self._attempt(address)), asyncio.ensure_future(self._moved(address))
        try:
            await asyncio.wait({attempt, moved}, return_when=asyncio.FIRST_COMPLETED)
            return await attempt if attempt.done() else True
        finally:
            for task in (attempt, moved):
                task.cancel()
            await asyncio.gather(attempt, moved, return_exceptions=True)

    async def _moved(self, address: str) -> None:
        while self._find() in (address, None):
            await asyncio.sleep(self._look_s)

    async def _attempt(self, address: str) -> bool:
        """Run one connection from greeting to end. True if the other side ever answered."""
        channel = open_channel(address, self._security, self._patience_s)
        try:
            return await self._converse(channel, address)
        finally:
            await channel.close()

    async def _converse(self, channel: grpc.aio.Channel, address: str) -> bool:
        try:
            # A stopped process accepts connections, in its kernel, and never answers on them.
            await asyncio.wait_for(channel.channel_ready(), self._patience_s)
        except TimeoutError:
            self.error = f"no answer within {self._patience_s:g} s ({address})"
            if not self._connected_once and address not in self._examined:
                self._examined.add(address)
                self.refused = await asyncio.to_thread(
                    tls_fault, address, self._security.tls_dir, min(self._patience_s, TLS_S)
                )
            return False
        call = call_stream(channel, self._service, self._security, self._report)
        self._queue, self._waiting = asyncio.Queue(), []
        for message in self._greet():
            self.send(message)
        writer = asyncio.create_task(self._write(call))
        answered = False
        try:
            while (order := await call.read()) is not grpc.aio.EOF:
                answered = self._connected_once = True
                await self._take(order)
        except grpc.aio.AioRpcError as error:
            self.error = f"{error.details() or error.code().name} ({address})"
            # Where the other side has answered before, it is gone, and a process of another job has got its port.
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and not self._connected_once:
                self.refused = f"{address} refused the job token; that of the run directory belongs to another job"
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            call.cancel()
        return answered

    async def _write(self, call: Any) -> None:
        """Send the queued messages in order, those that are there together as one; None ends the stream."""
        try:
            over = False
            while not over:
                reported = await queued(self._queue)
                reported[:0], self._waiting = self._waiting, []
                over = any(message is None for message in reported)
                messages = [message for message in reported if message is not None]
                for message in messages:
                    failpoints.hit_message("report", message)
                if messages:
                    await call.write(joined(messages))
                for _ in messages:
                    failpoints.hit("report.sent")
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side sees the same end and says why
        except OSError as error:
            self.error = str(error)
            await call.done_writing()  # the other side ends the stream, and the reading side here sees that


async def queued(queue: asyncio.Queue[Any]) -> list[Any]:
    """Everything that is in the queue, once there is anything."""
    reported = [await queue.get()]
    while not queue.empty():
        reported.append(queue.get_nowait())
    return reported


def joined(messages: Sequence[Any]) -> Any:
    """Reports or orders as one message: the first, with those that follow it in its field ``then``."""
    if len(messages) == 1:
        return messages[0]
    one = type(messages[0])()
    one.CopyFrom(messages[0])
    one.then.extend(messages[1:])
    return one


async def _first_of(*waits: Any) -> None:
    """Return when the first of ``waits`` is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
