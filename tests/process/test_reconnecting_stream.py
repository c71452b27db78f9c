"""A stream joins what is said together into one message, in order, and loses nothing that waits when it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import COORDINATOR, Security, serve
from spare_megatron.control_plane.reconnecting_stream import ReconnectingStream

pytestmark = [pytest.mark.timeout(60)]
SECURITY = Security("token")


def report(step: int) -> pb.GroupReport:
    return pb.GroupReport(step_report=pb.StepReport(step=step))


def steps(message: pb.GroupReport) -> list[int]:
    """The steps in a message, in order."""
    assert all(not one.then for one in message.then)
    return [one.step_report.step for one in (message, *message.then)]


async def received(greeting: Sequence[int], talk: Any) -> list[list[int]]:
    """The steps of each message that a server receives; ``talk(stream, messages)`` speaks once the greeting has
    come."""
    messages: list[list[int]] = []
    came = asyncio.Event()

    async def join(_: Any, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            messages.append(steps(message))
            came.set()

    server, port = await serve("127.0.0.1:0", COORDINATOR, SECURITY, join, pb.GroupReport)

    async def take(_: pb.Order) -> None:
        raise AssertionError("the server says nothing")

    stream = ReconnectingStream(
        service=COORDINATOR,
        report=pb.GroupReport,
        security=SECURITY,
        find=lambda: f"127.0.0.1:{port}",
        greet=lambda: [report(step) for step in greeting],
        take=take,
        done=lambda: False,
        patience_s=10.0,
    )
    running = asyncio.create_task(stream.run(first_s=10.0, again_s=10.0))
    await came.wait()
    await talk(stream, messages)
    stream.close()
    await running
    await server.stop(grace=0.0)
    return messages


def test_what_is_said_together_is_one_message_in_order() -> None:
    async def talk(stream: ReconnectingStream, _: object) -> None:
        for step in (3, 4, 5):
            stream.send(report(step))

    assert asyncio.run(received((1, 2), talk)) == [[1, 2], [3, 4, 5]]


def test_what_waits_goes_before_the_next_word_and_is_not_lost_at_the_end() -> None:
    async def talk(stream: ReconnectingStream, messages: list[list[int]]) -> None:
        stream.send(report(2), waits=True)
        await asyncio.sleep(0.2)
        assert messages == [[1]], "it went at once"
        stream.send(report(3))
        while len(messages) < 2:
            await asyncio.sleep(0.01)
        stream.send(report(4), waits=True)

    assert asyncio.run(received((1,), talk)) == [[1], [2, 3], [4]]


def test_a_message_that_is_kept_is_not_changed_by_what_follows_it() -> None:
    kept = report(2)

    async def talk(stream: ReconnectingStream, _: object) -> None:
        stream.send(kept)
        stream.send(report(3))

    assert asyncio.run(received((1,), talk)) == [[1], [2, 3]]
    assert not kept.then


def test_a_server_of_another_job_that_has_got_the_port_ends_nothing() -> None:
    """A killed coordinator's port is free, and another job's may be given it before this one is started again."""

    async def main() -> None:
        arrivals, met = asyncio.Queue[int](), asyncio.Event()

        async def join(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.read()
            await context.write(pb.Order(welcome=pb.Welcome(fencing=1)))
            arrivals.put_nowait(1)
            await context.read()

        async def take(_: pb.Order) -> None:
            met.set()

        server, port = await serve("127.0.0.1:0", COORDINATOR, SECURITY, join, pb.GroupReport)
        stream = ReconnectingStream(
            service=COORDINATOR,
            report=pb.GroupReport,
            security=SECURITY,
            find=lambda: f"127.0.0.1:{port}",
            greet=lambda: [report(1)],
            take=take,
            done=lambda: False,
            patience_s=10.0,
        )
        running = asyncio.create_task(stream.run(first_s=10.0, again_s=10.0))
        await met.wait()
        await arrivals.get()
        await server.stop(grace=0.0)
        stranger, _ = await serve(f"127.0.0.1:{port}", COORDINATOR, Security("another"), join, pb.GroupReport)
        while "token" not in stream.error and not running.done():
            await asyncio.sleep(0.01)
        await stranger.stop(grace=0.0)
        assert not running.done(), stream.refused
        again, _ = await serve(f"127.0.0.1:{port}", COORDINATOR, SECURITY, join, pb.GroupReport)
        await asyncio.wait_for(arrivals.get(), 10.0)
        stream.close()
        await running
        await again.stop(grace=0.0)

    asyncio.run(main())
