"""Garbage is collected while a process has little to do, at the latest some time later, and by Python itself before and
afterwards."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

from spare_megatron.runtime import gc_scheduler
from spare_megatron.runtime.gc_scheduler import AGAIN_S, LATEST_S, Pauses, collect_in_pauses


def collections(busy: float, until_s: float) -> list[float]:
    """When a process that uses this share of a core collects."""
    pauses, found = Pauses(0.0, 0.0), []
    for n in range(1, int(until_s / 0.25) + 1):
        if pauses.is_due(n * 0.25, n * 0.25 * busy):
            found.append(n * 0.25)
    return found


def test_a_busy_process_collects_less_often_than_an_idle_one() -> None:
    assert collections(0.1, 3.5 * AGAIN_S) == [AGAIN_S, 2 * AGAIN_S, 3 * AGAIN_S]
    assert collections(0.9, 2.5 * LATEST_S) == [LATEST_S, 2 * LATEST_S]


def test_a_collection_waits_for_the_first_pause() -> None:
    pauses = Pauses(0.0, 0.0)
    assert not pauses.is_due(AGAIN_S, 11.0), "it has computed"
    assert pauses.is_due(AGAIN_S + 0.25, 11.01), "it has not"
    assert not pauses.is_due(AGAIN_S + 0.5, 11.02), "it has just collected"


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_python_collects_by_itself_only_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_scheduler, "LOOK_S", 0.01)
    monkeypatch.setattr(gc_scheduler, "AGAIN_S", 0.1)

    async def run() -> None:
        task = asyncio.create_task(collect_in_pauses())
        await asyncio.sleep(0)
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 10_000, "what is imported is looked through"
        cycle = weakref.ref(Cycle())
        until_s = time.monotonic() + 30.0
        while cycle() is not None and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        assert cycle() is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    gc.unfreeze()  # what tests before this one have imported
    assert gc.isenabled()
    asyncio.run(run())
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000, "what was frozen is thawed, and copied by the next collection of a fork"
