"""Starts lost groups again in a Slurm allocation, each as a step of its own: on the nodes where it ran, or on a spare
one where a node is lost, is not fit for it, or has failed too often. Where nothing is spare, groups that wait for nodes
put their fit ones together (:mod:`spare_megatron.launch.slurm_places`).

Nobody reports the exits of ranks under Slurm. A group is gone when the coordinator's status has not named it for
LEAVE_S, in which its ranks leave by themselves, or when the step of its restart has ended.

Promises: before a group is started again, every node that it needs has killed what was left of the group there, and a
node that is dead gets no step. What a node that does not answer still runs of a group that has moved is fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.exits import ExitCode
from spare_megatron.control.brief_command import run_command
from spare_megatron.control.run_directory import RunDirectory, glance
from spare_megatron.launch.coordinator_client import CoordinatorClient
from spare_megatron.launch.group_health import COMMAND_LIMIT_S, FLAG, HealthFault
from spare_megatron.launch.group_restarts import Absences, GroupStart, LaunchMemory, named
from spare_megatron.launch.life_report import LINES_SHOWN, tail
from spare_megatron.launch.node_looks import JobNodes, NodesLook, look_at_nodes
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.launch.rank_processes import LOOK_S
from spare_megatron.launch.restarter import NoStandbys, Restarter
from spare_megatron.launch.slurm_commands import SRUN, node_names, racks_of, told_of
from spare_megatron.launch.slurm_places import SlurmPlaces

AT_ONCE = 16
"""So many nodes at most are checked at once."""
SWEEP_LIMIT_S = 30.0
"""How long the nodes of a group have to kill what is left of it; one that is slower counts as lost."""


@dataclass(frozen=True)
class SlurmRanks:
    """How the ranks of a life are started."""

    allocation: Allocation
    run_dir: RunDirectory
    group_size: int
    command: tuple[str, ...]
    """The command line of one rank."""
    srun_options: tuple[str, ...]
    health_check: str
    """The user's command before a lost group is started again; empty: none."""
    life: int
    step_name: str
    """Of the life's steps; those of restarts have something behind it."""
    environ: Mapping[str, str]
    """Of the ranks that the life began with."""

    @property
    def num_groups(self) -> int:
        """N."""
        return self.allocation.ranks // self.group_size


class NodeNews(NoStandbys):
    """Wakes groups that wait for nodes when they have been given some."""

    def __init__(self) -> None:
        self._news: dict[int, asyncio.Event] = {}

    def wake(self, group: int) -> None:
        """Let a group be looked at now."""
        self._news.setdefault(group, asyncio.Event()).set()

    async def come(self, group: int, timeout_s: float) -> None:
        """Wait until a group is woken, ``timeout_s`` at most."""
        news = self._news.setdefault(group, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), timeout_s)
        news.clear()


