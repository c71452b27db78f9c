"""What the page's server answers, and to whom."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from spare_megatron.cli import page
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.process import serve_alone
from spare_megatron.coordinator.server import Options
from spare_megatron.monitor.page.followed_run import FollowedRun
from spare_megatron.monitor.page.log_files import END_BYTES, end_of, group_logs, job_logs
from spare_megatron.monitor.page.page_door import listen_address, read_token
from spare_megatron.monitor.page.page_server import PageServer, opened, page_text
from spare_megatron.runtime.run_directory import RunDirectory, write_json
from tests.pure.scripted_job import ScriptedJob
from tests.pure.written_job import Written

TOKEN = "a secret of a page"


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A run directory with logs, links and things that are no logs."""
    (tmp_path / "run").mkdir()
    made = Written(tmp_path / "run", ScriptedJob())
    made.job.step()
    made.go_on()
    run_dir, outside = made.dir, tmp_path / "outside.log"
    outside.write_text("secret")
    (run_dir.path / "token").write_text("secret")
    folder = run_dir.log_of(3, 0).parent
    folder.mkdir(parents=True)
    for position in (0, 1, 10):
        run_dir.log_of(3, position).write_text(f"rank {position}\n")
    run_dir.log_of(3, 0, 2).write_text("again\n")
    run_dir.coordinator_log.write_text("spare: job attempt 1\n")
    (folder / "rank-2.log").symlink_to(outside)
    (folder / "rank-4.log").symlink_to("rank-4.log")
    (folder / "rank-5.log").mkdir()
    (folder / "notes.txt").write_text("secret")
    (run_dir.logs / "tasks").mkdir()
    (run_dir.logs / "tasks" / "7.log").write_text("under Slurm\n")
    (folder / "rank-7.log").symlink_to(run_dir.logs / "tasks" / "7.log")
    rank = {"group": 3, "position": 0, "incarnation": 2, "pid": 12, "host": "here"}
    write_json(run_dir.processes, {"coordinator": {"pid": 1}, "ranks": [rank, {**rank, "group": 1}]})
    return made


def asked(written: Written, ask: Callable[[aiohttp.ClientSession, URL], Awaitable[None]], token: str = "") -> None:
    """Serve the run while ``ask`` asks."""

    async def serve() -> None:
        run = FollowedRun(0, "run", written.dir)
        seen = run.look()
        assert seen is not None
        run.show(seen)
        runner, port = await opened(PageServer([run], token), "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as session:
                await ask(session, URL(f"http://127.0.0.1:{port}/"))
        finally:
            await runner.cleanup()

    asyncio.run(serve())


async def answer(session: aiohttp.ClientSession, url: URL, **how: dict[str, str]) -> tuple[int, str]:
    async with session.get(url, **how) as response:  # type: ignore[arg-type]
        return response.status, await response.text()


def test_logs_are_those_that_the_directory_lists(written: Written) -> None:
    names = ["rank-0.incarnation-2.log", "rank-0.log", "rank-1.log", "rank-7.log", "rank-10.log"]
    assert list(group_logs(written.dir, 3)) == names
    assert group_logs(written.dir, 4) == {}
    assert list(job_logs(written.dir)) == ["coordinator.log"]


def test_the_end_of_a_log_begins_with_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * END_BYTES + b"\nlast\xff\n")
    assert end_of(log) == "last\N{REPLACEMENT CHARACTER}\n"
    log.write_text("all\n")
    assert end_of(log) == "all\n"


def test_a_group_and_its_logs(written: Written) -> None:
    async def ask(session: aiohttp.ClientSession, url: URL) -> None:
        status, text = await answer(session, url / "runs/0/groups/3")
        facts = json.loads(text)
        assert (status, [rank["pid"] for rank in facts["ranks"]], facts["job_logs"]) == (200, [12], ["coordinator.log"])
        logs = url / "runs/0/logs"
        assert await answer(session, logs % {"group": "3", "name": "rank-7.log"}) == (200, "under Slurm\n")
        assert await answer(session, logs % {"name": "coordinator.log"}) == (200, "spare: job attempt 1\n")
        assert facts["logs"] == list(group_logs(written.dir, 3))

    asked(written, ask)


