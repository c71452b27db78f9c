"""Runs spare-page as a process of its own, and looks on as a browser does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.process.harness import ROOT


class PageProcess:
    """A spare-page that runs until the context ends."""

    def __init__(self, *run_dirs: Path, token_file: Path | None = None, port: int = 0) -> None:
        words = [*map(str, run_dirs), "--listen", f"127.0.0.1:{port}"]
        words += ["--token-file", str(token_file)] if token_file else []
        self.token = token_file.read_text().strip() if token_file else ""
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "spare_megatron.cli.page", *words],
            cwd=ROOT,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        reported = self.process.stdout.readline()
        found = re.match(r"spare-page: http://127\.0\.0\.1:(\d+)/", reported)
        assert found, reported + self.process.communicate()[1]
        self.port = int(found[1])

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """Ends at SIGTERM at once, and without a message on standard error but of crowds that have come."""
        self.process.send_signal(signal.SIGTERM)
        try:
            _, errors = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        if kind is None:
            errors = "".join(line for line in errors.splitlines(True) if not line.endswith("(said once)\n"))
            assert (self.process.returncode, errors) in ((0, ""), (-signal.SIGKILL, "")), errors

    @property
    def url(self) -> str:
        """What a browser is given."""
        return f"http://127.0.0.1:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def ask(self, path: str, token: str | None = None, method: str = "GET") -> tuple[int, str]:
        """(status, text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(
                method, path, headers={"Authorization": f"Bearer {self.token if token is None else token}"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def cpu_s(self) -> float:
        """CPU time so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def resident_mb(self) -> float:
        """Its memory now."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


@dataclass
class Onlooker:
    """Reads the events of a page from a thread."""

    page: PageProcess
    seen: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """(when it came, seconds since 1970; event)."""

    def __post_init__(self) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", self.page.port, timeout=60)
        self._connection.request("GET", "/events", headers={"Authorization": f"Bearer {self.page.token}"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    self.seen.append((time.time(), json.loads(line[6:])))
        except (OSError, http.client.HTTPException, ValueError):
            return

    def join(self) -> None:
        """Until the page has ended the stream."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.close()

    def close(self) -> None:
        """Look on no longer."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._answer.close()
        self._connection.close()

    def cells(self, group: int, states: Sequence[str]) -> list[float]:
        """When it was notified that the group has come to one of these states."""
        found = [(at_s, event.get("cells", {}).get(str(group))) for at_s, event in list(self.seen)]
        return [at_s for at_s, cell in found if cell and cell[0] in states]

    def reported(self, kind: str) -> list[dict[str, Any]]:
        """The last that was said of each happening of a kind."""
        reported: list[dict[str, Any]] = []
        for _, event in list(self.seen):
            if "told" in event:
                reported = reported[: event["told"]["from"]] + event["told"]["list"]
        return [one for one in reported if one["kind"] == kind]
