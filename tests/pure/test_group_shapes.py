"""In which shape a lost group comes back, and how it goes home."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spare_megatron.config.job import JobDescription
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.launch import group_shapes
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.launch.group_shapes import GroupShapes, WayHome
from spare_megatron.protocol.codec import encode
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.test_run_files import STATUS

DEVICES = 4


class Host:
    """A host with four devices for the group, of which some are dead, and the coordinator of its job."""

    def __init__(self, directory: Path, shapes: tuple[int, ...], dead: set[int]) -> None:
        self.dead, self.here, self.refusal = dead, {GroupStart(2, 1, 1, 2)}, ""
        self.drains: list[bool] = []
        self.undecided = 0
        """Number of the next requests on which nothing is decided."""
        self.stays = False
        """It does not leave although it is to."""
        self.lines: list[str] = []
        self.asked: list[GroupStart] = []
        self.run_dir = RunDirectory(directory)
        self.run_dir.job.write_text(json.dumps(encode(JobDescription(smaller_shapes=shapes))))
        self.names((0, 2))
        client: Any = self
        self.shapes = GroupShapes(lambda stages: DEVICES - stages, self.fault, self.run_dir, lambda start: None)
        self.home = WayHome(self.at_home, client, self.run_dir, self.lines.append, self.here.__contains__)

    def names(self, live: tuple[int, ...], drained: tuple[int, ...] = ()) -> None:
        """Let status.json name these groups."""
        status = {**STATUS, "live": {str(one): 0 for one in live}, "drained": drained}
        self.run_dir.status.write_text(json.dumps(status))

    async def fault(self, start: GroupStart) -> HealthFault | None:
        used = set(range(start.first, start.first + (start.stages or DEVICES)))
        return HealthFault("device", f"{used & self.dead} is dead") if used & self.dead else None

    async def at_home(self, start: GroupStart) -> HealthFault | None:
        return await self.fault(replace(start, stages=0, first=0))

    async def tell(self, method: str, request: pb.DrainRequest, answer: Any) -> pb.DrainAnswer:
        assert (method, list(request.groups)) == ("Drain", [2])
        assert request.for_now
        self.drains.append(request.undo)
        if self.undecided:
            self.undecided -= 1
            return pb.DrainAnswer(refusal="try again", undecided=True)
        if not self.refusal and not request.undo and not self.stays:
            asyncio.get_running_loop().call_later(0.01, self.here.clear)
        return pb.DrainAnswer(refusal=self.refusal)

    def chosen(self) -> tuple[int, int] | str:
        """The stages and first device of the next start, or why there is none."""
        lost = GroupStart(2, 0)
        fault = asyncio.run(self.shapes.fault(lost))
        if fault is not None:
            return fault.sentence
        start = self.shapes.chosen(GroupStart(2, 1, 1))
        assert (start.group, start.incarnation, start.restarts) == (2, 1, 1)
        return start.stages, start.first


@pytest.mark.parametrize(
    ("shapes", "dead", "chosen"),
    [
        ((2, 1), set(), (0, 0)),
        ((2, 1), {3}, (2, 0)),
        ((2, 1), {0}, (2, 2)),
        ((2, 1), {1, 2}, (1, 0)),
        ((2, 1), {0, 1, 2}, (1, 3)),
        ((2,), {1, 2}, "{1, 2} is dead"),
        ((), {3}, "{3} is dead"),
    ],
)
def test_the_largest_shape_is_taken_for_which_the_host_is_fit(
    tmp_path: Path, shapes: tuple[int, ...], dead: set[int], chosen: Any
) -> None:
    assert Host(tmp_path, shapes, dead).chosen() == chosen


def test_a_host_that_is_fit_again_gets_the_home_shape(tmp_path: Path) -> None:
    host = Host(tmp_path, (2, 1), {3})
    assert host.chosen() == (2, 0)
    host.dead.clear()
    assert host.chosen() == (0, 0)


def goes_home(host: Host) -> None:
    async def play() -> None:
        await asyncio.wait_for(host.home.bring_home(GroupStart(2, 1, 1, 2), host.asked.append, host.asked.remove), 5.0)

    asyncio.run(play())


def test_a_group_goes_home_once_its_host_is_fit_and_it_is_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def slept(_: float) -> None:
        nonlocal looks
        looks += 1
        assert not host.drains or host.drains == [False], "the drain is taken back when the group has left"
        if looks == 2:
            host.dead.clear()
        if looks == 4:
            host.names((0, 2))
        await real(0.005)

    real, host = asyncio.sleep, Host(tmp_path, (2, 1), {3})
    host.names((0,))
    monkeypatch.setattr(group_shapes.asyncio, "sleep", slept)
    goes_home(host)
    assert host.drains == [False, True]
    assert host.asked == [GroupStart(2, 1, 1, 2)]
    assert looks > 4
    assert host.lines[-1] == "group 2 leaves with a commit, because all its devices are fit again"


def test_a_look_that_cannot_be_made_is_not_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, host, faults = asyncio.sleep, Host(tmp_path, (2, 1), set()), [OSError(errno.EAGAIN, "no more processes")]

    async def at_home(_: GroupStart) -> HealthFault | None:
        if faults:
            raise faults.pop()
        return None

    monkeypatch.setattr(group_shapes.asyncio, "sleep", lambda _: real(0.005))
    host.home = WayHome(at_home, cast(Any, host), host.run_dir, host.lines.append, host.here.__contains__)
    goes_home(host)
    assert host.drains == [False, True]


def test_a_group_that_nothing_can_do_without_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, host = asyncio.sleep, Host(tmp_path, (2, 1), set())
    host.refusal = "without group 2 nobody has shard 2"

    async def slept(_: float) -> None:
        if len(host.drains) == 2:
            assert not host.asked, "its loss would count as no restart"
            host.refusal = ""
        await real(0.005)

    monkeypatch.setattr(group_shapes.asyncio, "sleep", slept)
    goes_home(host)
    assert host.drains == [False, False, False, True]
    assert host.lines[1:] == [
        "group 2 stays as it is for now: without group 2 nobody has shard 2",
        "group 2 leaves with a commit, because all its devices are fit again",
    ]


def test_a_request_on_which_nothing_was_decided_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that takes the first one back: a group that stays drained is never started again."""
    real, host = asyncio.sleep, Host(tmp_path, (2, 1), set())
    host.undecided = 2

    async def slept(_: float) -> None:
        if host.drains == [False] * 3:
            host.undecided = 1
        await real(0.02)

    monkeypatch.setattr(group_shapes.asyncio, "sleep", slept)
    goes_home(host)
    assert host.drains == [False, False, False, True, True]


