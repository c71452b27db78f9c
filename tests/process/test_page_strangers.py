"""Who connects to spare-page and asks nothing: bounded in number and time, said once, and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spare_megatron.monitor.page.visitors import CROWD_MAX, HEAD_S, KNOWN_MAX, Visitors
from tests.process.page_process import PageProcess
from tests.pure.told_job import ToldJob
from tests.pure.written_job import Written

IDLE = 1200


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("a secret of a page")
    return tmp_path / "token"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    made = Written(tmp_path / "run", ToldJob())
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
    said = ended(page)
    assert re.fullmatch(r"spare-page: more than 64 connections have asked for nothing: .*\(said once\)\n", said), said


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
    said = ended(page)
    assert re.fullmatch(r"spare-page: connections cannot be accepted now: Too many open files; .*\(said once\)\n", said)


def test_a_server_that_is_closed_during_a_shortage_ends_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tries to accept again a second after it had no descriptor, and the socket may be closed by then."""
    said: list[str] = []

    async def closed_meanwhile() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(Visitors(said.append).loop_failed)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.close()
        loop.call_soon(loop._start_serving, asyncio.Protocol, listener)  # type: ignore[attr-defined]
        loop.call_soon(int, "no number")
        await asyncio.sleep(0.05)

    asyncio.run(closed_meanwhile())
    assert said == []
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
    assert "no number" in caplog.text
    assert "file descriptor" not in caplog.text


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
