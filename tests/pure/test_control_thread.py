"""What becomes of a rank whose control thread cannot go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.control_thread import Agent, ControlThread, RankSetup
from spare_megatron.control_plane.reports import StopRequest
from spare_megatron.protocol.member import Orders
from spare_megatron.runtime.run_directory import RunDirectory


class _Training:
    """The session of a training thread."""

    def __init__(self) -> None:
        self.fenced = ""

    def publish(self, orders: Orders, newer_epoch: bool) -> None:
        self.fenced = orders.fenced or ""


class _Side:
    """Takes no report."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._over = agent, asyncio.Event()

    async def run(self) -> None:
        self._agent.take(pb.Order(welcome=pb.Welcome()))
        await self._over.wait()

    def post(self, report: object) -> None:
        raise ValueError("a report that is no text")

    def close(self) -> None:
        self._over.set()


def test_a_report_that_cannot_be_sent_ends_the_rank(tmp_path: Path) -> None:
    times = SimpleNamespace(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, grace_s=1.0)
    setup = SimpleNamespace(group=0, incarnation=0, position=0, run_dir=RunDirectory(tmp_path), launcher_pid=0)
    setup.job = SimpleNamespace(timeouts=times)
    session = _Training()
    thread = ControlThread(cast(RankSetup, setup), cast(Any, session), cast(Any, _Side))
    thread.start()
    thread.post(StopRequest("signal"))
    thread._thread.join(10.0)
    assert session.fenced == "the control thread failed: ValueError('a report that is no text')"
