"""Random walks of what spare-launch decides about standbys: processes die, stop, or cannot be killed, in groups and in
standbys, and operators drain groups. With a real job attempt; its processes and its coordinator are acted, and time
passes by itself."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import PLACE_FILE
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.coordinator.call_answers import RestartAnswers
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.launch import (
    group_restarts,
    job_attempt,
    rank_process,
    rank_processes,
    refills,
    restarter,
    standbys,
)
from spare_megatron.launch.group_restarts import GroupRestarts, Incarnations, LaunchMemory
from spare_megatron.launch.job_attempt import LocalAttempt
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.runtime.disk import SideFiles
from spare_megatron.runtime.run_directory import RunDirectory, waits_file
from tests.pure.test_run_files import STATUS
from tests.pure.test_shapes_walk import SkippingLoop

GROUPS, SIZE, SILENT_S = 3, 2, 2.0
FAULTS = (*("kill", "stop", "stick", "undo") * 2, "standby", "drain", "go on")
Member = tuple[int, int]


class Child:
    """A process."""

    def __init__(self, world: World, name: str, pid: int, environ: Mapping[str, str], ended: Any) -> None:
        self.world, self.name, self.pid, self.environ, self._ended = world, name, pid, dict(environ), ended
        self.device, self.position = int(environ["LOCAL_RANK"]), int(environ["SPARE_POSITION"])
        self.status: int | None = None
        self.stopped = self.stuck = False
        """Whether a signal has stopped it; whether it hangs in the kernel, and cannot be killed."""
        self.still_s = 0.0
        """For how long it has not run."""

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped and not self.stuck

    @property
    def waits(self) -> bool:
        """For a place, since it has done all else."""
        return waits_file(Path(self.environ.get(PLACE_FILE, "/none")), self.pid).exists()

    @property
    def member(self) -> Member | None:
        """Of which start of a group it knows that it is a rank."""
        if PLACE_FILE in self.environ:
            return None
        return int(self.environ["SPARE_GROUP"]), int(self.environ["SPARE_INCARNATION"])

    def signal(self, number: int) -> None:
        assert number == signal.SIGKILL
        asyncio.get_running_loop().call_later(0.01, self.end, -number)

    def end(self, status: int) -> None:
        if self.alive and not self.stuck:
            self.status = status
            self._ended(self)

    async def live(self) -> None:
        """Start, wait for a place where that is to be, and say that it is there."""
        await asyncio.sleep(self.world.choose.uniform(1.0, 6.0))
        hangs = self.world.choose.random() < self.world.hanging
        if PLACE_FILE in self.environ:
            place = Path(self.environ[PLACE_FILE])
            await self.until(lambda: self.runs)
            waits_file(place, self.pid).touch()
            await self.until(lambda: self.runs and place.exists())
            del self.environ[PLACE_FILE]
            self.environ |= json.loads(place.read_text())["environ"]
        await self.until(lambda: self.runs and not hangs)
        self.world.arrived(self)

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0.5)


class World:
    """A host with a job on it. It is the launcher's ``Processes`` and its ``CoordinatorClient`` too."""

    def __init__(self, directory: Path, seed: int, standbys: int = 1, restarts: int = 10**6) -> None:
        self.choose, self.run_dir, self.lines = random.Random(seed), RunDirectory(directory), list[str]()
        self.children: list[Child] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.learners: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.highest: dict[int, int] = {}
        self.drained: frozenset[int] = frozenset()
        self.wrong: dict[Member, str] = {}
        """Starts of groups whose results were wrong -> why."""
        self.bad: set[int] = set()
        """The devices on which they were."""
        self.here: dict[Member, list[Child]] = {}
        self.hanging = 0.0
        """How often a process hangs before it is there."""
        self.failing = 0.0
        """How often a process cannot be started, and a place not be written for sure."""
        self.idle_s = 0.0
        """For how long a standby has waited while a group is out."""
        self._pids = itertools.count(1)
        self.guard = None
        self.spare_devices = SIZE * standbys
        flags = LauncherFlags(
            group_size=SIZE, max_group_restarts=restarts, group_restart_pause_s=0.1, standby_groups=standbys
        )
        counts = GroupRestarts(restarts, 0.1), GroupRestarts(10**6, 0.1)
        self.attempt = LocalAttempt(
            Launch(GROUPS, SIZE, self.run_dir, ("rank",), flags, environ={}),
            self,  # type: ignore[arg-type]
            1,
            LaunchMemory(counts[0], Incarnations(), refills=counts[1]),
            own=OwnCheckpoints(self.run_dir, "the job"),
            announce=self.lines.append,
            side=SideFiles(self.lines.append),
            stopped_hard=asyncio.Event(),
            preloaded=SimpleNamespace(fork=None),  # type: ignore[arg-type]
        )

    # -------------------------------------------------------------------------------------------------- the processes

    def start(
        self, name: str, command: Any, environ: Mapping[str, str], out: Path, *, ended: Any, fork: Any = None
    ) -> Child:
        if self.choose.random() < self.failing:
            raise OSError(errno.EAGAIN, "no process can be started")
        made = Child(self, name, next(self._pids), environ, ended)
        beside = [one.name for one in self.children if one.alive and one.device == made.device]
        assert made.device not in self.bad, f"{name} is started on device {made.device}, whose results were wrong"
        assert not beside, f"{name} is started on device {made.device} beside {beside}: {self.lines[-8:]}"
        self.children.append(made)
        self.beside(made.live())
        return made

    def of(self, group: int) -> list[Child]:
        """The living processes of the present incarnation of a group."""
        return [one for one in self.here.get((group, self.live.get(group, -1)), ()) if one.alive]

    def waiting(self) -> list[list[Child]]:
        """The processes of each standby that could take a place."""
        of: dict[str, list[Child]] = {}
        for one in self.children:
            if PLACE_FILE in one.environ and one.alive:
                of.setdefault(one.environ[PLACE_FILE], []).append(one)
        return [ranks for ranks in of.values() if len(ranks) == SIZE and all(one.waits and one.runs for one in ranks)]

    def give_place(self, run_dir: RunDirectory, name: str, environ: Mapping[str, str]) -> None:
        """Where it cannot be written for sure, it may be there all the same."""
        fails = self.choose.random() < self.failing
        if not fails or self.choose.random() < 0.5:
            rank_process.give_place(run_dir, name, environ)
        if fails:
            raise OSError(errno.EIO, "nobody knows")

    # ------------------------------------------------------------------------------------------------ the coordinator

    @property
    def state(self) -> Any:
        present = {**self.learners, **self.live}
        return SimpleNamespace(
            phase="running",
            leave=False,
            drained=self.drained,
            drained_for_now=frozenset(),
            highest=self.highest,
            incarnation_of=present.get,
        )

    def publish(self) -> None:
        named = {who: {str(g): i for g, i in getattr(self, who).items()} for who in ("live", "learners")}
        self.run_dir.status.write_text(json.dumps({**STATUS, **named, "drained": sorted(self.drained)}))

    def arrived(self, child: Child) -> None:
        """A rank reaches its group's leader."""
        assert child.member is not None
        ranks = self.here.setdefault(child.member, [])
        ranks.append(child)
        group, incarnation = child.member
        if len(ranks) < SIZE or not all(one.alive for one in ranks):
            return
        assert incarnation > self.highest.get(group, -1), f"incarnation {incarnation} of group {group} comes twice"
        assert group not in self.live, f"group {group} comes while it lives"
        self.highest[group] = incarnation
        self.drained -= {group}
        if incarnation == 0:
            self.live[group] = 0
        else:
            self.learners[group] = incarnation
            self.beside(self.learn(child.member))
        self.publish()

    async def learn(self, member: Member) -> None:
        await asyncio.sleep(self.choose.uniform(1.0, 5.0))
        if self.learners.get(member[0]) == member[1]:
            self.live[member[0]] = self.learners.pop(member[0])
            self.publish()

    def lose(self, member: Member) -> None:
        """A group is lost: its processes that run leave."""
        for there in (self.live, self.learners):
            if there.get(member[0]) == member[1]:
                del there[member[0]]
        self.publish()

    async def watch(self) -> None:
        """Lose the groups that are silent; who is lost and runs leaves."""
        while True:
            await asyncio.sleep(0.5)
            present = {*self.live.items(), *self.learners.items()}
            self.idle_s = self.idle_s + 0.5 if len(present) < GROUPS and self.waiting() else 0.0
            assert self.idle_s < 45.0, f"a standby waits, and there are only {present}"
            for member, ranks in self.here.items():
                for one in ranks:
                    one.still_s = 0.0 if one.runs else one.still_s + 0.5
                    if member in present and one.alive and one.still_s > SILENT_S:
                        self.lose(member)
                if len(ranks) == SIZE and member not in present:
                    for one in [one for one in ranks if one.runs]:
                        one.end(ExitCode.FENCED)

    async def tell(self, method: str, request: Any, answer: Any = None) -> Any:
        assert method == "ReportExit"
        await asyncio.sleep(0.01)
        reported = request()
        self.lose((reported.group, reported.incarnation))
        return pb.Done(opened=True)

    async def ask_restart(self, group: int, incarnation: int) -> pb.RestartAnswer:
        await asyncio.sleep(0.01)
        answers = RestartAnswers(lambda: self.state, lambda: False)
        answers.recall({"wrong": [[*member, why] for member, why in self.wrong.items()]})
        return answers.answer(group, incarnation)

    def has_wrong_results(self, group: int) -> None:
        """A vote or an audit finds it: the group is fenced, and its processes that run leave."""
        member = group, self.live[group]
        self.wrong[member] = f"group {group} diverged"
        self.bad |= {one.device for one in self.here[member]}
        self.lose(member)

    def drain(self, group: int) -> None:
        self.drained |= {group}
        self.publish()
        asyncio.get_running_loop().call_later(self.choose.uniform(0.1, 3.0), self.leave, group)

    def leave(self, group: int) -> None:
        if group in self.drained and group in self.live:
            self.lose((group, self.live[group]))

    def undo(self, group: int) -> None:
        self.drained -= {group}
        self.publish()

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    def check(self) -> None:
        """No task has failed."""
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.discard(task)
            task.result()

    # ---------------------------------------------------------------------------------------------------------- walks

    async def begin(self) -> None:
        """Until all groups train and all standbys wait."""
        self.publish()
        self.attempt._start_ranks()
        self.beside(self.watch())
        await asyncio.sleep(30.0)
        assert self.live == dict.fromkeys(range(GROUPS), 0)

    async def walk(self, seconds: float) -> None:
        """Faults, one every few seconds to minutes; one group always goes on."""
        end_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(self.choose.expovariate(1 / 20.0))
            stay, standbys = sorted(self.live.keys() - self.drained), self.waiting()
            well = [group for group in stay if all(one.runs for one in self.of(group))]
            group = self.choose.choice(well)
            there = self.of(group)
            match self.choose.choice(
                ("kill", "kill", "stop", "stop", "stick", "stick", "standby", "drain", "undo", "undo", "go on", "wrong")
            ):
                case "kill" if len(well) > 1:
                    self.choose.choice(there).signal(signal.SIGKILL)
                case "stop" if len(well) > 1:
                    for one in self.choose.choice((there, there[:1])):
                        one.stopped = True
                case "stick" if len(well) > 1:
                    for one in self.choose.choice((there, there[:1])):
                        one.stuck = True
                case "go on":
                    self.go_on()
                    self.failing, self.hanging = self.choose.choice(((0.0, 0.0), (0.3, 0.0), (0.0, 0.3)))
                case "standby" if standbys:
                    one = self.choose.choice(self.choose.choice(standbys))
                    one.stopped = self.choose.random() < 0.5
                    if not one.stopped:
                        one.signal(signal.SIGKILL)
                case "drain" if len(well) > 1:
                    self.drain(group)
                case "wrong" if len(well) > 1 and len(self.bad) < self.spare_devices:
                    self.has_wrong_results(group)
                case "undo":
                    self.undo(self.choose.randrange(GROUPS))

    def go_on(self) -> None:
        """Whatever was stopped runs, what was stuck can be killed, and nothing fails any more."""
        self.failing = self.hanging = 0.0
        for one in self.children:
            one.stopped = one.stuck = False


