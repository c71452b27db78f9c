"""The process of a group's leader: between a coordinator and ranks that the test plays, over real connections, nobody
misses a commit; in real jobs it and position 0 live and die together."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.channel import COORDINATOR, LEADER, Security, call_stream, open_channel, serve
from spare_megatron.control_plane.control_thread import Agent, RankSetup
from spare_megatron.control_plane.leader_process import FirstFollower, NoTraining, setup_from_json, setup_to_json
from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.messages import JobSpec, Lost
from spare_megatron.protocol.view import View
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory
from tests.process.control_job import ControlJob

PATIENCE_S, STEPS = 30.0, 80
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


PLACE = Place(
    group=0, position=0, num_groups=1, incarnation=0, run_dir="", launcher="spare-launch", group_size=3, job_attempt=1,
    launcher_pid=0, tls_dir="",
)  # fmt: skip


class Group:
    """A session at position 0 with its leader, a rank at position 1 that has stopped reading, and one at position 2."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self.run_dir = run_dir
        self.coordinator = Coordinator(run_dir, fencing=1)
        self.stopped, self.check_vector = Rank(run_dir, 1), Rank(run_dir, 2)
        self.session: Session

    async def commit(self) -> None:
        """Commit (1, 1) comes to everybody who reads."""
        await self.coordinator.start()
        place = dataclasses.replace(PLACE, run_dir=str(self.run_dir.path))
        opening = asyncio.to_thread(Session.open, place, SPEC, JOB, last_applied=0)
        self.session, *_ = await asyncio.gather(opening, self.stopped.connect(), self.check_vector.connect())
        self.coordinator.send(view=view_order(fencing=1))
        await self.stopped.read("view")
        self.coordinator.send(save_accepted=pb.SaveAccepted(step=0, directory="x" * TOO_MUCH_BYTES))
        self.coordinator.send(commit=pb.Commit(step=1, epoch=1))
        await self.check_vector.read("commit")
        while self.session.orders.view.committed != (1, 1):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Leave nothing behind: another coordinator ends the leader's wait, and the job."""
        last = Coordinator(self.run_dir, fencing=9)
        await last.start()
        last.send(stop=pb.Stop(outcome="finished", reason="the test is over"))
        await asyncio.gather(self.stopped.close(), self.check_vector.close())
        await asyncio.to_thread(self.session.close)
        await asyncio.gather(self.coordinator.stop(), last.stop())


def view_order(fencing: int) -> pb.View:
    """Epoch 1, nothing committed yet."""
    order = pb.View()
    view = View(
        group=0, incarnation=0, epoch=1, fencing=fencing, live=((0, 0),), committed=(0, 0), step=1,
        segments=((0,),), standing=(0,),
    )  # fmt: skip
    protobuf_codec.fill(order, view)
    return order


def run(main: Coroutine[Any, Any, None]) -> None:
    """With a limit on the whole."""

    async def limited() -> None:
        await asyncio.wait_for(main, 2 * PATIENCE_S)

    asyncio.run(limited())


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """An empty one."""
    return RunDirectory(tmp_path)


def test_a_rank_that_does_not_read_holds_nobody_up_and_is_notified_when_it_comes_back(run_dir: RunDirectory) -> None:
    async def main() -> None:
        group, back = Group(run_dir), Rank(run_dir, 1)
        try:
            await group.commit()
            await back.connect()
            view = await back.read("view")
            assert (list(view.committed.values), view.step) == ([1, 1], 2)
        finally:
            await back.close()
            await group.close()

    run(main())


def test_a_leader_that_moves_to_another_coordinator_keeps_a_commit(run_dir: RunDirectory) -> None:
    async def main() -> None:
        group, second = Group(run_dir), Coordinator(run_dir, fencing=2)
        try:
            await group.commit()
            await second.start()
            hello = await asyncio.wait_for(second.hellos.get(), PATIENCE_S)
            assert (hello.last_applied, list(hello.committed.values)) == (0, [1, 1])
        finally:
            await group.close()
            await second.stop()

    run(main())


