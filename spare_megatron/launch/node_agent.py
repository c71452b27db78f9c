"""Lends a node to a job: starts the ranks that the job's launcher requests there, until the node is to leave.

May assume: the run directory lies on a file system that the job's nodes share, and its token can be read. Promises: no
rank outlives this process, or its stream to the launcher; it writes nothing but ranks' logs, and knows nothing of
what lends the node (a batch system, a pod, a user's shell).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import grpc.aio

from spare_megatron.config.errors import ConfigError
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import LAUNCHER, Security, call_stream, open_channel
from spare_megatron.launch.group_health import COMMAND_LIMIT_S, FLAG
from spare_megatron.launch.lent_nodes import rank_environment
from spare_megatron.launch.node_facts import gpus_here, not_here, versions_here
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.runtime.brief_command import run_command
from spare_megatron.runtime.run_directory import RunDirectory, glance

PATIENCE_S = 10.0
"""How long the launcher may be silent."""
KILLED_S = 10.0
"""How long killed ranks have to end before a node counts as unfit."""
LOOK_S = 0.05
StartOnNode = tuple[int, int]
"""(group, incarnation)."""


def launcher_address(run_dir: RunDirectory) -> str:
    """Where the launcher of the job in ``run_dir`` takes nodes. Raises ConfigError where there is none."""
    if not run_dir.path.is_dir():
        raise ConfigError(f"{run_dir.path} is no run directory; give the --run-dir of a job that spare-slurm runs")
    reported = glance(run_dir.launcher)
    if reported is None:
        ended = glance(run_dir.summary)
        how = (
            f"the job of {run_dir.path} is over ({ended.get('outcome', 'no outcome')})"
            if ended
            else f"no job runs in {run_dir.path}"
        )
        raise ConfigError(f"{how}: nothing is lent; spare-slurm must run it when its nodes are to be used")
    return str(reported["address"])


class NodeAgent:
    """The agent of one node. Used in one event loop."""

    def __init__(self, run_dir: RunDirectory, security: Security, name: str, places: int) -> None:
        self._dir, self._security, self._name, self._places = run_dir, security, name, places
        self._ranks: dict[StartOnNode, list[Child]] = {}
        self._reports: asyncio.Queue[pb.AgentReport] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, leave: asyncio.Event, most_s: float) -> str:
        """Lend the node until ``leave`` is set and its groups have left, for ``most_s`` at most from then on, or until
        the launcher ends; returns why it is over. Raises ConfigError where the node is not taken."""
        address = launcher_address(self._dir)
        with Processes() as self._processes:
            async with open_channel(address, self._security, PATIENCE_S) as channel:
                call = call_stream(channel, LAUNCHER, self._security, pb.AgentReport, pb.AgentOrder)
                self._announce(lent=self._described())
                work = [asyncio.create_task(self._write(call)), asyncio.create_task(self._leave(leave, most_s))]
                reading = asyncio.create_task(self._read(call))
                try:
                    done, _ = await asyncio.wait([reading, work[1]], return_when=asyncio.FIRST_COMPLETED)
                    if reading not in done:
                        return f"its groups had not left after {most_s:g} s"
                    return reading.result()
                except grpc.aio.AioRpcError as error:
                    why = error.details() or error.code().name
                    raise ConfigError(
                        f"the launcher of {self._dir.path} at {address} does not answer ({why}): nothing is lent any "
                        "more"
                    ) from None
                finally:
                    for task in (*work, reading, *self._tasks):
                        task.cancel()

    def _described(self) -> pb.LentNode:
        return pb.LentNode(name=self._name, places=self._places, versions=versions_here(), gpus=gpus_here())

    def _announce(self, **kind: Any) -> None:
        self._reports.put_nowait(pb.AgentReport(**kind))

    async def _write(self, call: Any) -> None:
        """Send the reports, from the launcher's first answer on: what is sent while it refuses the call may take the
        place of its reason. Whoever reads learns how the stream ends."""
        await call.initial_metadata()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._reports.get())

    async def _leave(self, leave: asyncio.Event, most_s: float) -> None:
        await leave.wait()
        self._announce(leaves=pb.NodeLeaves(why="it was asked to leave"))
        await asyncio.sleep(most_s)

    async def _read(self, call: Any) -> str:
        """Do what the launcher reports; returns why it says no more."""
        while (order := await call.read()) is not grpc.aio.EOF:
            kind = order.WhichOneof("kind")
            if kind == "end":
                if order.end.refused:
                    raise ConfigError(order.end.sentence)
                return str(order.end.sentence)
            if kind == "needed":
                self._found(order.needed)
            elif kind == "check":
                self._beside(self._check(order.check))
            elif kind == "start":
                self._start(order.start)
            elif kind == "kill":
                for start in list(self._ranks):
                    self._kill(start)
        return "the launcher has ended"

    def _beside(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _found(self, needed: pb.NeededPaths) -> None:
        missing = not_here([needed.directory, *needed.paths])
        if not missing:
            os.chdir(needed.directory)
        self._announce(found=pb.PathsFound(missing=missing))

    # --------------------------------------------------------------------------------------------------------- ranks

    def _start(self, order: pb.StartRanks) -> None:
        start = (order.group, order.incarnation)
        children = self._ranks[start] = []
        statuses: list[int] = []

        def ended(child: Child) -> None:
            statuses.append(child.status if child.status is not None and child.status >= 0 else 1)
            if len(statuses) == len(order.ranks):
                self._ranks.pop(start, None)
                self._announce(ended=pb.RanksEnded(group=start[0], incarnation=start[1], status=max(statuses)))

        for rank in order.ranks:
            environ = {
                **rank_environment(os.environ, order.environ),
                "PYTHONUNBUFFERED": "1",
                "SPARE_POSITION": str(rank.position),
                "LOCAL_RANK": str(rank.local_rank),
                "LOCAL_WORLD_SIZE": str(self._places),
                "SPARE_LAUNCHER_PID": str(os.getpid()),
            }
            name = f"group {order.group} rank {rank.position}"
            try:
                child = self._processes.start(
                    name, (sys.executable, *order.words), environ, Path(rank.log), ended=ended
                )
            except OSError:
                statuses.append(1)
                continue
            children.append(child)
        if len(statuses) == len(order.ranks):
            self._ranks.pop(start, None)
            self._announce(ended=pb.RanksEnded(group=start[0], incarnation=start[1], status=1))

    def _kill(self, start: StartOnNode) -> None:
        for child in self._ranks.get(start, ()):
            if child.alive:
                child.signal(signal.SIGKILL)

    async def _check(self, order: pb.CheckNode) -> None:
        kind, sentence = "", ""
        of_group = [start for start in self._ranks if start[0] == order.group]
        for start in of_group:
            self._kill(start)
        for _ in range(round(KILLED_S / LOOK_S)):
            if not self._ranks.keys() & set(of_group):
                break
            await asyncio.sleep(LOOK_S)
        else:
            kind, sentence = "node", f"processes of group {order.group} do not end"
        if not kind and order.command:
            kind, sentence = await self._user_check(order.command)
        self._announce(checked=pb.NodeChecked(number=order.number, kind=kind, sentence=sentence))

    async def _user_check(self, command: str) -> tuple[str, str]:
        over = threading.Event()
        words = ("/bin/sh", "-c", command)
        try:
            found = await asyncio.to_thread(
                run_command, words, COMMAND_LIMIT_S, self._processes.guard, over.is_set, receive_all=True
            )
        except OSError as error:
            return "probe", f"the check cannot be started: {error}"
        finally:
            over.set()
        return ("", "") if found.status == 0 else ("command", f"{FLAG}: {found.words(COMMAND_LIMIT_S)}")


async def until_closed(descriptor: int, leave: asyncio.Event) -> None:
    """Set ``leave`` when whoever started this process closes the other end of its standard input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with contextlib.suppress(OSError):
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
        await reader.read()
    leave.set()
