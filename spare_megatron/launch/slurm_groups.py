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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import LENT_TO, POSITIONS, STAGES
from spare_megatron.config.rows import ranks_with
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.launch.attempt_report import LINES_SHOWN, is_users_error, tail
from spare_megatron.launch.coordinator_client import CoordinatorClient, drain_for_now, with_age
from spare_megatron.launch.group_health import COMMAND_LIMIT_S, FLAG, HealthFault
from spare_megatron.launch.group_restarts import LATE, Absences, GroupStart, LaunchMemory, named
from spare_megatron.launch.group_shapes import WayHome, allowed_shapes
from spare_megatron.launch.lent_nodes import LentNode, LentNodes, start_order
from spare_megatron.launch.node_looks import JobNodes, NodesLook, look_at_nodes
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.launch.rank_processes import LOOK_S
from spare_megatron.launch.restarter import DRAINED_S, NoStandbys, RestartedJob, Restarter
from spare_megatron.launch.slurm_commands import SRUN, in_service, node_names, racks_of, reported_of
from spare_megatron.launch.slurm_places import Move, NodePlace, SlurmPlaces
from spare_megatron.runtime.brief_command import run_command
from spare_megatron.runtime.run_directory import RunDirectory, glance, group_of

RESUMED_LOOK_S = 10.0
"""Time between two looks at whether Slurm has nodes again that groups wait for."""
AT_ONCE = 16
"""So many nodes at most are checked at once."""
NODE_LEFT = "a lent node of it was to leave, which counts as no restart"
SWEEP_LIMIT_S = 30.0
"""How long the nodes of a group have to kill what is left of it; one that is slower counts as lost."""


@dataclass(frozen=True)
class SlurmRanks:
    """How the ranks of a job attempt are started."""

    allocation: Allocation
    run_dir: RunDirectory
    group_size: int
    pipeline: int
    """Pipeline stages of a group."""
    command: tuple[str, ...]
    """The command line of one rank."""
    srun_options: tuple[str, ...]
    health_check: str
    """The user's command before a lost group is started again; empty: none."""
    job_attempt: int
    step_name: str
    """Of the job attempt's steps; those of restarts have something behind it."""
    environ: Mapping[str, str]
    """Of the ranks that the job attempt began with."""

    @property
    def num_groups(self) -> int:
        """N."""
        return self.allocation.ranks // self.group_size