def test_nothing_of_a_leader_is_left_however_often_its_position_0_is_cancelled(run_dir: RunDirectory) -> None:
    run_dir.token(create=True)
    setup = RankSetup(
        group=0, incarnation=0, position=0, group_size=3, run_dir=run_dir, spec=SPEC, job=JOB, last_applied=0
    )  # fmt: skip

    async def main() -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(FirstFollower(Agent(setup, NoTraining(), opened)).run())
        while run_dir.leader(0, 0) is None:
            await asyncio.sleep(0.01)
        while not serving.done():
            serving.cancel()
            await asyncio.sleep(0)
        assert leaders() == []

    run(main())
    gc.collect()  # warns of what was left open


def test_ranks_that_do_not_come_are_one_sentence(run_dir: RunDirectory) -> None:
    run_dir.token(create=True)
    place = dataclasses.replace(PLACE, run_dir=str(run_dir.path))
    times = dataclasses.replace(JOB.timeouts, startup_timeout_s=6.0)
    with pytest.raises(ConfigError, match="1 of 3 ranks of group 0 came within 6 s; see their logs"):
        Session.open(place, SPEC, dataclasses.replace(JOB, timeouts=times), last_applied=0)
    assert leaders() == []
    gc.collect()  # warns of what was left open


def test_a_leader_is_given_what_position_0_knows(run_dir: RunDirectory) -> None:
    setup = RankSetup(
        group=2, incarnation=1, position=0, group_size=3, run_dir=run_dir, spec=SPEC, job=JOB, last_applied=7,
        coordinator="here:1", address="here:2", tls_dir="tls", launcher_pid=1,
    )  # fmt: skip
    reported = setup_from_json(setup_to_json(setup))
    assert reported.run_dir.path == run_dir.path
    assert reported == dataclasses.replace(setup, run_dir=reported.run_dir, launcher_pid=os.getpid())


def leaders(pid: int | None = None) -> list[psutil.Process]:
    """The leader's process that a process has started; of this process by default."""
    return [child for child in psutil.Process(pid).children() if "leader_process" in " ".join(child.cmdline())]


def gone(process: psutil.Process) -> bool:
    """Whether it has ended; nobody may have waited for it yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ControlJob]:
    """Four groups of two ranks, of which any can go on alone; they have committed a few steps. The ranks are new
    processes, and start their leaders in their control threads: a forked one forks its leader."""
    made = ControlJob(tmp_path, 4, 2, f"--piece-s 0.01 --steps {STEPS} --offsets 0,1,2,3")
    made.under = ("env",)
    try:
        made.start()
        made.until(lambda: made.committed() >= 5)
        yield made
    finally:
        made.close()


def losses(one: ControlJob) -> list[tuple[int, str]]:
    """Group and cause of each."""
    events = (record.event for record in one.records())
    return [(loss.group, loss.cause) for event in events if isinstance(event, Lost) for loss in event.losses]


def test_a_leader_and_position_0_live_and_die_together(job: ControlJob) -> None:
    """One leader is killed, the position 0 of another one, and a third leader stands still; before that all get the
    signals that mean position 0, which they ignore, and those that are left end with the session."""
    of_groups = [leaders(job.ranks[group, 0].pid) for group in range(4)]
    assert [len(found) for found in of_groups] == [1] * 4
    all_leaders = [leader for [leader] in of_groups]
    for leader in all_leaders:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            leader.send_signal(number)

    all_leaders[1].kill()
    assert job.ranks[1, 0].wait(10) == 1
    assert "the process of this group's leader has ended" in job.output("rank-1-0-0")
    job.until(lambda: losses(job) == [(1, "closed")])

    job.kill(2, 0)
    job.until(lambda: gone(all_leaders[2]), 5.0)
    job.until(lambda: losses(job) == [(1, "closed"), (2, "closed")])

    all_leaders[3].send_signal(signal.SIGSTOP)
    assert job.finish() == ExitCode.FINISHED
    assert losses(job) == [(1, "closed"), (2, "closed"), (3, "silent")]
    job.kill(3, 0)
    job.until(lambda: gone(all_leaders[3]), 5.0)

    exits = job.exits()
    assert [exits[group, 1] for group in (1, 2)] == [ExitCode.FENCED] * 2, "the rest of the group is notified"
    assert {exits[0, position] for position in range(2)} == {ExitCode.FINISHED}
    assert all(map(gone, all_leaders))
    job.check_steps(STEPS)
