"""What becomes of a group under Slurm that finds bad input at its first start, fails on its way home, or is on a lent
node that is to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.allocation import Allocation
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.launch import slurm_groups
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupRestarts, GroupStart, Incarnations, LaunchMemory
from spare_megatron.launch.lent_nodes import LentNode, LentNodes
from spare_megatron.launch.node_looks import JobNodes, NodesLook
from spare_megatron.launch.slurm_groups import NODE_LEFT, SlurmGroups, SlurmRanks
from spare_megatron.runtime.run_directory import RunDirectory, write_json
from tests.pure.test_run_files import STATUS

GROUPS, SIZE = 3, 2


class Client:
    """Notes what is sent to coordinators."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    async def tell(self, method: str, request: Callable[[], Any]) -> None:
        self.sent.append((method, request()))

    def beside(self, task: Coroutine[Any, Any, None]) -> None:
        asyncio.get_running_loop().create_task(task)


class Job:
    """A job attempt of groups of two nodes and two pipeline stages."""

    def __init__(self, folder: Path, number: int, spares: int = 0) -> None:
        self.run_dir, self.lines, client = RunDirectory(folder), list[str](), Client()
        self.client: Any = client
        nodes = GROUPS * SIZE + spares
        ranks = SlurmRanks(
            allocation=Allocation("7", nodes, nodes, tasks_of_nodes=(1,) * nodes).with_spares(GROUPS, SIZE),
            run_dir=self.run_dir,
            group_size=SIZE,
            pipeline=SIZE,
            command=("python",),
            srun_options=(),
            health_check="",
            job_attempt=number,
            step_name="step",
            environ={},
        )
        memory: Any = LaunchMemory(GroupRestarts(3), Incarnations())
        nothing: Any = None
        lent: LentNodes = nothing
        self.groups = SlurmGroups(
            ranks,
            4,
            nothing,
            self.client,
            memory=memory,
            announce=self.lines.append,
            over=lambda: False,
            first_alive=lambda: True,
            lent=lent,
        )

    async def refused(self, *groups: int) -> list[str]:
        """The sentences that end the job once a rank of each of ``groups`` has found bad input."""
        for group in groups:
            self.run_dir.report_error(f"group-{group}-rank-1-{group}", f"group {group} has no such device")
        for _ in range(2):  # each is sent once
            found = [file.read_text().strip() for file in self.groups.errors()]
        await asyncio.sleep(0)
        return found


def test_bad_input_ends_the_first_job_attempt(tmp_path: Path) -> None:
    async def play() -> None:
        job = Job(tmp_path, 1)
        assert await job.refused(2) == ["group 2 has no such device"]
        assert job.client.sent == []

    asyncio.run(play())


def test_in_later_job_attempts_it_is_a_loss_unless_all_groups_find_it(tmp_path: Path) -> None:
    async def play() -> None:
        job = Job(tmp_path, 2)
        assert await job.refused(2) == []
        assert job.lines == ["group 2 cannot start: group 2 has no such device"]
        [(method, exited)] = job.client.sent
        assert (method, exited.group, exited.incarnation, exited.status) == ("ReportExit", 2, 4, 2)
        assert await job.refused(0) == []
        assert len(job.client.sent) == 2
        assert len(await job.refused(1)) == GROUPS

    asyncio.run(play())


def test_bad_input_of_a_rank_that_knows_no_group_ends_any_job_attempt(tmp_path: Path) -> None:
    async def play() -> None:
        job = Job(tmp_path, 2)
        job.run_dir.report_error("rank-17", "no such flag")
        assert await job.refused(1) == ["no such flag"]

    asyncio.run(play())


@pytest.mark.parametrize("bad", [2, 3])
def test_a_group_that_fails_at_home_is_again_on_the_node_that_it_left(tmp_path: Path, bad: int) -> None:
    """Group 1 of nodes 2 and 3 has one stage on the one that is not ``bad``, whose check passes when the group is to
    go home, but it fails there."""
    good = 5 - bad

    async def play() -> None:
        job = Job(tmp_path, 1)
        groups: Any = job.groups
        groups._begin_own = lambda start, own, environ, size: None
        unfit, fit = NodesLook(HealthFault("node", "it is away"), fit={good}), NodesLook()
        first, home = GroupStart(1, 5, 1), GroupStart(1, 6, 2)
        assert groups._can_be_smaller(1, unfit.fit, [1])
        groups._begin(first)
        odd = groups._newest[1]
        assert (odd.stages, [node for node, _ in groups._places_of[odd]]) == (1, [good])
        groups._way_home._ways[1] = odd, 1  # it has left for home
        groups._smaller.pop(1)
        groups._begin(home)
        await asyncio.sleep(0)
        groups._look = lambda start, over: fit
        assert await groups._fault(home) is None
        groups._begin(GroupStart(1, 7, 3))
        again = groups._newest[1]
        assert (again.stages, [node for node, _ in groups._places_of[again]]) == (1, [good])

    asyncio.run(play())