def play(monkeypatch: pytest.MonkeyPatch, make: Callable[[], World], story: Callable[[World], Any]) -> World:
    loop, worlds = SkippingLoop(), list[World]()
    for module in (job_attempt, rank_processes, refills, restarter):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    monkeypatch.setattr(group_restarts, "COME_S", 20.0)
    monkeypatch.setattr(restarter, "GONE_LOOK_S", 1.0)
    monkeypatch.setattr(refills, "LOOK_S", 1.0)
    monkeypatch.setattr(standbys, "give_place", lambda *words: worlds[0].give_place(*words))
    monkeypatch.setattr(job_attempt, "CoordinatorClient", lambda *_: worlds[0])
    monkeypatch.setattr(job_attempt.GroupHealth, "fault", fit)
    monkeypatch.setattr(World, "__new__", lambda cls, *_, **__: worlds.append(object.__new__(cls)) or worlds[0])

    async def whole() -> None:
        world = make()
        await world.begin()
        await story(world)
        world.check()
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)

    try:
        loop.run_until_complete(whole())
    finally:
        loop.close()
    return worlds[0]


async def fit(*_: Any) -> None:
    await asyncio.sleep(0.5)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_all_groups_are_there_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    async def story(world: World) -> None:
        for _ in range(6):
            await world.walk(300.0)
            world.hanging = 0.0
            await asyncio.sleep(120.0)  # standbys that hang as they get a place are taken for lost, one after the other
            out = set(range(GROUPS)) - world.live.keys() - world.learners.keys()
            assert not (out and world.waiting()), f"groups {out} are out while a standby waits"
            world.check()
        world.go_on()
        for group in range(GROUPS):
            world.undo(group)
        await asyncio.sleep(600.0)
        # nothing begins where a drained group was, so nobody may be there for one whose results were wrong
        out = set(range(GROUPS)) - world.live.keys()
        assert out <= {group for group, _ in world.wrong}, out
        assert len(out) < len(world.bad) / SIZE + 1

    world = play(monkeypatch, lambda: World(tmp_path, seed, 1 + seed % 2), story)
    assert any("is taken by standby" in line for line in world.lines)