WRONG = (
    "runs/0/logs?group=3&name=rank-2.log",
    "runs/0/logs?group=3&name=rank-5.log",
    "runs/0/logs?group=3&name=notes.txt",
    "runs/0/logs?group=3&name=../../token",
    "runs/0/logs?group=3&name=..%2F..%2Ftoken",
    "runs/0/logs?group=3&name=",
    "runs/0/logs?group=..&name=token",
    "runs/0/logs?group=%2e%2e&name=token",
    "runs/0/logs?group=%D9%A3&name=rank-0.log",
    "runs/0/logs?name=token",
    "runs/0/logs?name=../token",
    "runs/0/logs?name=%2Fetc%2Fpasswd",
    "runs/0/logs",
    "runs/1/logs?name=coordinator.log",
    "runs/-1/logs?name=coordinator.log",
    "runs/0/../token",
    "runs/0/..%2ftoken",
    "../token",
    "..%2f..%2fetc/passwd",
    "static/page.js",
    "token",
)


def test_nothing_else_is_served(written: Written) -> None:
    async def ask(session: aiohttp.ClientSession, url: URL) -> None:
        for path in WRONG:
            found = await answer(session, URL(f"{url}{path}", encoded=True))
            assert found == (404, "there is no such page\n"), path

    asked(written, ask)


def test_only_get_and_only_with_the_token(written: Written) -> None:
    async def ask(session: aiohttp.ClientSession, url: URL) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            async with session.request(method, url % {"token": TOKEN}) as response:
                assert response.status == 405, method
        right, wrong = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer no"}
        for path in ("", "events", "metrics", "runs/0/groups/3", "runs/0/logs", "nowhere"):
            for refused in ({}, {"headers": wrong}, {"params": {"token": TOKEN[:-1]}}, {"params": {"token": "ÿ"}}):
                assert (await answer(session, url / path, **refused))[0] == 401, (path, refused)
        for allowed in ({"headers": right}, {"params": {"token": TOKEN}}):
            assert (await answer(session, url / "metrics", **allowed))[0] == 200
        assert (await answer(session, url / "metrics", headers={**right, "Host": "elsewhere.example"}))[0] == 200

    asked(written, ask, TOKEN)


def test_without_a_token_another_name_of_this_machine_is_refused(written: Written) -> None:
    """A page from elsewhere whose name was given the address 127.0.0.1."""

    async def ask(session: aiohttp.ClientSession, url: URL) -> None:
        for host, status in (
            ("attacker.example", 403),
            ("attacker.example:80", 403),
            ("localhost:9", 200),
            ("[::1]", 200),
        ):
            assert (await answer(session, url / "metrics", headers={"Host": host}))[0] == status, host

    asked(written, ask)


def test_the_page_needs_nothing_else(written: Written) -> None:
    text, policy = page_text()
    assert "STYLE" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:,)", text)
    assert not re.search(r"https?://", text)
    assert "'unsafe" not in policy

    async def ask(session: aiohttp.ClientSession, url: URL) -> None:
        async with session.get(url) as response:
            assert response.headers["Content-Security-Policy"] == policy
            assert response.headers["Cache-Control"] == "no-store"
            assert await response.text() == text

    asked(written, ask)


@pytest.mark.parametrize("listen", ["8080", "localhost:", "localhost:x", "127.0.0.1:99999", ":8080", "::1:8080"])
def test_an_address_that_is_none_is_one_sentence(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        listen_address(listen, "")
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        serve_alone(Options(listen=listen, run_dir=RunDirectory(tmp_path / "run"), job_attempt=1))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "node7"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="so give --token-file too"):
        listen_address(f"{host}:80", "")
    assert listen_address(f"{host}:80", TOKEN) == (host.strip("[]"), 80)


def test_loopback_addresses_need_none() -> None:
    assert [listen_address(f"{host}:0", "") for host in ("localhost", "127.0.0.2", "[::1]")] == [
        ("localhost", 0),
        ("127.0.0.2", 0),
        ("::1", 0),
    ]


def test_a_token_file_has_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(file)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 characters; a token has at least 16"):
        read_token(file)
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN
    assert read_token(None) == ""


def test_a_port_in_use_is_one_sentence_with_a_free_one(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert page.main([str(written.dir.path), "--listen", f"127.0.0.1:{port}"]) == ExitCode.BAD_INPUT
    reported = capsys.readouterr()
    words = re.escape(f"spare-page: --listen 127.0.0.1:{port} is in use by another process; 127.0.0.1:")
    found = re.fullmatch(words + r"(\d+) is free\n", reported.err)
    assert found, reported.err
    assert port < int(found[1]) <= port + 100
    assert reported.out == ""


def test_a_directory_of_no_job_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main([str(tmp_path)]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        f"spare-page: {tmp_path} has no status.json and no journal.jsonl; give the --run-dir of a job that has been "
        "started\n"
    )