def test_groups_leave_a_lent_node_once_each_can_and_none_of_these_losses_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group 1 is still starting there, and others cannot do without group 2."""
    monkeypatch.setattr(slurm_groups, "DRAINED_S", 0.0)

    async def play() -> None:
        job, node, starts = Job(tmp_path, 1), LentNode("n9", 3), [GroupStart(group, 5, 1) for group in range(GROUPS)]
        groups: Any = job.groups
        cannot = {1: "group 1 is not among them", 2: "group 2 is the last live host"}
        asked, lost = list[list[int]](), list[tuple[int, bool]]()

        async def tell(method: str, request: pb.DrainRequest, _: object) -> pb.DrainAnswer:
            asked.append(list(request.groups))
            if request.undo:
                assert len(lost) == GROUPS
            elif stuck := [cannot[group] for group in request.groups if group in cannot]:
                cannot.pop(len(asked) // 8, None)  # some requests later the group can leave
                return pb.DrainAnswer(refusal=stuck[0])
            else:
                for group in request.groups:
                    node.receive(pb.AgentReport(ended=pb.RanksEnded(group=group, incarnation=5)))
            return pb.DrainAnswer()

        job.client.tell = tell
        groups._lost = lambda start, failed: lost.append((start.group, failed))
        for start in starts:
            node.start(start, pb.StartRanks(), lambda status, start=start: groups._ended(start, status))  # type: ignore[misc]
        await groups.leave(node, "it was asked to leave")
        write_json(job.run_dir.status, STATUS | {"drained": [1]})
        groups._ended(GroupStart(1, 6, 2), 0)  # drained by an operator
        assert [group for group, _ in lost] == [0, 1, 2, 1]
        assert not any(failed for _, failed in lost), "its nodes are as good as before"
        assert [groups._restarter._uncounted(start) for start in starts] == [NODE_LEFT] * GROUPS
        assert asked[:4] == [[0, 1, 2], [0], [1], [2]], "one commit is tried first"
        assert asked[-1] == [0, 1, 2], "then they may be started elsewhere"
        assert job.lines == [
            f"group {group} cannot leave the lent node n9 yet: {why}"
            for group, why in ((1, "group 1 is not among them"), (2, "group 2 is the last live host"))
        ]

    asyncio.run(asyncio.wait_for(play(), 20))


def test_a_group_leaves_its_nodes_where_the_coordinator_keeps_it_away_whatever_the_status_says(tmp_path: Path) -> None:
    """status.json names a group that was drained for now after the coordinator has taken that back; an operator's drain
    may not be there yet."""

    async def play() -> None:
        job, start = Job(tmp_path, 1), GroupStart(1, 5)
        groups: Any = job.groups
        names = {node: f"n{node}" for node in range(GROUPS * SIZE)}
        groups._lost_on[1], groups._unfit = frozenset({2, 3}), lambda *_: {}
        groups._nodes = lambda: JobNodes(names, set(names), drained=[1])
        assert groups._look(start, lambda: False).fault is None
        groups._nodes = lambda: JobNodes(names, set(names))
        groups._restarter._resting.add(start)
        assert groups._look(start, lambda: False).fault == HealthFault("node", "n2 is drained")

    asyncio.run(play())


def test_a_spare_node_that_is_out_of_service_is_taken_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator drains n6, which is spare; n7 is spare too."""
    names = [f"n{node}" for node in range(GROUPS * SIZE + 2)]
    monkeypatch.setattr(slurm_groups, "node_names", lambda _: names)
    monkeypatch.setattr(slurm_groups, "reported_of", lambda _: {"NodeList": "n[0-7]"})
    monkeypatch.setattr(slurm_groups, "racks_of", lambda _: ["a"] * 7 + ["b"])
    monkeypatch.setattr(slurm_groups, "in_service", lambda asked: {name: name != "n6" for name in asked})

    async def play() -> None:
        groups: Any = Job(tmp_path, 1, spares=2).groups
        groups._unfit = lambda start, nodes, over: {node: HealthFault("node", "broken") for node in nodes if node < 2}
        assert [move.other for move in groups._look(GroupStart(0, 5), lambda: False).moves[0]] == [7, 6]

    asyncio.run(play())
