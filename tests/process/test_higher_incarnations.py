"""Higher incarnations that the machine does not let in, or lets in late: the one that is there is watched meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from spare_megatron.config.exits import SIGNAL_REASON, ExitCode
from spare_megatron.config.job import JobDescription
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import COORDINATOR, Security, call_once, call_stream, open_channel
from spare_megatron.coordinator.journal import read
from spare_megatron.protocol.codec import encode
from spare_megatron.protocol.messages import Hello, Lost, Opened, StopRequested
from spare_megatron.runtime.failpoints import VARIABLE
from spare_megatron.runtime.run_directory import RunDirectory
from tests.process.control_job import ControlJob


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ControlJob]:
    """A job of two groups whose journal fails while the file ``failing`` is there."""
    one = ControlJob(tmp_path, 2, 1, "--steps 150 --piece-s 0.005 --heartbeat-timeout-s 2")
    one.environment[VARIABLE] = f"coordinator:journal.sync=ENOSPC,while={tmp_path / 'failing'}"
    yield one
    one.close()


class Leader:
    """A leader of group 0 without ranks."""

    def __init__(self, run_dir: RunDirectory, incarnation: int, last_applied: int = 0) -> None:
        self.run_dir, self.incarnation, self.last_applied = run_dir, incarnation, last_applied

    async def arrive(self) -> None:
        """Say Hello to the coordinator."""
        known = self.run_dir.coordinator()
        assert known is not None
        opened = next(record.event for record in read(self.run_dir.journal) if isinstance(record.event, Opened))
        security = Security(self.run_dir.token())
        self._channel = open_channel(known.address, security, 5.0)
        self._call = call_stream(self._channel, COORDINATOR, security, pb.GroupReport)
        hello = pb.Hello(
            group=0,
            incarnation=self.incarnation,
            fingerprint=opened.spec.fingerprint,
            last_applied=self.last_applied,
            process_nonce=f"incarnation {self.incarnation}",
        )
        spec, job = json.dumps(encode(opened.spec)), json.dumps(encode(JobDescription()))
        arrival = pb.Arrival(hello=hello, ranks=1, spec_json=spec, job_json=job, addresses=[""], serving_at=[""])
        await self._call.write(pb.GroupReport(arrival=arrival))

    async def receive(self, kind: str) -> Any:
        """The next order of this kind."""
        while (order := await asyncio.wait_for(self._call.read(), 10.0)) is not grpc.aio.EOF:
            if order.WhichOneof("kind") == kind:
                return getattr(order, kind)
        raise AssertionError(f"incarnation {self.incarnation} learns of no {kind}")

    async def leave(self) -> None:
        """Break the connection."""
        self._call.cancel()
        await self._channel.close()


def _losses(job: ControlJob) -> list[tuple[int, int, str]]:
    losses = [loss for record in job.records() if isinstance(record.event, Lost) for loss in record.event.losses]
    return [(loss.group, loss.incarnation, loss.cause) for loss in losses]


def test_one_that_is_refused_does_not_end_the_watch_of_the_one_that_is_there(job: ControlJob) -> None:
    job.start_coordinator()
    job.start_group(0)
    job.until(lambda: any(isinstance(record.event, Hello) for record in job.records()))

    async def refused() -> str:
        other = Leader(job.run_dir, 1, last_applied=5)
        await other.arrive()
        reason = (await other.receive("fenced")).reason
        await other.leave()
        return str(reason)

    assert asyncio.run(refused()) == "group 0 starts from step 5, the job from step 0"
    job.kill(0, 0)
    job.until(lambda: _losses(job) == [(0, 0, "closed")])


def test_two_that_come_while_the_disk_fails_are_let_in_one_after_the_other(job: ControlJob, tmp_path: Path) -> None:
    job.start()
    job.until(lambda: job.committed() >= 5)
    (tmp_path / "failing").touch()
    job.until(lambda: "WARNING: " in job.output("coordinator"))

    async def arrive() -> None:
        leaders = [Leader(job.run_dir, incarnation) for incarnation in (1, 2)]
        for leader in leaders:
            await leader.arrive()
            await leader.receive("welcome")
        (tmp_path / "failing").unlink()
        assert (await leaders[0].receive("fenced")).reason.endswith("incarnation 2 took its place")
        assert (await leaders[1].receive("view")).incarnation == 2
        for leader in leaders:
            await leader.leave()

    asyncio.run(arrive())
    assert job.ranks[0, 0].wait(30) == ExitCode.FENCED, job.outputs()
    assert job.finish() == ExitCode.FINISHED, job.outputs()
    assert _losses(job) == [(0, 2, "closed")]


def test_a_request_to_stop_is_answered_once_it_is_in_the_journal(job: ControlJob, tmp_path: Path) -> None:
    job.start()
    job.until(lambda: job.committed() >= 5)
    known, security = job.run_dir.coordinator(), Security(job.run_dir.token())
    assert known is not None
    address, request = known.address, pb.StopRequest(reason=f"{SIGNAL_REASON} SIGTERM")

    async def ask(patience_s: float) -> None:
        async with open_channel(address, security, patience_s) as channel:
            await call_once(channel, "RequestStop", security, request, patience_s)

    (tmp_path / "failing").touch()
    job.until(lambda: "WARNING: " in job.output("coordinator"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        asyncio.run(ask(0.5))
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert not any(isinstance(record.event, StopRequested) for record in job.records())
    (tmp_path / "failing").unlink()
    asyncio.run(ask(10.0))
    assert any(isinstance(record.event, StopRequested) for record in job.records())
    assert job.finish() == ExitCode.REQUEUE, job.outputs()