def test_a_standby_takes_the_place_of_a_group_whose_processes_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are stopped. When the standby is lost too, the group is started again where that was."""

    async def story(world: World) -> None:
        for one in world.of(2):
            one.stopped = True
        await asyncio.sleep(20.0)
        assert world.live == {0: 0, 1: 0, 2: 1}
        world.of(2)[0].signal(signal.SIGKILL)
        await asyncio.sleep(20.0)
        assert world.live == {0: 0, 1: 0, 2: 2}

    play(monkeypatch, lambda: World(tmp_path, 1), story)


def test_a_start_that_hangs_before_it_is_there_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        world.hanging = 1.0
        world.of(2)[0].signal(signal.SIGKILL)
        await asyncio.sleep(10.0)
        world.hanging = 0.0
        await asyncio.sleep(40.0)
        assert world.live == {0: 0, 1: 0, 2: 2}

    world = play(monkeypatch, lambda: World(tmp_path, 1, standbys=0), story)
    assert any(f"has failed again, {group_restarts.LATE}" in line for line in world.lines)


def test_a_standby_that_is_stopped_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        for stopped, incarnation in ((0, 1), (1, 2)):
            [first, *_] = world.waiting()
            first[stopped].stopped = True
            world.of(2)[0].signal(signal.SIGKILL)
            await asyncio.sleep(20.0)
            assert world.live == {0: 0, 1: 0, 2: incarnation}

    play(monkeypatch, lambda: World(tmp_path, 1, standbys=2), story)


def test_what_an_operator_takes_back_is_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one restart is left, and nobody waits for a pause."""

    async def story(world: World) -> None:
        for incarnation in (1, 2, 3):
            world.drain(2)
            await asyncio.sleep(10.0)
            assert 2 not in world.live
            world.undo(2)
            await asyncio.sleep(12.0)
            assert world.live[2] == incarnation
        world.of(2)[0].signal(signal.SIGKILL)
        await asyncio.sleep(20.0)
        assert world.live[2] == 4, "its only restart"

    world = play(monkeypatch, lambda: World(tmp_path, 1, standbys=0, restarts=1), story)
    ends = [line.partition(": ")[2] for line in world.lines if "is started again, as" in line]
    assert ends == ["it was drained, which counts as no restart"] * 3 + ["restart 1 of at most 1 within an hour"]
