"""The page's server: one page, its events, logs, and the figures for Prometheus."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.resources import files

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.host_port import join_address
from spare_megatron.monitor.page.event_streams import STREAMS_MAX, EventStream, EventStreams
from spare_megatron.monitor.page.exposition import exposition
from spare_megatron.monitor.page.followed_run import FollowedRun
from spare_megatron.monitor.page.frame import Frame
from spare_megatron.monitor.page.listener import PageListener
from spare_megatron.monitor.page.log_files import end_of, group_logs, job_logs
from spare_megatron.monitor.page.page_door import HEADERS, closing, door
from spare_megatron.monitor.page.visitors import Visitors
from spare_megatron.runtime.descriptors import raise_descriptor_limit
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import glance

LOOK_S = 0.5
"""Time between two looks into a run directory."""
BEAT_S = 15.0
"""An event stream with nothing new says so that often, so that a reader that is gone is noticed."""
WRITE_S = 20.0
"""A reader that takes nothing for so long is gone."""
SCRIPTS = ("plots.js", "run.js", "page.js")


def page_text() -> tuple[str, str]:
    """The page, and what a browser may do with it: run its own script, and ask its own server."""
    static = files(__package__) / "static"
    style = (static / "page.css").read_text(encoding="utf-8")
    script = "".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS)
    text = (static / "page.html").read_text(encoding="utf-8").replace("STYLE", style, 1).replace("SCRIPT", script, 1)
    hashes = {kind: _hash(text, kind) for kind in ("style", "script")}
    policy = (
        f"default-src 'none'; connect-src 'self'; style-src '{hashes['style']}'; script-src '{hashes['script']}'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(text: str, kind: str) -> str:
    found = re.search(f"<{kind}>(.*)</{kind}>", text, re.DOTALL)
    assert found is not None
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()


class PageServer:
    """Answers for some runs."""

    def __init__(self, runs: Sequence[FollowedRun], token: str) -> None:
        self._runs = runs
        self._streams = EventStreams(self._whole)
        self.visitors = Visitors(_announce)
        self._page, self._policy = page_text()
        self.app = web.Application(middlewares=[door(token, self.visitors.let_in)])
        self.app.add_routes(
            [
                web.get("/", self._show),
                web.get("/events", self._events, allow_head=False),
                web.get("/metrics", self._metrics),
                web.get(r"/runs/{run:\d{1,4}}/groups/{group:\d{1,7}}", self._group),
                web.get(r"/runs/{run:\d{1,4}}/logs", self._log),
            ]
        )
        self.listener: PageListener | None = None
        self.app.on_shutdown.append(self._end_streams)
        self.app.on_cleanup.append(self._close_connections)

    def _whole(self) -> list[str]:
        first = json.dumps({"runs": [run.name for run in self._runs]})
        return [first, *(run.whole() for run in self._runs)]

    async def follow(self) -> None:
        """Follow the runs until cancelled; raises what a reader dies of. Readers are threads that may end with the
        process in the middle of a long journal."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        for run in self._runs:
            threading.Thread(target=self._read, args=(run, loop, ended), daemon=True).start()
        await ended

    def _read(self, run: FollowedRun, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                while not ended.done():
                    seen = run.look()
                    if seen is not None:
                        loop.call_soon_threadsafe(self._tell, run, seen)
                    time.sleep(LOOK_S)
            except Exception as error:
                loop.call_soon_threadsafe(ended.set_exception, error)

    def _tell(self, run: FollowedRun, seen: Frame) -> None:
        self._streams.tell(run.show(seen))

    async def _end_streams(self, _: web.Application) -> None:
        if self.listener is not None:
            await self.listener.stop()
        self._streams.tell(None)

    async def _close_connections(self, _: web.Application) -> None:
        await self.visitors.close()

    async def _show(self, _: web.Request) -> web.Response:
        headers = HEADERS | {"Content-Security-Policy": self._policy}
        return web.Response(text=self._page, content_type="text/html", charset="utf-8", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams.full:
            why = f"{STREAMS_MAX} event streams are open, and no more are served; close one\n"
            return closing(web.Response(status=503, text=why, headers=HEADERS))
        response = web.StreamResponse(headers=HEADERS | {hdrs.CONTENT_TYPE: "text/event-stream"})
        with self._streams.stream() as stream, contextlib.suppress(ConnectionError):
            await response.prepare(request)
            text: str | None = "retry: 1000\n\n"
            while text is not None:
                try:
                    await asyncio.wait_for(response.write(text.encode()), WRITE_S)
                except TimeoutError:
                    request.transport.abort()  # type: ignore[union-attr]
                    break
                text = await _next(stream)
        return response

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await asyncio.to_thread(exposition, self._runs)
        return web.Response(body=text, headers=HEADERS | {hdrs.CONTENT_TYPE: "text/plain; version=0.0.4"})

    async def _group(self, request: web.Request) -> web.Response:
        run, group = self._run(request), int(request.match_info["group"])
        return web.json_response(await asyncio.to_thread(_group_facts, run, group), headers=HEADERS)

    async def _log(self, request: web.Request) -> web.Response:
        run, name, group = self._run(request), request.query.get("name", ""), request.query.get("group", "")
        if group and not re.fullmatch(r"\d{1,7}", group, re.ASCII):
            raise web.HTTPNotFound
        return web.Response(text=await asyncio.to_thread(_log_end, run, group, name), headers=HEADERS)

    def _run(self, request: web.Request) -> FollowedRun:
        number = int(request.match_info["run"])
        if number >= len(self._runs):
            raise web.HTTPNotFound
        return self._runs[number]


async def _next(stream: EventStream) -> str | None:
    """The next event as a browser reads it; None at the end."""
    try:
        text = await asyncio.wait_for(stream.next(), BEAT_S)
    except TimeoutError:
        return "data: {}\n\n"
    return None if text is None else f"data: {text}\n\n"


def _group_facts(run: FollowedRun, group: int) -> dict[str, object]:
    listed = (glance(run.run_dir.processes) or {}).get("ranks", ())
    ranks = [rank for rank in listed if rank.get("group") == group]
    return {"ranks": ranks, "logs": list(group_logs(run.run_dir, group)), "job_logs": list(job_logs(run.run_dir))}


def _log_end(run: FollowedRun, group: str, name: str) -> str:
    logs = group_logs(run.run_dir, int(group)) if group else job_logs(run.run_dir)
    if name not in logs:
        raise web.HTTPNotFound
    try:
        return end_of(logs[name])
    except OSError as error:
        return f"{name} cannot be read: {words(error)}\n"


async def opened(server: PageServer, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve until the runner's cleanup; also the port. Raises ConfigError where the address cannot be had."""
    server_logger.addFilter(_is_ours)
    raise_descriptor_limit()
    runner = web.AppRunner(
        server.app, access_log=None, shutdown_timeout=2.0, keepalive_timeout=15.0, handler_cancellation=True
    )
    await runner.setup()
    assert runner.server is not None
    server.listener = PageListener(server.visitors, runner.server)
    try:
        taken = await server.listener.start(host, port)
    except OSError as error:
        await runner.cleanup()
        where = join_address(host, port)
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--listen {where} cannot be had: {words(error)}") from None
        free = next_free(host, port)
        other = f"; {join_address(host, free)} is free" if free else ""
        raise ConfigError(f"--listen {where} is in use by another process{other}") from None
    return runner, taken


def _announce(text: str) -> None:
    sys.stderr.write(f"spare-page: {text}\n")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of aiohttp's log is of an error of this program, and not of a request that is none: anybody can
    send many of these."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def next_free(host: str, port: int) -> int:
    """The next port above that is free now, among 100; 0: none."""
    for other in range(port + 1, min(port + 101, 1 << 16)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, other))
            except OSError:
                continue
            return other
    return 0