class NodeNews(NoStandbys):
    """Wakes groups that wait for nodes when they have been given some."""

    comes = True

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
    """The groups of one job attempt. Used in one event loop."""

    def __init__(
        self,
        ranks: SlurmRanks,
        first_incarnation: int,
        processes: Processes,
        client: CoordinatorClient,
        *,
        memory: LaunchMemory,
        announce: Callable[[str], None],
        over: Callable[[], bool],
        first_alive: Callable[[], bool],
        lent: LentNodes,
    ) -> None:
        """``first_alive`` says whether the step that the job attempt began with goes on."""
        self._ranks, self._processes, self._client, self._over = ranks, processes, client, over
        self._news = NodeNews()
        restarted = RestartedJob(
            trains=lambda: first_alive() or self.alive,
            over=over,
            fault=self._fault,
            begin=self._begin,
            announce=announce,
            before=lambda start: self._way_home.before(start),
            has_room=lambda group: self._places.has_room or not self._lost_on[group] & {*self._places.nodes_of(group)},
        )
        self._restarter = Restarter(restarted, client, memory, self._news)
        self._way_home = WayHome(
            self._away_from_home, client, ranks.run_dir, announce, lambda start: start not in self._handled
        )
        self._smaller: dict[int, tuple[int, Sequence[NodePlace]]] = {}
        """Group that has not all its nodes -> its pipeline stages, and the places that it has on others."""
        self._places_of: dict[GroupStart, Sequence[NodePlace]] = {}
        """Of the starts in a smaller shape."""
        self._lost_on: dict[int, frozenset[int]] = {}
        """The nodes on which each group was lost the last time."""
        self._refused: set[int] = set()
        """Groups that are lost because of bad input that they found, and the others did not."""
        self._asked: set[GroupStart] = set()
        """Starts that were asked to leave, to come back in their home shape."""
        self._newest = {group: GroupStart(group, first_incarnation) for group in range(ranks.num_groups)}
        self._steps: dict[GroupStart, Child] = {}
        self._lent: dict[int, LentNode] = {}
        """Number of each node that was lent in this job attempt, also of those that have left."""
        self._all_lent = lent
        self._loop = asyncio.get_running_loop()
        self._places, self._announce = SlurmPlaces(ranks.allocation, ranks.group_size), announce
        self._names: dict[int, str] = {}
        """Of all nodes that the job began with, which the first look asks for, and of lent ones."""
        self._absences = Absences(self._newest.values())
        self._handled: set[GroupStart] = set()
        """The starts whose loss is known here."""

    @property
    def alive(self) -> bool:
        """Whether the step of a restart goes on."""
        return any(child.alive for child in self._steps.values()) or any(node.starts for node in self._lent.values())

    def errors(self) -> list[Path]:
        """The sentences of ranks that found a user's error. Where an earlier job attempt has trained with the same
        command, one of some groups is that of their nodes: these are lost, like one that was started again."""
        again = {start.group for start in self._newest.values() if start.restarts}
        found = {file: group_of(file) for file in self._ranks.run_dir.reported_errors()}
        found = {file: group for file, group in found.items() if group not in again}
        refused = self._refused.union(group for group in found.values() if group is not None)
        exits = [ExitCode.BAD_INPUT] * len(refused)
        if is_users_error(self._ranks.job_attempt, self._ranks.num_groups, exits):
            return list(found)
        for file, group in found.items():
            if group is not None and group not in self._refused:
                self._refuse(group, tail(file, LINES_SHOWN))
        return [file for file, group in found.items() if group is None]

    def _refuse(self, group: int, sentence: str) -> None:
        """A group has found bad input at its first start: it is lost. Before it has joined nobody else reports that."""
        self._refused.add(group)
        self._announce(f"group {group} cannot start: {sentence}")
        start, ended_s = self._newest[group], time.monotonic()
        self._restarter.note_error(start, sentence)
        exited = pb.Exited(group=group, incarnation=start.incarnation, status=ExitCode.BAD_INPUT)
        self._client.beside(self._client.tell("ReportExit", partial(with_age, exited, ended_s)))

    @property
    def children(self) -> list[Child]:
        """The sruns of all restarts."""
        return list(self._steps.values())

    async def watch(self) -> None:
        """Bring lost groups back until the job attempt is over."""
        if self._restarter.works:
            for node in self._all_lent.nodes:
                self.take(node)
            self._all_lent.user = self
            self._client.beside(self._notice_resumed())
        while self._restarter.works and not self._over():
            await asyncio.sleep(LOOK_S)
            status = glance(self._ranks.run_dir.status)
            if status is not None and (status["phase"], status["life"]) == ("running", self._ranks.job_attempt):
                newest, now_s = list(self._newest.values()), time.monotonic()
                for start in self._absences.gone(newest, named(status), now_s):
                    self._lost(start, failed=start.group not in status["drained"])
                for start in self._absences.late(newest, now_s):
                    self._restarter.note_error(start, LATE)
                    self._lost(start)

    def _lost(self, start: GroupStart, failed: bool = True) -> None:
        if start not in self._handled and not self._over():
            self._handled.add(start)
            self._smaller.pop(start.group, None)
            self._places.waits_no_more(start.group)
            self._lost_on[start.group] = frozenset(self._places.nodes_of(start.group))
            if failed:
                self._places.lost(start.group, time.monotonic())
            self._restarter.note(start, 0, ExitCode.FENCED)
            self._client.beside(self._bring_back(start))

    async def _bring_back(self, start: GroupStart) -> None:
        try:
            await self._restarter.bring_back(start)
        finally:
            if start.group not in self._smaller:
                self._places.waits_no_more(start.group)

    def _ended(self, start: GroupStart, status: int) -> None:
        """The ranks of a restart have ended, those of its step or on a lent node; ``status`` is their highest exit
        code."""
        if status == ExitCode.BAD_INPUT:
            sentences = self._ranks.run_dir.reported_errors(start.group)
            if sentences:
                self._restarter.note_error(start, tail(sentences[0], LINES_SHOWN))
        self._restarter.note(start, 0, status)
        self._lost(start, failed=start not in self._asked and start.group not in self._drained())

    # --------------------------------------------------------------------------------------------------------- steps

    async def _fault(self, start: GroupStart) -> HealthFault | None:
        """Why the nodes of a group cannot run it now."""
        over = threading.Event()
        try:
            look = await asyncio.to_thread(self._look, start, over.is_set)
        finally:
            over.set()
        others = look.moves.keys() - {start.group}
        # a group that is not whole may have gone to and fro between nodes none of which is fit
        self._tell({group: moves for group, moves in look.moves.items() if look.fault is None or group in others})
        for group in others:
            self._news.wake(group)
        self._smaller.pop(start.group, None)
        if self._can_be_as_before(start, look):
            return None
        smaller = look.fault is not None and self._can_be_smaller(
            start.group, look.fit, allowed_shapes(self._ranks.run_dir)
        )
        return None if smaller else look.fault

    def _can_be_as_before(self, start: GroupStart, look: NodesLook) -> bool:
        """Whether a group that has failed at home, before it was a member, can be again as it was; then it is."""
        before = self._way_home.before(start)
        if before is None or self._restarter.only_elsewhere(start):
            return False
        fit = {node for node, _ in self._places_of[before]}
        return self._can_be_smaller(
            start.group, fit if look.fault is None else fit.intersection(look.fit), [before.stages]
        )

    def _can_be_smaller(self, group: int, fit: Collection[int], stages: Sequence[int]) -> bool:
        """Whether a group can be in one of these smaller shapes on these nodes of its own; then it is."""
        ranks = self._ranks
        shapes = [(one, ranks_with(ranks.group_size, ranks.pipeline, one)) for one in stages]
        found = self._places.smaller(group, fit, shapes)
        if found is not None:
            self._smaller[group] = found
        return found is not None

    async def _away_from_home(self, start: GroupStart) -> HealthFault | None:
        """Why a group in a smaller shape could not have its other nodes now."""
        missed = self._places.missed_at_home(start.group)

        def fault(over: threading.Event) -> HealthFault | None:
            nodes = self._nodes()
            if nodes is None:
                return HealthFault("node", "Slurm does not name the nodes of the job")
            gone = {node: nodes.gone(node) for node in missed if node not in nodes.here}
            here = [node for node in missed if node not in gone]
            served = in_service([self._names[node] for node in here if node not in self._lent])
            here = [node for node in here if served.get(self._names[node], True)]
            for node in set(missed) - gone.keys() - set(here):
                gone[node] = HealthFault("node", f"{self._names[node]} is out of service")
            away = {**gone, **self._unfit(start, here, over.is_set)}
            if self._places.could_move(start.group, away, nodes.here):
                return None
            self._places.still_misses(start.group, {node: one.sentence for node, one in away.items()})
            return next(iter(away.values()))

        over = threading.Event()
        try:
            return await asyncio.to_thread(fault, over)
        finally:
            over.set()

    def _leaves_for_home(self, start: GroupStart) -> None:
        self._asked.add(start)
        self._restarter.asked_to_leave(start)

    def _stays(self, start: GroupStart) -> None:
        self._asked.discard(start)
        self._restarter.stays(start)

    def _tell(self, all_moves: Mapping[int, Sequence[Move]]) -> None:
        for group, moves in all_moves.items():
            for move in moves:
                kind = "lent" if move.other in self._lent else "spare"
                whose = f"the {kind} node " if move.giver is None else ""
                of = "" if move.giver is None else f" of group {move.giver}, which waits for nodes too"
                there = f"{whose}{self._names[move.other]}{of}"
                self._announce(f"group {group} moves from {self._names[move.node]} to {there}: {move.why}")

    def _look(self, start: GroupStart, over: Callable[[], bool]) -> NodesLook:
        nodes = self._nodes()
        if nodes is None:
            return NodesLook(HealthFault("node", "Slurm does not name the nodes of the job"))
        wrong = self._restarter.only_elsewhere(start)
        if wrong or self._restarter.only_away(start):
            nodes = replace(nodes, left=self._lost_on[start.group], wrong=wrong)
        return look_at_nodes(self._places, start.group, nodes, lambda some: self._unfit(start, some, over))

    def _nodes(self) -> JobNodes | None:
        """What Slurm, and those who lend, say of the nodes; None where Slurm does not."""
        own = range(self._ranks.allocation.num_nodes)
        if not self._names.keys() >= set(own):
            names = node_names(self._ranks.allocation.node_list)
            self._names.update(zip(own, names, strict=False))
            self._places.racks = dict(enumerate(racks_of(names)))
        here = set(node_names(reported_of(self._ranks.allocation.job).get("NodeList", "")))
        if not self._names.keys() >= set(own) or not here:
            return None
        served = in_service(sorted(here))
        self._places.last = frozenset(node for node in own if not served.get(self._names[node], True))
        usable = {node for node, lent in list(self._lent.items()) if lent.usable}
        usable |= {node for node in own if self._names[node] in here}
        return JobNodes(self._names, usable, self._drained(), set(self._lent))

    def _drained(self) -> list[int]:
        """The groups that are drained, by status.json."""
        drained: list[int] = (glance(self._ranks.run_dir.status) or {}).get("drained", [])
        return drained

    def _unfit(self, start: GroupStart, nodes: Collection[int], over: Callable[[], bool]) -> dict[int, HealthFault]:
        """Sweep and check nodes, each by itself, as the others are fit all the same; why those that cannot run the
        group cannot."""
        with ThreadPoolExecutor(AT_ONCE, "nodes") as pool:
            faults = pool.map(lambda node: self._checked(start, node, over), nodes)
            return {node: fault for node, fault in zip(nodes, faults, strict=True) if fault is not None}

    def _checked(self, start: GroupStart, number: int, over: Callable[[], bool]) -> HealthFault | None:
        """Kill what is left of a group on a node, and run the user's check there."""
        ranks, node = self._ranks, self._names[number]
        if number in self._lent:
            asked = self._lent[number].check(start.group, ranks.health_check)
            try:
                return asyncio.run_coroutine_threadsafe(asked, self._loop).result(SWEEP_LIMIT_S + COMMAND_LIMIT_S)
            except TimeoutError:
                return HealthFault("node", f"the lent node {node} does not answer")
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
        found = run_command(step, limit_s, self._processes.guard, over, environ=environ, receive_all=True)
        if found.status == 0:
            return None
        return HealthFault(kind, f"{node}: {what}{found.words(limit_s)}")

    def _begin(self, start: GroupStart) -> None:
        ranks, group = self._ranks, start.group
        stages, some = self._smaller.get(group, (0, self._places.of(group)))
        start, places = replace(start, stages=stages), list(enumerate(some))
        own = [(position, place) for position, place in places if place[0] not in self._lent]
        environ = {
            **ranks.environ,
            "SPARE_GROUP": str(group),
            "SPARE_NUM_GROUPS": str(ranks.num_groups),
            "SPARE_INCARNATION": str(start.incarnation),
            "SPARE_RESTARTS": str(start.restarts),
            **({STAGES: str(stages)} if stages else {}),
        }
        for node in {place[0] for _, place in places} - {place[0] for _, place in own}:
            self._begin_lent(start, node, [(m, place[1]) for m, place in places if place[0] == node], environ)
        self._newest[group] = start
        if own:
            self._begin_own(start, own, environ, len(places))
        if stages:
            self._places_of[start] = some
            self._client.beside(self._way_home.bring_home(start, self._leaves_for_home, self._stays))
        else:
            self._client.beside(self._way_home.try_home(start))

    def _begin_lent(
        self, start: GroupStart, node: int, ranks: Sequence[tuple[int, int]], environ: Mapping[str, str]
    ) -> None:
        """Start the ranks (position, local number) of a group that are on a lent node."""
        log = self._ranks.run_dir.log_of
        seats = [
            pb.RankPlace(position=m, local_rank=local, log=str(log(start.group, m, start.incarnation)))
            for m, local in ranks
        ]
        order = start_order(start, self._ranks.command[1:], {**environ, LENT_TO: "slurm"}, seats)
        self._lent[node].start(start, order, lambda status: self._ended(start, status))

    def _begin_own(
        self, start: GroupStart, own: Sequence[tuple[int, NodePlace]], environ: Mapping[str, str], size: int
    ) -> None:
        """Start those of ``size`` ranks of a group that are on nodes of the job, as a step."""
        ranks, group = self._ranks, start.group
        hosts = ranks.run_dir.logs / f"group-{group}" / f"hosts.incarnation-{start.incarnation}"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text("".join(f"{self._names[node]}\n" for _, (node, _) in own))
        environ = {**environ, "SPARE_LOCAL_RANK_FROM": str(own[0][1][1]), "SLURM_HOSTFILE": str(hosts)}
        log = str(ranks.run_dir.log_of(group, 0, start.incarnation)).replace("rank-0.", "rank-%t.")
        if len(own) < size:
            environ[POSITIONS] = ",".join(str(position) for position, _ in own)
            log = log.replace("rank-%t.", "task-%t.")
        # the file of hosts reports it all, and newer versions take no number of nodes beside it
        for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            environ.pop(name, None)
        self._steps[start] = self._processes.start(
            f"group {group}",
            [
                *(*SRUN, "--no-kill", "--open-mode=append", "--overlap", "--distribution=arbitrary"),
                *(f"--ntasks={len(own)}", f"--output={log}"),
                *(*ranks.srun_options, f"--job-name={ranks.step_name}-group-{group}", *ranks.command),
            ],
            environ,
            self._log(start),
            ended=lambda child: self._ended(start, child.status if child.status is not None else 1),
        )

    # ----------------------------------------------------------------------------------------- nodes that come and go

    def take(self, node: LentNode) -> None:
        """A node is lent: it is for groups that wait, and spare where none does."""
        number = self._places.add_node(node.places)
        self._names[number], self._lent[number] = node.name, node
        self._client.beside(self._salvage())

    async def _salvage(self) -> None:
        """Give the nodes that there are to groups that wait."""

        def salvaged() -> dict[int, list[Move]]:
            nodes = self._nodes()
            return self._places.salvage(nodes.here, nodes.drained) if nodes is not None else {}

        moves = await asyncio.to_thread(salvaged)
        self._tell(moves)
        for group in moves:
            self._news.wake(group)

    async def leave(self, node: LentNode, why: str) -> None:
        """Let the groups with ranks on a lent node leave with a commit; then they are started elsewhere, or wait. Who
        cannot leave yet is asked again: it is still starting, or others cannot do without it. It is lost with the node
        where that does not change."""
        reason, reported, groups = f"the lent node {node.name} is to leave ({why})", set[str](), set[int]()
        while node.starts and not self._over():
            rest = [start for start in node.starts if start not in self._asked]
            # all with one commit; if that cannot be, those that can
            for some in (rest, *([start] for start in rest if len(rest) > 1)):
                refusal = await self._let_leave(some, reason) if some else ""
                if not refusal:
                    groups |= {start.group for start in some}
                    if some == rest:
                        break
                elif len(some) == 1 and refusal not in reported:
                    reported.add(refusal)
                    self._announce(f"group {some[0].group} cannot leave the lent node {node.name} yet: {refusal}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.until_empty(), DRAINED_S)
        await node.until_empty()
        if groups and not self._over():
            has_left = f"the lent node {node.name} has left"
            await drain_for_now(self._client, sorted(groups), has_left, undo=True)

    async def _let_leave(self, starts: Sequence[GroupStart], reason: str) -> str:
        """Ask that groups leave for now, which counts as no restart; why they stay, empty where they leave."""
        for start in starts:
            self._asked.add(start)
            self._restarter.asked_to_leave(start, NODE_LEFT)
        answer = await drain_for_now(self._client, sorted({start.group for start in starts}), reason)
        refusal = "" if answer is None else answer.refusal
        if refusal:
            for start in starts:
                self._stays(start)
        return refusal

    def lose(self, node: LentNode) -> None:
        """A lent node has left."""
        for number, one in self._lent.items():
            if one is node:
                self._places.close_node(number)

    async def _notice_resumed(self) -> None:
        """Wake groups that wait for a node of the job which Slurm takes for alive again."""
        out: set[str] = set()
        while not self._over():
            await asyncio.sleep(RESUMED_LOOK_S)
            waiting = {
                group: {self._names[node] for node in nodes if node not in self._lent}
                for group, nodes in self._places.waiting().items()
            }
            names = sorted(set().union(*waiting.values()))
            served = await asyncio.to_thread(in_service, names) if names else {}
            back = {name for name in out if served.get(name)}
            out = {name for name, serves in served.items() if not serves}
            for name in sorted(back):
                self._announce(f"{name} is in service again")
            for group in sorted(group for group, missed in waiting.items() if missed & back):
                self._news.wake(group)

    def _log(self, start: GroupStart) -> Path:
        return self._ranks.run_dir.logs / f"srun-group-{start.group}.incarnation-{start.incarnation}.log"
