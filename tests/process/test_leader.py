"""A real leader between a coordinator and ranks that the test plays, over real connections: nobody misses a commit."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.control import control_pb2 as pb
from spare_megatron.control import leader, protobuf_codec
from spare_megatron.control.channel import COORDINATOR, LEADER, Security, call_stream, open_channel, serve
from spare_megatron.control.run_directory import CoordinatorAddress, RunDirectory
from spare_megatron.control.session import Session
from spare_megatron.controller.messages import JobSpec, View

PATIENCE_S = 30.0
TOO_MUCH_BYTES = 16 << 20
"""More than a connection takes whose other end does not read."""
JOB = JobDescription(timeouts=dataclasses.replace(timeouts_from(2.0, 30.0), startup_timeout_s=PATIENCE_S))
SPEC = JobSpec(
    num_groups=1,
    pieces_per_shard=1,
    offsets=(0,),
    granularity="microbatch",
    first_step=0,
    last_step=9,
    min_groups=1,
    fingerprint=JOB.fingerprint,
    heartbeat_timeout_s=2.0,
)


class Coordinator:
    """Speaks as a coordinator would: the test says what."""

    def __init__(self, run_dir: RunDirectory, fencing: int) -> None:
        self._run_dir, self._fencing = run_dir, fencing
        self.hellos: asyncio.Queue[pb.Hello] = asyncio.Queue()
        self._orders: asyncio.Queue[pb.Order] = asyncio.Queue()

    async def start(self) -> None:
        """Listen, and say where in the run directory."""
        self._server, port = await serve(
            "127.0.0.1:0", COORDINATOR, Security(self._run_dir.token(create=True)), self._join, pb.GroupReport
        )
        address = CoordinatorAddress(f"127.0.0.1:{port}", self._fencing, 1, -1, 1, "here")
        self._run_dir.publish_coordinator(address)

    async def stop(self) -> None:
        """Close every stream."""
        await self._server.stop(grace=0)

    def send(self, **order: Any) -> None:
        """One order for the group."""
        self._orders.put_nowait(pb.Order(**order))

    async def _join(self, reports: Any, context: grpc.aio.ServicerContext) -> None:
        first = await context.read()
        self.hellos.put_nowait(first.arrival.hello)
        await context.write(pb.Order(welcome=pb.Welcome(fencing=self._fencing)))
        while True:
            await context.write(await self._orders.get())


class Rank:
    """One connection of a rank to its leader; reads only when it is asked to."""

    def __init__(self, run_dir: RunDirectory, position: int) -> None:
        self._run_dir, self._position = run_dir, position

    async def connect(self) -> None:
        """Arrive as a rank does."""
        while (address := self._run_dir.leader(0, 0)) is None:
            await asyncio.sleep(0.01)
        security = Security(self._run_dir.token())
        self._channel = open_channel(address, security, PATIENCE_S)
        self._call = call_stream(self._channel, LEADER, security, pb.RankReport)
        arrival = pb.RankArrival(group=0, position=self._position, fingerprint=SPEC.fingerprint)
        await self._call.write(pb.RankReport(arrival=arrival))

    async def read(self, kind: str) -> Any:
        """The next order of this kind."""
        while True:
            order = await asyncio.wait_for(self._call.read(), PATIENCE_S)
            if order.WhichOneof("kind") == kind:
                return getattr(order, kind)

    async def close(self) -> None:
        """Break the connection."""
        self._call.cancel()
        await self._channel.close()


class Group:
    """A leader, a rank at position 1 that has stopped reading, and one at position 2 that tells when a commit is out:
    the leader then waits for position 1."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self.run_dir = run_dir
        self.coordinator = Coordinator(run_dir, fencing=1)
        self.stopped, self.witness = Rank(run_dir, 1), Rank(run_dir, 2)
        self.session: Session

    async def until_the_leader_waits(self) -> None:
        """Commit (1, 1) is out, the leader waits for the rank that does not read."""
        await self.coordinator.start()
        place = Place(
            group=0, position=0, num_groups=1, incarnation=0, run_dir=str(self.run_dir.path),
            launcher="spare-launch", group_size=3, life=1, launcher_pid=0, tls_dir="",
        )  # fmt: skip
        opening = asyncio.to_thread(Session.open, place, SPEC, JOB, last_applied=0)
        self.session, *_ = await asyncio.gather(opening, self.stopped.connect(), self.witness.connect())
        self.coordinator.send(view=view_order(fencing=1))
        await self.stopped.read("view")
        self.coordinator.send(save_accepted=pb.SaveAccepted(step=0, directory="x" * TOO_MUCH_BYTES))
        self.coordinator.send(commit=pb.Commit(step=1, epoch=1))
        await self.witness.read("commit")

    async def close(self) -> None:
        """Leave nothing behind: another coordinator ends the leader's wait, and the job."""
        last = Coordinator(self.run_dir, fencing=9)
        await last.start()
        last.send(stop=pb.Stop(outcome="finished", reason="the test is over"))
        await asyncio.gather(self.stopped.close(), self.witness.close())
        await asyncio.to_thread(self.session.close)
        await asyncio.gather(self.coordinator.stop(), last.stop())


def view_order(fencing: int) -> pb.View:
    """Epoch 1, nothing committed yet."""
    order = pb.View()
    view = View(
        group=0, incarnation=0, epoch=1, fencing=fencing, live=((0, 0),), committed=(0, 0), step=1,
        segments=((0,),), standing=(0,), donors=(),
    )  # fmt: skip
    protobuf_codec.fill(order, view)
    return order


def run(main: Coroutine[Any, Any, None]) -> None:
    """With a limit on the whole."""

    async def limited() -> None:
        await asyncio.wait_for(main, 2 * PATIENCE_S)

    asyncio.run(limited())


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """The wait for other ranks, in which things happen here, is made so long that they surely do."""
    monkeypatch.setattr(leader, "PASS_ON_S", PATIENCE_S)
    return RunDirectory(tmp_path)


def test_a_rank_that_reconnects_while_a_commit_is_passed_on_is_told_of_it(run_dir: RunDirectory) -> None:
    async def main() -> None:
        group, back = Group(run_dir), Rank(run_dir, 1)
        try:
            await group.until_the_leader_waits()
            assert group.session.orders.view.committed == (0, 0), "the leader's own training thread comes last"
            await back.connect()
            view = await back.read("view")
            assert (list(view.committed.values), view.step) == ([1, 1], 2)
        finally:
            await back.close()
            await group.close()

    run(main())


def test_a_leader_that_moves_while_a_commit_is_passed_on_keeps_it(run_dir: RunDirectory) -> None:
    async def main() -> None:
        group, second = Group(run_dir), Coordinator(run_dir, fencing=2)
        try:
            await group.until_the_leader_waits()
            await second.start()
            hello = await asyncio.wait_for(second.hellos.get(), PATIENCE_S)
            assert (hello.last_applied, list(hello.committed.values)) == (0, [1, 1])
            assert group.session.orders.view.committed == (1, 1)
        finally:
            await group.close()
            await second.stop()

    run(main())
