"""At the end of a run the copy that is saved is taken before the digest that is voted, as at every other step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.view import View
from spare_megatron.worker.loop import TrainingLoop
from spare_megatron.worker.step import Committed, StepTimes

VIEW = View(0, 0, 1, 0, ((0, 0), (1, 0)), (3, 1), 4, (), (), leave=True)
ENDING = Orders(VIEW, version=1)
COMMITTED = Committed(3, 1, (), {}, StepTimes(), (0, 1), leave=True)


def _of(orders: Orders, group: int) -> Orders:
    return replace(orders, view=replace(orders.view, group=group))


class Session:
    """Orders that follow one another; the last ones stop the job."""

    def __init__(self, group: int, later: list[Orders], reported: list[str]) -> None:
        self.orders, self._later, self._reported = _of(ENDING, group), later, reported

    def progress(self, phase: str, step: int, pieces_done: int) -> None:
        pass

    def saved(self, step: int, directory: str) -> bool:
        return True

    def applied(self, step: int, epoch: int) -> None:
        self._reported.append(f"holds in epoch {epoch}")

    def wait(self, version: int) -> Orders:
        self.orders = _of(self._later.pop(0), self.orders.view.group)
        return self.orders


class Runner:
    def __init__(self, reported: list[str]) -> None:
        self._reported = reported

    def inject(self, point: str, step: int, n: int) -> None:
        pass

    def vote_on_the_end(self, step: int, view: View) -> None:
        self._reported.append(f"digest in epoch {view.epoch}")


class Saver:
    """Takes its copy, then waits for the coordinator's word with signs of life, as the real one."""

    def __init__(self, reported: list[str]) -> None:
        self._reported = reported

    def due(self, step: int) -> bool:
        return False

    def save(self, step: int, epoch: int, ask: Any, *, since: int, final: bool = False) -> None:
        self._reported.append("copy")
        ask.tick()

    def settle(self, tick: Callable[[], None]) -> None:
        tick()


def end(group: int, later: list[Orders]) -> list[str]:
    reported: list[str] = []
    session: Any = Session(group, later, reported)
    runner: Any = Runner(reported)
    TrainingLoop(None, runner, session, Saver(reported), 0, None, None)._end(COMMITTED)  # type: ignore[arg-type]
    return reported


STOPPED = replace(ENDING, version=9, stop=("finished", "all is done"))


def test_the_group_that_saves_copies_before_it_votes() -> None:
    assert end(0, [STOPPED]) == ["copy", "digest in epoch 1", "holds in epoch 1"]


def test_another_group_votes_at_once_and_copies_when_it_becomes_the_one() -> None:
    alone = replace(ENDING, version=2, view=replace(VIEW, epoch=2, live=((1, 0),)))
    reported = end(1, [alone, replace(STOPPED, view=replace(VIEW, epoch=2))])
    assert reported == ["digest in epoch 1", "holds in epoch 1", "copy", "digest in epoch 2", "holds in epoch 2"]
