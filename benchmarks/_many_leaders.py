"""One process that plays many groups' leaders towards a real coordinator, with the real messages and channels.

    python benchmarks/_many_leaders.py RUN_DIR FIRST END GROUPS PIECES STEP_S

Each leader has a connection of its own, sends Hello, beats, sees epochs, votes the pieces of its plan when its step is
over, and reports each committed step. A line ``die G S`` on standard input closes the stream of group G as a death
does, S seconds after its next step began, and is answered with the time of it. At the end of the input it writes on
standard output, as JSON, for each step when the last vote was sent and the last commit received, and for each epoch
when the first and the last view was, by the clock that all processes of a host share. Python's garbage is not
collected: five hundred leaders in one process would wait for it, and none does that has a process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._played_job import FIGURES, TIMES, specification
from spare_megatron.config.timeouts import Timeouts
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.channel import COORDINATOR, Security, call_stream, open_channel
from spare_megatron.control_plane.heartbeat_timer import leader_interval_s
from spare_megatron.control_plane.reconnecting_stream import joined, queued
from spare_megatron.control_plane.reports import Heartbeat, LastRank
from spare_megatron.placement.offsets import independent_offsets
from spare_megatron.protocol.codec import job_to_json, spec_to_json
from spare_megatron.protocol.messages import Hello, ReductionResult, Vote
from spare_megatron.runtime.run_directory import RunDirectory

RANKS = 600
REDUNDANCY = 8
PATCH_S = 0.2
"""How long a survivor computes the pieces of a dead group."""
LONGEST_STEP_S = 120.0
"""Longer takes no step of a coordinator that goes on."""


class Times:
    """What this process measures."""

    def __init__(self) -> None:
        self.voted: dict[tuple[int, int], float] = {}
        """(step, epoch) -> when the last vote was sent."""
        self.committed: dict[int, float] = {}
        self.viewed: dict[int, tuple[float, float]] = {}

    def commit(self, step: int) -> None:
        """A commit has come."""
        self.committed[step] = time.monotonic()

    def view(self, epoch: int) -> None:
        """A view has come."""
        now_s = time.monotonic()
        self.viewed[epoch] = (self.viewed.get(epoch, (now_s, now_s))[0], now_s)


class PlayedLeader:
    """One group."""

    def __init__(self, group: int, groups: int, step_s: float, times: Times) -> None:
        self._interval_s = leader_interval_s(Timeouts(), groups)
        self.group, self._step_s, self._times = group, step_s, times
        self._step, self._epoch, self._began_s = 0, 0, 0.0
        self._pieces: tuple[int, ...] = ()
        self._standing: tuple[int, ...] = ()
        self._segments, self._counter, self._phase = 0, 0, "start"
        self._vote: asyncio.TimerHandle | None = None
        self._queue: asyncio.Queue[pb.GroupReport] = asyncio.Queue()
        self._waiting: list[pb.GroupReport] = []
        self._seen_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, address: str, security: Security, arrival: pb.Arrival) -> None:
        """Connect and arrive."""
        self._channel = open_channel(address, security, TIMES.heartbeat_timeout_s)
        self._call = call_stream(self._channel, COORDINATOR, security, pb.GroupReport)
        await self._call.write(pb.GroupReport(arrival=arrival))
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._beats())]

    async def reach(self, after_s: float) -> None:
        """Wait until the next step began, and ``after_s`` longer. Raises TimeoutError where none begins."""
        step = self._step
        async with asyncio.timeout(LONGEST_STEP_S):
            while self._step == step:
                await asyncio.sleep(0.005)
        await asyncio.sleep(self._began_s + after_s - time.monotonic())

    async def leave(self) -> None:
        """Close the stream as a death does."""
        if self._vote is not None:
            self._vote.cancel()
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        while True:
            reported = await queued(self._queue)
            reported[:0], self._waiting = self._waiting, []
            await self._call.write(joined(reported))
            for report in reported:
                if report.WhichOneof("kind") == "ballot":
                    result = report.ballot.vote.result
                    self._times.voted[result.step, result.epoch] = time.monotonic()

    def _send(self, report: pb.GroupReport, waits: bool) -> None:
        if waits:
            self._waiting.append(report)
        else:
            self._queue.put_nowait(report)

    async def _beats(self) -> None:
        await asyncio.sleep(self._interval_s * (self.group % 97) / 97)
        while True:
            self._beat()
            await asyncio.sleep(self._interval_s)

    def _beat(self) -> None:
        self._counter += self._phase == "forward"
        done = len(self._pieces) if self._phase == "vote" else 0
        waiting = RANKS if self._phase == "vote" else 0
        last = LastRank(self.group % RANKS, self._step, self._phase, self._counter, done, 0.125)
        beat = protobuf_codec.fill(pb.Heartbeat(), Heartbeat(self._step, done, waiting, last))
        self._queue.put_nowait(pb.GroupReport(heartbeat=beat))

    async def _read(self) -> None:
        try:
            while (order := await self._call.read()) is not grpc.aio.EOF:
                kind = order.WhichOneof("kind")
                if kind == "commit" and order.commit.step == self._step:
                    self._times.commit(self._step)
                    self._after_commit()
                elif kind == "view":
                    self._times.view(order.view.epoch)
                    self._adopt(order.view)
                elif kind in ("fenced", "refused", "stop"):
                    sys.stderr.write(f"group {self.group}: {order}\n")
                    return
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"group {self.group}: {error.details()}\n")

    def _after_commit(self) -> None:
        """Report the step, and begin the next one."""
        received = {"lm loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 4096} if self.group == 0 else {}
        report = pb.StepReport(step=self._step, report_json=json.dumps(received))
        self._send(pb.GroupReport(step_report=report), waits=not received)
        self._begin(self._step + 1, self._standing, 1)

    def _adopt(self, view: pb.View) -> None:
        """A new epoch: go on with the step in flight, with what was added to its plan."""
        self._epoch, self._standing = view.epoch, tuple(view.standing)
        self._seen_s = time.monotonic()
        pieces = tuple(piece for segment in view.segments for piece in segment.values)
        if view.step != self._step:
            self._begin(view.step, pieces, len(view.segments))
            return
        patching, self._pieces, self._segments = len(view.segments) > self._segments, pieces, len(view.segments)
        over_s = max(self._began_s + self._step_s, time.monotonic() + (PATCH_S if patching else 0.0))
        self._vote_at(over_s)

    def _begin(self, step: int, pieces: tuple[int, ...], segments: int) -> None:
        self._step, self._pieces, self._segments = step, pieces, segments
        self._began_s, self._phase = time.monotonic(), "forward"
        self._vote_at(self._began_s + self._step_s)

    def _vote_at(self, at_s: float) -> None:
        if self._vote is not None:
            self._vote.cancel()
        self._vote = asyncio.get_running_loop().call_at(at_s, self._vote_now)

    def _vote_now(self) -> None:
        """The segment is complete, which a beat says at once, and its sum is there."""
        self._phase, self._counter = "vote", self._counter + 1
        self._beat()
        result = ReductionResult(
            self._step, self._epoch, True, self._pieces, result_digest="r" * 32, weights_digest="w" * 32
        )
        ballot = pb.Ballot(figures=[pb.Figure(name=name, value=value) for name, value in FIGURES])
        ballot.since_seen_s = time.monotonic() - self._seen_s
        protobuf_codec.fill(ballot.vote, Vote(self.group, 0, result))
        self._queue.put_nowait(pb.GroupReport(ballot=ballot))


async def play(run_dir: RunDirectory, mine: range, groups: int, pieces: int, step_s: float) -> None:
    """Play the groups ``mine`` until the input ends."""
    times, security = Times(), Security(run_dir.token())
    spec, job = specification(independent_offsets(groups, REDUNDANCY).offsets, groups, pieces, RANKS)
    published = run_dir.coordinator()
    assert published is not None
    leaders = {group: PlayedLeader(group, groups, step_s, times) for group in mine}
    for group, leader in leaders.items():
        addresses = [f"10.{group >> 8}.{group & 255}.{1 + (p >> 3)}:{20000 + p}" if p else "" for p in range(RANKS)]
        arrival = pb.Arrival(ranks=RANKS, spec_json=spec_to_json(spec), job_json=job_to_json(job), addresses=addresses)
        hello = Hello(group, 0, spec.fingerprint, 0, None, 0, None)
        protobuf_codec.fill(arrival.hello, hello)
        await leader.join(published.address, security, arrival)
    while line := await asyncio.to_thread(sys.stdin.readline):
        _, group, after_s = line.split()
        leader = leaders.pop(int(group))
        await leader.reach(float(after_s))
        print(time.monotonic(), flush=True)
        await leader.leave()
    received = {
        "voted": [[*at, at_s] for at, at_s in times.voted.items()],
        "committed": list(times.committed.items()),
        "viewed": [[epoch, *span] for epoch, span in times.viewed.items()],
    }
    print(json.dumps(received), flush=True)
    await asyncio.gather(*(leader.leave() for leader in leaders.values()))


if __name__ == "__main__":
    path, first, end, groups, pieces, step_s = sys.argv[1:]
    gc.disable()
    asyncio.run(play(RunDirectory(Path(path)), range(int(first), int(end)), int(groups), int(pieces), float(step_s)))
