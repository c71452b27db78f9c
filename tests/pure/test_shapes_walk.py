"""Random walks of what a launcher decides about shapes: devices die and come back, groups are lost, in smaller shapes
too, drains are refused, or their answers lost, users drain groups. With the real restarter, and time that passes by
itself."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.job import JobDescription
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.launch import group_shapes, restarter
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupRestarts, GroupStart, Incarnations, LaunchMemory
from spare_megatron.launch.group_shapes import GroupShapes, WayHome
from spare_megatron.launch.restarter import RestartedJob, Restarter
from spare_megatron.protocol.codec import encode
from spare_megatron.protocol.draining import wanted
from spare_megatron.protocol.machine import initial_state
from spare_megatron.protocol.messages import DrainRequested
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.test_run_files import STATUS

GROUPS, DEVICES, HOUR_S = 3, 4, 3600.0


class SkippingLoop(asyncio.SelectorEventLoop):
    """Does not wait for time to pass."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Job:
    """Groups on hosts with four devices each, and the coordinator that they talk to."""

    def __init__(self, directory: Path, seed: int, restarts: int = 10**6) -> None:
        self.choose = random.Random(seed)
        self.dead: list[set[int]] = [set() for _ in range(GROUPS)]
        self.lies: set[int] = set()
        """Groups whose host seems to be fit for the home shape, until the group has left for that."""
        self.traps: set[int] = set()
        """Groups that fail in the home shape, for which their host seems to be fit."""
        self.here: dict[int, GroupStart] = {group: GroupStart(group, 0) for group in range(GROUPS)}
        self.members = set(self.here.values())
        self.state = initial_state()
        """Of the coordinator: who is to leave."""
        self.starts: list[GroupStart] = []
        self.refused = self.left = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.run_dir = RunDirectory(directory)
        self.run_dir.job.write_text(json.dumps(encode(JobDescription(smaller_shapes=(2, 1)))))
        self.publish()
        client: Any = self
        self.way_home = WayHome(self.home_fault, client, self.run_dir, lambda line: None, self.is_left)
        self.shapes = GroupShapes(lambda stages: DEVICES - stages, self.fault, self.run_dir, self.way_home.before)
        incarnations = Incarnations()
        incarnations.first(GROUPS, -1)
        job = RestartedJob(
            trains=lambda: True,
            over=lambda: False,
            fault=self.shapes.fault,
            begin=self.begin,
            announce=lambda line: None,
            is_left=lambda group: group in self.here,
            before=self.way_home.before,
        )
        self.restarter = Restarter(job, client, LaunchMemory(GroupRestarts(restarts), incarnations))

    def publish(self) -> None:
        live = {str(one.group): one.incarnation for one in self.members}
        self.run_dir.status.write_text(json.dumps({**STATUS, "live": live, "drained": sorted(self.state.drained)}))

    def is_left(self, start: GroupStart) -> bool:
        here = self.here.get(start.group)
        return here is not None and here.member == start.member

    # ------------------------------------------------------------------------------------------------------ the host

    def used(self, start: GroupStart) -> set[int]:
        return set(range(start.first, start.first + (start.stages or DEVICES)))

    async def fault(self, start: GroupStart) -> HealthFault | None:
        await asyncio.sleep(self.choose.uniform(0.0, 2.0))
        lies = start.group in self.lies and not start.stages
        return HealthFault("device", "dead") if lies or self.used(start) & self.dead[start.group] else None

    async def home_fault(self, start: GroupStart) -> HealthFault | None:
        await asyncio.sleep(self.choose.uniform(0.0, 2.0))
        return HealthFault("device", "dead") if self.dead[start.group] else None

    def begin(self, start: GroupStart) -> None:
        start = self.shapes.chosen(start)
        assert start.group not in self.here, f"{start} is started beside {self.here[start.group]}"
        assert start.group not in self.state.drained, f"{start} is started, which is to be out"
        self.here[start.group] = start
        self.starts.append(start)
        self.beside(self.learn(start))
        if start.stages:
            self.beside(self.way_home.bring_home(start, self.restarter.asked_to_leave, self.restarter.stays))
        else:
            self.beside(self.way_home.try_home(start))
        if self.used(start) & self.dead[start.group]:
            self.lose(start)

    async def learn(self, start: GroupStart) -> None:
        await asyncio.sleep(self.choose.uniform(3.0, 40.0))
        if start.group in self.traps and not start.stages:
            self.lose(start)
        if self.is_left(start):
            self.members.add(start)
            self.publish()

    def lose(self, start: GroupStart) -> None:
        if self.is_left(start):
            del self.here[start.group]
            self.members.discard(start)
            self.publish()
            self.restarter.note(start, 0, 1)
            self.beside(self.restarter.bring_back(start))

    def beside(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)

    # ----------------------------------------------------------------------------------------------- the coordinator

    async def ask_restart(self, group: int, incarnation: int) -> pb.RestartAnswer:
        await asyncio.sleep(0.01)
        drained, for_now = group in self.state.drained, group in self.state.drained_for_now
        return pb.RestartAnswer(now=not drained, drained=drained and not for_now, highest_incarnation=incarnation)

    async def tell(self, method: str, request: pb.DrainRequest, answer: Any) -> pb.DrainAnswer:
        await asyncio.sleep(self.choose.uniform(0.0, 1.0))
        [group] = request.groups
        for _ in range(self.choose.choice((0, 0, 1, 2))):  # nothing can be written down, or the answer is lost
            if self.choose.random() < 0.5:
                return pb.DrainAnswer(refusal="not now", undecided=True)
            self.drain(group, undo=request.undo, for_now=request.for_now)
            await asyncio.sleep(self.choose.uniform(0.0, 10.0))
        return pb.DrainAnswer(refusal=self.drain(group, undo=request.undo, for_now=request.for_now))

    def drain(self, group: int, *, undo: bool, for_now: bool = False) -> str:
        drained, lasting = self.state.drained, wanted(self.state, DrainRequested((group,), "", undo, for_now))
        if not undo and group not in drained and not {one.group for one in self.members} - drained - {group}:
            self.refused += 1
            return f"nobody can do without group {group}"
        self.state = replace(self.state, drained=lasting[0], drained_for_now=lasting[1])
        if not undo and group not in drained:
            self.beside(self.leave(group))
        self.publish()
        return ""

    async def leave(self, group: int) -> None:
        await asyncio.sleep(self.choose.uniform(0.1, 5.0))
        if group in self.state.drained and group in self.here:
            self.left += 1
            self.lose(self.here[group])

    # --------------------------------------------------------------------------------------------------------- walks

    async def walk(self, seconds: float) -> None:
        """Faults and repairs, one every few seconds to minutes."""
        end_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(self.choose.expovariate(1 / 40.0))
            group = self.choose.randrange(GROUPS)
            start = self.here.get(group)
            match self.choose.choice(("break", "break", "mend", "mend", "lose", "drain", "undo")):
                case "break":
                    self.dead[group] |= set(self.choose.sample(range(DEVICES), self.choose.choice((1, 1, 3))))
                    if start is not None and self.used(start) & self.dead[group]:
                        self.lose(start)
                case "mend":
                    self.dead[group].clear()
                case "lose" if start is not None:
                    self.lose(start)
                case "drain" | "undo" as word:
                    self.drain(group, undo=word == "undo")

    def check(self) -> None:
        """No task has failed."""
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.discard(task)
            task.result()


