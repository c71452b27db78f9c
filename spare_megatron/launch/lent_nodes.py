"""Takes nodes that others lend to a job, for spare-slurm: each has an agent (:mod:`spare_megatron.launch.node_agent`)
with a stream to this server, whose address is in the run directory.

A node is taken when its versions, its GPUs and its paths are the job's. It is lost when its stream ends; its agent then
kills what it runs. It stays taken from job attempt to job attempt, until its agent asks to leave or the launcher ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio

from spare_megatron.collectives.interface import advertised
from spare_megatron.config.plural import counted
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import LAUNCHER, Security, serve
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.launch.node_facts import gpus_here, versions_here
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.import_variables import decides_bits
from spare_megatron.runtime.run_directory import RunDirectory, write_json

NAME_MAX = 200
"""Characters of a name or sentence of an agent that are shown."""


@dataclass(frozen=True)
class NodeNeeds:
    """What a node must have to be taken."""

    directory: str
    """The working directory of ranks."""
    paths: Sequence[str]
    least_places: int
    """Fewer are of no use to any group."""
    versions: str = field(default_factory=versions_here)
    gpus: Sequence[str] = field(default_factory=gpus_here)

    def refusal(self, lent: pb.LentNode) -> str:
        """Why a node is not taken, from what its agent says first; empty where it may be."""
        if lent.versions != self.versions:
            return f"it has {_shown(lent.versions)}, and the job {self.versions}; install the job's versions there"
        if list(lent.gpus) != list(self.gpus):
            kinds = ", ".join(lent.gpus) or "no GPU"
            return f"it has {_shown(kinds)}, and the job {', '.join(self.gpus) or 'no GPU'}; lend nodes of that kind"
        if lent.places < self.least_places:
            return (
                f"it has room for {counted(lent.places, 'rank')}, and a group has {self.least_places} on a node; give "
                f"--ntasks-per-node={self.least_places}"
            )
        return ""


class LentNode:
    """One node that is lent. Used in the launcher's event loop."""

    def __init__(self, name: str, places: int) -> None:
        self.name, self.places = name, places
        self.usable = True
        """False once it is to leave, or is lost."""
        self.here = True
        """Whether its agent's stream stands."""
        self._orders: asyncio.Queue[pb.AgentOrder] = asyncio.Queue()
        self._checks: dict[int, asyncio.Future[HealthFault | None]] = {}
        self._running: dict[GroupStart, Callable[[int], None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def starts(self) -> list[GroupStart]:
        """The starts of groups that have ranks here."""
        return list(self._running)

    async def check(self, group: int, command: str) -> HealthFault | None:
        """Kill what is left of a group here and run the user's command; why the node cannot run the group."""
        if not self.here:
            return HealthFault("gone", f"the lent node {self.name} has left")
        number = 1 + max(self._checks, default=0)
        answer = self._checks[number] = asyncio.get_running_loop().create_future()
        self.order(pb.AgentOrder(check=pb.CheckNode(number=number, group=group, command=command)))
        try:
            fault: HealthFault | None = await answer
            return fault
        finally:
            self._checks.pop(number, None)

    def start(self, start: GroupStart, order: pb.StartRanks, ended: Callable[[int], None]) -> None:
        """Start ranks of a group here; ``ended`` is called with the highest exit code when none is left. Raises OSError
        where the node has left."""
        if not self.here:
            raise OSError(f"the lent node {self.name} has left")
        self._running[start] = ended
        self._empty.clear()
        self.order(pb.AgentOrder(start=order))

    def order(self, order: pb.AgentOrder) -> None:
        """Send an order, some time."""
        self._orders.put_nowait(order)

    async def until_empty(self) -> None:
        """Wait until no rank runs here, or the stream has ended."""
        await self._empty.wait()

    async def write(self, context: Any) -> None:
        """Send the orders."""
        while True:
            await context.write(await self._orders.get())

    def receive(self, report: pb.AgentReport) -> None:
        """Note what the agent says."""
        kind = report.WhichOneof("kind")
        if kind == "checked":
            answer = self._checks.get(report.checked.number)
            if answer is not None and not answer.done():
                reported = report.checked
                where = f"{self.name}: {_shown(reported.sentence)}"
                answer.set_result(HealthFault(reported.kind, where) if reported.kind else None)
        elif kind == "ended":
            for start in [one for one in self._running if one.member == (report.ended.group, report.ended.incarnation)]:
                self._end(start, report.ended.status)

    def lost(self) -> None:
        """The stream has ended."""
        self.usable = self.here = False
        for answer in self._checks.values():
            if not answer.done():
                answer.set_result(HealthFault("gone", f"the lent node {self.name} has left"))
        for start in self.starts:
            self._end(start, 1)

    def _end(self, start: GroupStart, status: int) -> None:
        ended = self._running.pop(start)
        if not self._running:
            self._empty.set()
        ended(status)


class LentNodeUser(Protocol):
    """The job attempt that uses lent nodes at the moment."""

    def take(self, node: LentNode) -> None:
        """A node comes."""

    async def leave(self, node: LentNode, why: str) -> None:
        """A node is to leave: return when no group needs it any more."""

    def lose(self, node: LentNode) -> None:
        """A node has left."""


class LentNodes:
    """All nodes that are lent to a job. Use as an asynchronous context manager."""

    def __init__(
        self, run_dir: RunDirectory, security: Security, listen: str, needs: NodeNeeds, announce: Callable[[str], None]
    ) -> None:
        self._dir, self._security, self._listen, self._needs, self._announce = (
            run_dir,
            security,
            listen,
            needs,
            announce,
        )
        self.nodes: list[LentNode] = []
        """Those that are there."""
        self.user: LentNodeUser | None = None
        self._server: grpc.aio.Server | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LentNodes:
        host = f"{self._listen.rpartition(':')[0]}:0"  # the coordinator has the port
        self._server, port = await serve(host, LAUNCHER, self._security, self._join, pb.AgentReport)
        reported = {"address": f"{advertised(host)}:{port}", "host": socket.gethostname(), "pid": os.getpid()}
        with_retries(lambda: write_json(self._dir.launcher, reported))
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._dir.launcher.unlink(missing_ok=True)
        for node in self.nodes:
            node.order(_end("the job is over, or goes on elsewhere"))
        assert self._server is not None
        await self._server.stop(grace=2.0 if self.nodes else 0.0)

    def kill_all(self) -> None:
        """Kill all ranks on lent nodes, at the end of a job attempt."""
        for node in self.nodes:
            node.order(pb.AgentOrder(kill=pb.KillRanks()))

    async def _join(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Serve the agent of a node."""
        await context.send_initial_metadata(())  # it sends nothing before
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "lent":
            return
        name = _shown(first.lent.name)
        refusal = self._needs.refusal(first.lent)
        if not refusal:
            needed = pb.NeededPaths(directory=self._needs.directory, paths=self._needs.paths)
            await context.write(pb.AgentOrder(needed=needed))
            found = await context.read()
            if found is grpc.aio.EOF or found.WhichOneof("kind") != "found":
                return
            if found.found.missing:
                others = len(found.found.missing) - 1
                more = f" and {counted(others, 'other path')}" if others else ""
                refusal = f"it cannot read {_shown(found.found.missing[0])}{more}; mount there what the job reads"
        if refusal:
            self._announce(f"the node {name} is not taken: {refusal}")
            await context.write(_end(f"the node {name} is not taken: {refusal}", refused=True))
            return
        node = LentNode(name, first.lent.places)
        writer = asyncio.create_task(node.write(context))
        self.nodes.append(node)
        self._announce(f"the node {name} is lent to the job, with room for {counted(node.places, 'rank')}")
        if self.user is not None:
            self.user.take(node)
        try:
            while (report := await context.read()) is not grpc.aio.EOF:
                if report.WhichOneof("kind") == "leaves":
                    self._leaves(node, _shown(report.leaves.why))
                else:
                    node.receive(report)
        finally:
            writer.cancel()
            self.nodes.remove(node)
            node.lost()
            self._announce(f"the lent node {name} has left")
            if self.user is not None:
                self.user.lose(node)

    def _leaves(self, node: LentNode, why: str) -> None:
        if not node.usable:
            return
        node.usable = False
        self._announce(f"the lent node {node.name} is to leave: {why}")

        async def release() -> None:
            if self.user is not None:
                await self.user.leave(node, why)
            node.order(_end(f"the node {node.name} is not needed any more"))

        task = asyncio.create_task(release())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def start_order(
    start: GroupStart, words: Sequence[str], environ: Mapping[str, str], ranks: Sequence[pb.RankPlace]
) -> pb.StartRanks:
    """The order to start ranks; ``words`` follow the interpreter, and of ``environ`` the agent gets what is ours, and
    what decides bits (:func:`rank_environment`)."""
    given = {name: value for name, value in environ.items() if name.startswith("SPARE_") or decides_bits(name)}
    return pb.StartRanks(group=start.group, incarnation=start.incarnation, words=words, environ=given, ranks=ranks)


def rank_environment(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank on a node that has its ``own``; what decides bits is as in the ``given`` one, of the
    job, also where that has no such variable."""
    return {**{name: value for name, value in own.items() if not decides_bits(name)}, **given}


def _end(sentence: str, refused: bool = False) -> pb.AgentOrder:
    return pb.AgentOrder(end=pb.AgentEnd(sentence=sentence, refused=refused))


def _shown(text: str) -> str:
    """One line of an agent's text."""
    return "".join(one if one.isprintable() else "?" for one in text)[:NAME_MAX]
