"""Where a group is started again whose results were wrong: not where it was."""

from __future__ import annotations

import asyncio

import pytest

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.launch import restarter
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import GroupRestarts, GroupStart, Incarnations, LaunchMemory
from spare_megatron.launch.restarter import NoStandbys, RestartedJob, Restarter

WHY = "group 1 diverged: it shows"
LOST = GroupStart(1, 0)


class Stock(NoStandbys):
    """Standbys of a job that has some: ``number`` are there, and the first ``fail`` of them cannot be notified."""

    comes = True

    def __init__(self, number: int = 0, fail: int = 0) -> None:
        self.number, self.fail = number, fail
        self.taken: list[tuple[GroupStart, bool]] = []

    @property
    def there(self) -> bool:  # type: ignore[override]
        return self.number > 0

    def take(self, start: GroupStart, rests: bool) -> str:
        self.number -= 1
        if self.fail:
            self.fail -= 1
            raise OSError(5, "Input/output error")
        self.taken.append((start, rests))
        return "standby 0"


class Coordinator:
    """Its first incarnation had wrong results; of later ones nothing is known."""

    async def ask_restart(self, group: int, incarnation: int) -> pb.RestartAnswer:
        wrong = incarnation == LOST.incarnation
        return pb.RestartAnswer(now=not wrong, elsewhere=wrong, why=WHY if wrong else "", highest_incarnation=0)


class Job:
    def __init__(self, stock: NoStandbys, monkeypatch: pytest.MonkeyPatch, *rooms: bool) -> None:
        """``rooms``: whether another machine has room, at each question; the last answer stays."""
        monkeypatch.setattr(restarter, "DRAINED_S", 0.0)
        self.begun: list[tuple[GroupStart, str]] = []
        self.looked: list[str] = []
        self.reported: list[str] = []
        self.rooms = [*(rooms or [False])]
        job = RestartedJob(
            trains=lambda: True,
            over=lambda: False,
            fault=self.fault,
            begin=lambda start: self.begun.append((start, self.looked[-1])),
            announce=self.reported.append,
            has_room=lambda group: self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0],
        )
        memory = LaunchMemory(GroupRestarts(3, 0.0), Incarnations())
        self.restarter = Restarter(job, Coordinator(), memory, stock)  # type: ignore[arg-type]

    async def fault(self, start: GroupStart) -> HealthFault | None:
        self.looked.append(self.restarter.only_elsewhere(start))
        return None

    def runs(self) -> None:
        asyncio.run(asyncio.wait_for(self.restarter.bring_back(LOST), 10.0))


def test_nobody_takes_its_place_where_nobody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(NoStandbys(), monkeypatch)
    job.runs()
    assert (job.begun, job.reported) == ([], [f"group 1 is not started again: {WHY}"])


def test_a_standby_takes_its_place_and_the_devices_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Stock(1)
    job = Job(stock, monkeypatch)
    job.runs()
    assert stock.taken == [(GroupStart(1, 1, 1), True)]
    assert job.reported[-1] == "the place of group 1 is taken by standby 0: restart 1 of at most 3 within an hour"


def test_a_standby_that_cannot_be_notified_is_followed_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by processes where the group was, though nobody has anything against the incarnation between."""
    stock = Stock(2, fail=1)
    job = Job(stock, monkeypatch)
    job.runs()
    assert (job.begun, stock.taken) == ([], [(GroupStart(1, 2, 2), True)])


def test_another_node_is_waited_for_and_looked_at_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Stock(), monkeypatch, False, False, True)
    job.runs()
    assert job.begun == [(GroupStart(1, 1, 1), WHY)]
    waits = f"group 1 is not started again where it was, only by a standby or on another node: {WHY}"
    assert (job.reported[0], len(job.reported)) == (waits, 2)