def play(monkeypatch: pytest.MonkeyPatch, job: Job, story: Any) -> None:
    loop = SkippingLoop()
    monkeypatch.setattr(restarter, "time", SimpleNamespace(monotonic=loop.time))

    async def whole() -> None:
        await story()
        job.check()
        for task in job.tasks:
            task.cancel()
        await asyncio.gather(*job.tasks, return_exceptions=True)

    try:
        loop.run_until_complete(whole())
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(8))
def test_all_groups_are_home_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    job = Job(tmp_path, seed)

    async def story() -> None:
        await job.walk(HOUR_S)
        for group in range(GROUPS):
            job.dead[group].clear()
            job.drain(group, undo=True)
        await asyncio.sleep(HOUR_S)
        assert {one.group for one in job.members} == set(range(GROUPS))
        assert [one.stages for one in job.here.values()] == [0] * GROUPS
        starts, _ = len(job.starts), job.check()
        await asyncio.sleep(HOUR_S)
        assert len(job.starts) == starts, "a group that is home is started again"

    play(monkeypatch, job, story)
    assert {one.stages for one in job.starts} > {0}
    assert job.left, "no group went home"


def test_a_host_that_only_seems_to_be_fit_is_tried_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, 5)

    async def story() -> None:
        job.dead[1] = {3}
        job.lose(job.here[1])
        await asyncio.sleep(60.0)
        job.dead[1], job.lies = set(), {1}
        await asyncio.sleep(HOUR_S)
        tries = len(job.starts)
        assert 5 <= tries <= 16
        assert all(one.stages == 2 for one in job.starts[1:])
        job.lies.clear()
        await asyncio.sleep(group_shapes.HOME_LOOK_S * group_shapes.HOME_LOOKS_MOST + 120.0)
        assert job.here[1].stages == 0
        assert replace(job.here[1], incarnation=0) == GroupStart(1, 0, tries + 1)

    play(monkeypatch, job, story)


def test_a_start_at_home_that_fails_is_as_a_look_that_finds_the_host_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group goes on in the shape that worked, on the same devices, and no restart is spent."""
    job = Job(tmp_path, 5, restarts=2)

    async def story() -> None:
        job.dead[1] = {0}
        job.lose(job.here[1])
        await asyncio.sleep(60.0)
        job.dead[1], job.traps = set(), {1}
        await asyncio.sleep(HOUR_S / 2)
        assert {(one.stages, one.first) for one in job.starts} == {(0, 0), (2, 2)}
        assert 8 <= len(job.starts) <= 24
        job.traps.clear()
        await asyncio.sleep(group_shapes.HOME_LOOK_S * group_shapes.HOME_LOOKS_MOST + 120.0)
        assert job.here[1] in job.members
        assert job.here[1].stages == 0
        assert job.way_home.before(job.here[1]) is None, "its loss would count as none"

    play(monkeypatch, job, story)


def test_a_group_that_nothing_can_do_without_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, 5)

    async def story() -> None:
        job.dead[1] = {3}
        job.lose(job.here[1])
        await asyncio.sleep(60.0)
        for other in (0, 2):
            job.dead[other] = set(range(DEVICES))
            job.lose(job.here[other])
        job.dead[1] = set()
        await asyncio.sleep(60.0)
        assert job.refused > 1
        assert job.here[1].stages == 2
        assert job.here[1] not in job.restarter._asked, "its loss would count as no restart"
        job.dead[0] = set()
        await asyncio.sleep(HOUR_S / 4)
        assert job.here[1].stages == 0

    play(monkeypatch, job, story)
