"""How often the coordinator is started again: a table, and what holds for every course of deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.exits import ExitCode
from spare_megatron.launch.coordinator_restarts import COORDINATOR_RESTARTS, COORDINATOR_WITHIN_S, CoordinatorRestarts
from tests.pure.test_standbys_walk import World


def test_a_coordinator_that_dies_at_each_start_is_given_up() -> None:
    restarts = CoordinatorRestarts()
    assert [restarts.another(float(n)) for n in range(10)] == [True] * COORDINATOR_RESTARTS + [False] * 2


@pytest.mark.parametrize(
    ("status", "why"),
    [(-9, "was killed by signal 9"), (ExitCode.DISK_FAILED, "could not write its journal")],
    ids=["killed", "disk"],
)
def test_the_reason_of_a_job_whose_coordinator_is_given_up_is_said(tmp_path: Path, status: int, why: str) -> None:
    async def main() -> str:
        attempt, started = World(tmp_path, 1, standbys=0).attempt, list[int]()

        async def start() -> None:
            started.append(1)

        attempt._start_coordinator = start  # type: ignore[method-assign]
        for _ in range(COORDINATOR_RESTARTS + 1):
            attempt._coordinator_ended(SimpleNamespace(status=status))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        assert len(started) == COORDINATOR_RESTARTS
        assert attempt._exit.done()
        return attempt.why_failed()

    said = f"the coordinator {why}, after it was started again {COORDINATOR_RESTARTS} times within an hour"
    assert asyncio.run(main()) == said


def test_one_death_a_day_is_no_reason_to_end_the_job() -> None:
    restarts = CoordinatorRestarts()
    assert all(restarts.another(86400.0 * day) for day in range(365))


@given(st.lists(st.floats(0.0, 1000.0), max_size=60))
def test_no_hour_has_more_than_are_allowed(later_s: list[float]) -> None:
    restarts, now_s, granted_s = CoordinatorRestarts(), 0.0, list[float]()
    for gap_s in later_s:
        now_s += gap_s
        within = [at_s for at_s in granted_s if at_s > now_s - COORDINATOR_WITHIN_S]
        granted = restarts.another(now_s)
        assert granted == (len(within) < COORDINATOR_RESTARTS)
        granted_s += [now_s] if granted else []
