"""Large requests without the token: a server refuses them before it reads them, so they cost it no memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import COORDINATOR, TOKEN_KEY
from tests.process.harness import ROOT

TOKEN, REQUEST_MB, AT_ONCE = "the token of the job", 60, 16
SERVER = f"""
import asyncio
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import COORDINATOR, Security, serve
async def join(reports, context):
    async for _ in reports:
        pass
async def done(request, context):
    return pb.Done(opened=True)
async def run():
    unary = {{"RequestStop": (pb.StopRequest, done)}}
    server, port = await serve("127.0.0.1:0", COORDINATOR, Security({TOKEN!r}), join, pb.GroupReport, unary)
    print(port, flush=True)
    await server.wait_for_termination()
asyncio.run(run())
"""


@pytest.fixture
def server() -> Iterator[tuple[psutil.Process, int]]:
    """A process with a server of control.proto, as coordinators and leaders have it, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield psutil.Process(process.pid), int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def call(port: int, method: str, request: bytes, token: str = "") -> grpc.StatusCode:
    """The answer to one request, of which the caller says what it likes."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    metadata = ((TOKEN_KEY, token),) if token else ()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            if method == "Join":
                stream = channel.stream_stream(f"/{COORDINATOR}/Join")(iter([request]), metadata=metadata, timeout=60)
                with contextlib.suppress(StopIteration):
                    next(stream)
                return stream.code()  # type: ignore[no-any-return]
            channel.unary_unary(f"/{COORDINATOR}/{method}")(request, metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_a_request_with_the_token_is_answered(server: tuple[psutil.Process, int]) -> None:
    request = pb.StopRequest(reason="x" * (1 << 20)).SerializeToString()
    assert call(server[1], "RequestStop", request, TOKEN) is grpc.StatusCode.OK
    assert call(server[1], "RequestStop", request, "another token") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["RequestStop", "Join", "Unknown"])
def test_large_requests_without_the_token_cost_no_memory(server: tuple[psutil.Process, int], method: str) -> None:
    process, port = server
    assert call(port, method, b"") is grpc.StatusCode.UNAUTHENTICATED
    before_mb = process.memory_info().rss / 1e6
    request, answers, most_mb = bytes(REQUEST_MB * 1_000_000), list[grpc.StatusCode](), before_mb
    callers = [
        threading.Thread(target=lambda: answers.append(call(port, method, request)), daemon=True)
        for _ in range(AT_ONCE)
    ]
    for one in callers:
        one.start()
    while any(one.is_alive() for one in callers):
        most_mb = max(most_mb, process.memory_info().rss / 1e6)
        time.sleep(0.005)
    after_mb = process.memory_info().rss / 1e6
    print(f"{method}: {before_mb:.0f} MB before, {most_mb:.0f} MB at most, {after_mb:.0f} MB after")
    assert answers == [grpc.StatusCode.UNAUTHENTICATED] * AT_ONCE
    assert most_mb - before_mb < REQUEST_MB / 2