class SlurmGroups:
    """The groups of one life. Used in one event loop."""

    def __init__(
        self,
        ranks: SlurmRanks,
        first_incarnation: int,
        processes: Processes,
        client: CoordinatorClient,
        memory: LaunchMemory,
        say: Callable[[str], None],
        over: Callable[[], bool],
        first_alive: Callable[[], bool],
    ) -> None:
        """``first_alive`` says whether the step that the life began with goes on."""
        self._ranks, self._processes, self._client, self._over = ranks, processes, client, over
        self._news = NodeNews()
        self._restarter = Restarter(
            lambda: first_alive() or self.alive,
            client,
            memory,
            self._fault,
            self._begin,
            say,
            over,
            standbys=self._news,
            elsewhere=self._elsewhere,
        )
        self._newest = {group: GroupStart(group, first_incarnation) for group in range(ranks.num_groups)}
        self._steps: dict[GroupStart, Child] = {}
        self._places, self._say = SlurmPlaces(ranks.allocation, ranks.group_size), say
        self._names: list[str] = []
        """Of all nodes that the job began with; the first check of a group's nodes asks for them."""
        self._absences = Absences(self._newest.values())
        self._handled: set[GroupStart] = set()
        """The starts whose loss is known here."""

    @property
    def alive(self) -> bool:
        """Whether the step of a restart goes on."""
        return any(child.alive for child in self._steps.values())

    @property
    def errors(self) -> list[Path]:
        """The sentences of ranks that found a user's error, but for groups that were started again: they only stay
        away."""
        again = tuple(f"group-{start.group}-" for start in self._newest.values() if start.restarts)
        return [file for file in self._ranks.run_dir.told_errors() if not file.name.startswith(again)]

    @property
    def children(self) -> list[Child]:
        """The sruns of all restarts."""
        return list(self._steps.values())

    async def watch(self) -> None:
        """Bring lost groups back until the life is over."""
        while self._restarter.works and not self._over():
            await asyncio.sleep(LOOK_S)
            status = glance(self._ranks.run_dir.status)
            if status is not None and (status["phase"], status["life"]) == ("running", self._ranks.life):
                for start in self._absences.gone(self._newest.values(), named(status), time.monotonic()):
                    self._lost(start, failed=start.group not in status["drained"])

    def _lost(self, start: GroupStart, failed: bool = True) -> None:
        if start not in self._handled and not self._over():
            self._handled.add(start)
            if failed:
                self._places.lost(start.group, time.monotonic())
            self._restarter.note(start, 0, ExitCode.FENCED)
            self._client.beside(self._bring_back(start))

    async def _bring_back(self, start: GroupStart) -> None:
        try:
            await self._restarter.bring_back(start)
        finally:
            self._places.waits_no_more(start.group)

    def _elsewhere(self, start: GroupStart) -> bool:
        """Whether a drained group may go on elsewhere."""
        return self._places.has_room

    def _ended(self, start: GroupStart, child: Child) -> None:
        """The step of a restart has ended; its exit code is the highest of its ranks."""
        status = child.status if child.status is not None else 1
        if status == ExitCode.BAD_INPUT:
            sentences = self._ranks.run_dir.told_errors(start.group)
            if sentences:
                self._restarter.note_error(start, tail(sentences[0], LINES_SHOWN))
        self._restarter.note(start, 0, status)
        self._lost(start)

    # --------------------------------------------------------------------------------------------------------- steps

    async def _fault(self, start: GroupStart) -> HealthFault | None:
        """Why the nodes of a group cannot run it now."""
        over = threading.Event()
        try:
            look = await asyncio.to_thread(self._look, start, over.is_set)
        finally:
            over.set()
        for group, moves in look.moves.items():
            for move in moves:
                whose = "the spare node " if move.giver is None else ""
                of = "" if move.giver is None else f" of group {move.giver}, which waits for nodes too"
                there = f"{whose}{self._names[move.other]}{of}"
                self._say(f"group {group} moves from {self._names[move.node]} to {there}: {move.why}")
            if group != start.group:
                self._news.wake(group)
        return look.fault

    def _look(self, start: GroupStart, over: Callable[[], bool]) -> NodesLook:
        if not self._names:
            self._names = node_names(self._ranks.allocation.node_list)
            self._places.racks = racks_of(self._names)
        here = set(node_names(told_of(self._ranks.allocation.job).get("NodeList", "")))
        if not self._names or not here:
            return NodesLook(HealthFault("node", "Slurm does not name the nodes of the job"))
        nodes = JobNodes(
            self._names,
            {node for node, name in enumerate(self._names) if name in here},
            (glance(self._ranks.run_dir.status) or {}).get("drained", []),
        )
        return look_at_nodes(self._places, start.group, nodes, lambda some: self._unfit(start, some, over))

    def _unfit(self, start: GroupStart, nodes: Collection[int], over: Callable[[], bool]) -> dict[int, HealthFault]:
        """Sweep and check nodes, each by itself, as the others are fit all the same; why those that cannot run the
        group cannot."""
        with ThreadPoolExecutor(AT_ONCE, "nodes") as pool:
            faults = pool.map(lambda node: self._checked(start, self._names[node], over), nodes)
            return {node: fault for node, fault in zip(nodes, faults, strict=True) if fault is not None}

    def _checked(self, start: GroupStart, node: str, over: Callable[[], bool]) -> HealthFault | None:
        """Kill what is left of a group on a node, and run the user's check there."""
        ranks = self._ranks
        run_dir, group, size = ranks.run_dir.path, start.group, ranks.group_size
        sweep = (sys.executable, "-m", "spare_megatron.launch.group_sweep", str(run_dir), str(group), str(size))
        fault = self._on(node, (*sweep, str(start.incarnation)), SWEEP_LIMIT_S, "node", "", over)
        if fault is not None or not ranks.health_check:
            return fault
        check = ("/bin/sh", "-c", ranks.health_check)
        return self._on(node, check, COMMAND_LIMIT_S, "command", f"{FLAG}: ", over)

    def _on(
        self, node: str, command: tuple[str, ...], limit_s: float, kind: str, what: str, over: Callable[[], bool]
    ) -> HealthFault | None:
        """Run a command on a node; why that failed."""
        where = ("--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1")
        step = (*SRUN, *where, f"--job-name={self._ranks.step_name}-check", *command)
        # without an incarnation: what runs here is no rank, and no sweep is to take it for one
        environ = {name: value for name, value in self._ranks.environ.items() if name != "SPARE_INCARNATION"}
        found = run_command(step, limit_s, self._processes.guard, over, environ=environ, hear_all=True)
        if found.status == 0:
            return None
        return HealthFault(kind, f"{node}: {what}{found.words(limit_s)}")

    def _begin(self, start: GroupStart) -> None:
        ranks, group = self._ranks, start.group
        places = self._places.of(group)
        names = self._names
        hosts = ranks.run_dir.logs / f"group-{group}" / f"hosts.incarnation-{start.incarnation}"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text("".join(f"{names[node]}\n" for node, _ in places))
        environ = {
            **ranks.environ,
            "SPARE_GROUP": str(group),
            "SPARE_NUM_GROUPS": str(ranks.num_groups),
            "SPARE_INCARNATION": str(start.incarnation),
            "SPARE_RESTARTS": str(start.restarts),
            "SPARE_LOCAL_RANK_FROM": str(places[0][1]),
            "SLURM_HOSTFILE": str(hosts),
        }
        # the file of hosts says it all, and newer versions take no number of nodes beside it
        for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            environ.pop(name, None)
        log = str(ranks.run_dir.log_of(group, 0, start.incarnation)).replace("rank-0.", "rank-%t.")
        self._newest[group] = start
        self._steps[start] = self._processes.start(
            f"group {group}",
            [
                *(*SRUN, "--no-kill", "--open-mode=append", "--overlap", "--distribution=arbitrary"),
                *(f"--ntasks={len(places)}", f"--output={log}"),
                *(*ranks.srun_options, f"--job-name={ranks.step_name}-group-{group}", *ranks.command),
            ],
            environ,
            self._log(start),
            lambda child: self._ended(start, child),
        )

    def _log(self, start: GroupStart) -> Path:
        return self._ranks.run_dir.logs / f"srun-group-{start.group}.incarnation-{start.incarnation}.log"
