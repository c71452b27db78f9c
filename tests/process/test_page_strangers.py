"""Who connects to spare-page and asks nothing: bounded in number and time, said once, and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spare_megatron.monitor.page.listener import ACCEPT_AGAIN_S, PageListener
from spare_megatron.monitor.page.page_server import PageServer, opened
from spare_megatron.monitor.page.visitors import CROWD_MAX, HEAD_S, KNOWN_MAX, Visitors
from tests.process.page_process import PageProcess
from tests.pure.scripted_job import ScriptedJob
from tests.pure.written_job import Written

IDLE = 1200


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("a secret of a page")
    return tmp_path / "token"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    made = Written(tmp_path / "run", ScriptedJob())
    made.job.step()
    made.go_on()
    return made.dir.path


@contextlib.contextmanager
def connected(port: int, number: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections, each of which has sent ``first`` and says no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * IDLE)), hard))
    made: list[socket.socket] = []
    try:
        for _ in range(number):
            one = socket.create_connection(("127.0.0.1", port), timeout=5)
            made.append(one)
            with contextlib.suppress(ConnectionError):
                one.sendall(first)
        yield made
    finally:
        for one in made:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_ones(page: PageProcess) -> int:
    return sum(one.status == "ESTABLISHED" for one in psutil.Process(page.process.pid).net_connections("tcp"))


def ended(page: PageProcess) -> str:
    """What it has said on standard error, at its end."""
    page.process.terminate()
    return page.process.communicate(timeout=20)[1]


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "half a head"])
def test_many_idle_connections_are_bounded_and_said_once(run_dir: Path, token_file: Path, first: bytes) -> None:
    page = PageProcess(run_dir, token_file=token_file)
    resource.prlimit(page.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    with connected(page.port, IDLE, first):
        assert page.ask("/")[0] == 200
        assert open_ones(page) <= CROWD_MAX + 1
        assert page.ask("/metrics")[0] == 200
        began_s = time.monotonic()
        while open_ones(page) > 0:
            assert time.monotonic() - began_s < HEAD_S + 5, "they were not closed"
            time.sleep(0.2)
    reported = ended(page)
    assert re.fullmatch(r"spare-page: more than 64 connections have asked for nothing: .*\(said once\)\n", reported), (
        reported
    )


def test_who_has_asked_stays_while_strangers_come(run_dir: Path, token_file: Path) -> None:
    page = PageProcess(run_dir, token_file=token_file)
    known = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    known.request("GET", "/events", headers={"Authorization": f"Bearer {page.token}"})
    answer = known.getresponse()
    assert answer.status == 200
    with connected(page.port, IDLE):
        time.sleep(HEAD_S + 1)
        assert answer.fp is not None
        known.sock.settimeout(20)
        assert answer.fp.readline()
    known.close()
    answer.close()
    assert "Traceback" not in ended(page)


def test_without_descriptors_it_says_so_once(run_dir: Path, token_file: Path) -> None:
    page = PageProcess(run_dir, token_file=token_file)
    used = psutil.Process(page.process.pid).num_fds()
    resource.prlimit(page.process.pid, resource.RLIMIT_NOFILE, (used + 20, used + 20))
    with connected(page.port, 100):
        time.sleep(3)
    reported = ended(page)
    assert re.fullmatch(
        r"spare-page: connections cannot be accepted now: Too many open files; .*\(said once\)\n", reported
    )


@pytest.mark.filterwarnings("error")
def test_a_listener_that_is_stopped_during_a_shortage_does_not_accept_again() -> None:
    reported: list[str] = []

    async def stopped_meanwhile() -> list[dict[str, object]]:
        loop, wrong = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        listener = PageListener(Visitors(reported.append), asyncio.Protocol)
        port = await listener.start("127.0.0.1", 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                await asyncio.sleep(0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await listener.stop()
        await asyncio.sleep(ACCEPT_AGAIN_S + 0.1)
        return wrong

    assert asyncio.run(stopped_meanwhile()) == []
    assert len(reported) == 1
    assert reported[0].startswith("connections cannot be accepted now: Too many open files")


@pytest.mark.parametrize("passes", range(6))
@pytest.mark.filterwarnings("error")
def test_connections_that_come_as_the_server_ends_are_closed(passes: int, recwarn: pytest.WarningsRecorder) -> None:
    """A connection is accepted in several passes of the event loop, and the server may be closed between any two."""
    made: list[socket.socket] = []

    async def closed_meanwhile() -> None:
        runner, port = await opened(PageServer([], ""), "127.0.0.1", 0)
        made.extend(socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(20))
        for _ in range(passes):
            await asyncio.sleep(0)
        await runner.cleanup()

    asyncio.run(closed_meanwhile())
    gc.collect()
    assert [str(one.message) for one in recwarn] == []
    for one in made:
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
        one.close()


def test_connections_that_were_let_in_are_bounded(run_dir: Path, token_file: Path) -> None:
    page = PageProcess(run_dir, token_file=token_file)
    request = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode()
    answers = []
    with connected(page.port, 0) as made:
        for _ in range(KNOWN_MAX + 3):
            made.append(socket.create_connection(("127.0.0.1", page.port), timeout=10))
            made[-1].sendall(request)
            answers.append(made[-1].recv(12).decode())
    assert answers == ["HTTP/1.1 200"] * KNOWN_MAX + ["HTTP/1.1 503"] * 3
    assert f"{KNOWN_MAX} connections are open, and no more are served" in ended(page)
