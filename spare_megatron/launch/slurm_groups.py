"""Starts lost groups again in a Slurm allocation, each as a step of its own: on the nodes where it ran, or on a spare
one where a node is lost, is not fit for it, or has failed too often.

Nobody reports the exits of ranks under Slurm. A group is gone when the coordinator's status has not named it for
LEAVE_S, in which its ranks leave by themselves, or when the step of its restart has ended.

Promises: before a group is started again, every node that it needs has killed what was left of the group there, and a
node that is dead gets no step. What a node that does not answer still runs of a group that has moved is fenced.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.launch.rank_processes import LOOK_S
from spare_megatron.launch.restarter import Restarter
from spare_megatron.launch.slurm_commands import SRUN, node_names, told_of
from spare_megatron.launch.slurm_places import SlurmPlaces

AT_ONCE = 16
"""So many nodes at most are checked at once, each by itself."""
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
        self._restarter = Restarter(
            lambda: first_alive() or self.alive,
            client,
            memory,
            self._fault,
            self._begin,
            say,
            over,
            elsewhere=self._elsewhere,
        )
        self._newest = {group: GroupStart(group, first_incarnation) for group in range(ranks.num_groups)}
        self._steps: dict[GroupStart, Child] = {}
        self._places, self._say = SlurmPlaces(ranks.allocation, ranks.group_size), say
        self._resting: set[int] = set()
        """Nodes that a drained group has left: nothing is started on them."""
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
            self._client.beside(self._restarter.bring_back(start))

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
            fault, moves = await asyncio.to_thread(self._fault_of, start, over.is_set)
        finally:
            over.set()
        for sentence in moves:
            self._say(sentence)
        return fault

    def _fault_of(self, start: GroupStart, over: Callable[[], bool]) -> tuple[HealthFault | None, list[str]]:
        """The fault, and how the group moves to other nodes, in words."""
        self._names = self._names or node_names(self._ranks.allocation.node_list)
        here = set(node_names(told_of(self._ranks.allocation.job).get("NodeList", "")))
        if not self._names or not here:
            return HealthFault("node", "Slurm does not name the nodes of the job"), []
        places, group = self._places, start.group
        usable = {node for node, name in enumerate(self._names) if name in here} - self._resting
        drained = group in (glance(self._ranks.run_dir.status) or {}).get("drained", [])
        left = set(places.nodes_of(group)) if drained else set[int]()
        unfit, told = dict[int, HealthFault](), list[str]()
        while True:
            nodes = places.nodes_of(group)
            for node in set(nodes) - usable:
                unfit[node] = HealthFault("node", f"Slurm does not name {self._names[node]} as a node of the job")
            for node in left.intersection(nodes):
                unfit[node] = HealthFault("node", f"{self._names[node]} is drained")
            for node in places.failing(set(nodes) - unfit.keys()):
                unfit[node] = HealthFault("node", f"{self._names[node]} has failed too often")
            if not unfit.keys() & set(nodes):
                unfit |= self._unfit(start, nodes, over)
            away = [node for node in nodes if node in unfit]
            if not away:
                return None, told
            moves = places.move(group, unfit.keys(), usable)
            if not moves:
                often = set(places.failing(away)) & usable - left
                serious = [unfit[node] for node in away if node not in often]
                return (serious[0] if serious else self._as_it_is(start, nodes, over)), told
            self._resting |= left & moves.keys()
            for node, other in moves.items():
                names = f"from {self._names[node]} to the spare node {self._names[other]}"
                told.append(f"group {group} moves {names}: {unfit[node].sentence}")

    def _as_it_is(self, start: GroupStart, nodes: list[int], over: Callable[[], bool]) -> HealthFault | None:
        """Nothing is spare for nodes that fail often, so they are used as long as they are fit."""
        return next(iter(self._unfit(start, nodes, over).values()), None)

    def _unfit(self, start: GroupStart, nodes: list[int], over: Callable[[], bool]) -> dict[int, HealthFault]:
        """Sweep and check the nodes; why those that cannot run the group cannot. Each by itself where others could take
        its place, else all with one step, and then the first stands for all."""
        each = [[node] for node in nodes] if self._places.has_room else [nodes]
        with ThreadPoolExecutor(min(len(each), AT_ONCE), "nodes") as pool:
            faults = pool.map(lambda some: self._checked(start, [self._names[node] for node in some], over), each)
            return {some[0]: fault for some, fault in zip(each, faults, strict=True) if fault is not None}

    def _checked(self, start: GroupStart, nodes: list[str], over: Callable[[], bool]) -> HealthFault | None:
        """Kill what is left of a group on these nodes, and run the user's check there."""
        ranks = self._ranks
        run_dir, group, size = ranks.run_dir.path, start.group, ranks.group_size
        sweep = (sys.executable, "-m", "spare_megatron.launch.group_sweep", str(run_dir), str(group), str(size))
        fault = self._on_each(nodes, (*sweep, str(start.incarnation)), SWEEP_LIMIT_S, "node", "its nodes", over)
        if fault is not None or not ranks.health_check:
            return fault
        check = ("/bin/sh", "-c", ranks.health_check)
        return self._on_each(nodes, check, COMMAND_LIMIT_S, "command", FLAG, over)

    def _on_each(
        self, nodes: list[str], command: tuple[str, ...], limit_s: float, kind: str, what: str, over: Callable[[], bool]
    ) -> HealthFault | None:
        """Run a command once on each node; why that failed."""
        number = str(len(nodes))
        where = ("--overlap", f"--nodelist={','.join(nodes)}", f"--nodes={number}", f"--ntasks={number}")
        step = (*SRUN, *where, "--ntasks-per-node=1", f"--job-name={self._ranks.step_name}-check", *command)
        # without an incarnation: what runs here is no rank, and no sweep is to take it for one
        environ = {name: value for name, value in self._ranks.environ.items() if name != "SPARE_INCARNATION"}
        found = run_command(step, limit_s, self._processes.guard, over, environ=environ, hear_all=True)
        if found.status == 0:
            return None
        return HealthFault(kind, f"{', '.join(nodes)}: {what}: {found.words(limit_s)}")

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