def test_a_group_whose_drain_an_operator_takes_back_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, host, looks = asyncio.sleep, Host(tmp_path, (2, 1), set()), 0

    async def slept(_: float) -> None:
        nonlocal looks
        looks += len(host.drains) == 1
        host.names((0, 2), drained=(2,) if looks in (3, 4) else ())
        if looks > 5 and host.stays:
            assert not host.asked, "its loss would count as no restart"
            host.stays = False
        await real(0.005)

    host.stays = True
    monkeypatch.setattr(group_shapes.asyncio, "sleep", slept)
    goes_home(host)
    assert host.drains == [False, False, True]
    leaves = "group 2 leaves with a commit, because all its devices are fit again"
    stays = "group 2 stays as it is for now: spare-drain --undo has taken back that it is to leave"
    assert host.lines[1:] == [leaves, stays, leaves]


def test_a_drain_of_the_user_is_not_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slept(seconds: float) -> None:
        if seconds:
            host.here.clear()

    host = Host(tmp_path, (2, 1), set())
    host.names((0, 2), drained=(2,))
    monkeypatch.setattr(group_shapes.asyncio, "sleep", slept)
    goes_home(host)
    assert host.drains == []


def test_a_group_that_is_lost_in_its_smaller_shape_is_not_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slept(_: float) -> None:
        host.here.clear()

    host = Host(tmp_path, (2, 1), {3})
    monkeypatch.setattr(group_shapes.asyncio, "sleep", slept)
    goes_home(host)
    assert host.drains == []
