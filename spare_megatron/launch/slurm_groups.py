"""Starts lost groups again in a Slurm allocation, each as a step of its own on the nodes where it ran.

Nobody reports the exits of ranks under Slurm. A group is gone when the coordinator's status has not named it for
LEAVE_S, in which its ranks leave by themselves, or when the step of its restart has ended.

Promises: before a group is started again, every node that it needs has killed what was left of the group there; so at
most one incarnation of a group has processes, and a node that is dead gets no step.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
            lambda: first_alive() or self.alive, client, memory, self._fault, self._begin, say, over
        )
        self._newest = {group: GroupStart(group, first_incarnation) for group in range(ranks.num_groups)}
        self._steps: dict[GroupStart, Child] = {}
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
                    self._lost(start)

    def _lost(self, start: GroupStart) -> None:
        if start not in self._handled and not self._over():
            self._handled.add(start)
            self._restarter.note(start, 0, ExitCode.FENCED)
            self._client.beside(self._restarter.bring_back(start))

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
            return await asyncio.to_thread(self._fault_of, start, over.is_set)
        finally:
            over.set()

    def _fault_of(self, start: GroupStart, over: Callable[[], bool]) -> HealthFault | None:
        ranks, nodes = self._ranks, self._nodes(start.group)
        here = node_names(told_of(ranks.allocation.job).get("NodeList", ""))
        absent = [node for node in nodes if node not in here]
        if absent or not nodes:
            return HealthFault("node", f"Slurm does not name {', '.join(absent) or 'nodes'} as a node of the job")
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
        places = ranks.allocation.places_of(group, ranks.group_size)
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

    def _nodes(self, group: int) -> list[str]:
        """The nodes of a group, each once, in their order; empty where Slurm does not name them now."""
        self._names = self._names or node_names(self._ranks.allocation.node_list)
        places = self._ranks.allocation.places_of(group, self._ranks.group_size)
        return [self._names[node] for node in dict.fromkeys(node for node, _ in places)] if self._names else []
