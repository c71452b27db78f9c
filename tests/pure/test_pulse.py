"""When heartbeats go out, on a clock of the test's own."""

from __future__ import annotations

import asyncio

from spare_megatron.config.timeouts import Timeouts, timeouts_from
from spare_megatron.control_plane.heartbeat_timer import NEWS, Pulse, leader_interval_s
from spare_megatron.control_plane.rank_ledger import LATE
from spare_megatron.control_plane.reports import Progress

LONG_S = 300.0


def test_complete_news_is_due_at_once_and_other_news_soon() -> None:
    async def scenario() -> None:
        pulse = Pulse(LONG_S, eager=True)
        await asyncio.wait_for(pulse.due(), 30)  # the first one
        waiting = asyncio.create_task(pulse.due())
        await asyncio.sleep(0)
        pulse.news(complete=False)
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done, "a piece among others waits for its turn"
        pulse.news(complete=True)
        await asyncio.wait_for(waiting, 30)

    asyncio.run(scenario())


def test_without_news_the_interval_and_with_news_a_part_of_it() -> None:
    async def scenario() -> tuple[float, float]:
        pulse = Pulse(0.2, eager=True)
        await pulse.due()
        started_s = pulse._last_s
        await pulse.due()
        quiet_s = pulse._last_s - started_s
        pulse.news(complete=False)
        started_s = pulse._last_s
        await pulse.due()
        return quiet_s, pulse._last_s - started_s

    quiet_s, busy_s = asyncio.run(scenario())
    assert quiet_s >= 0.199
    assert busy_s >= 0.2 / NEWS - 0.001


def test_news_that_changes_nothing_need_not_be_notified() -> None:
    async def scenario() -> None:
        pulse = Pulse(LONG_S, eager=True)
        await pulse.due()
        assert pulse.wants(complete=False)
        pulse.news(complete=False)
        assert not pulse.wants(complete=False), "the next heartbeat is brought forward already"
        assert pulse.wants(complete=True)
        pulse.news(complete=True)
        assert not pulse.wants(complete=True)
        await asyncio.wait_for(pulse.due(), 30)
        assert pulse.wants(complete=False)

    asyncio.run(scenario())


def test_a_single_piece_brings_no_heartbeat_forward_where_nobody_is_relieved() -> None:
    async def scenario() -> float:
        pulse = Pulse(0.2)
        await pulse.due()
        assert not pulse.wants(complete=False)
        pulse.news(complete=False)
        started_s = pulse._last_s
        await pulse.due()
        assert pulse.wants(complete=True)
        return pulse._last_s - started_s

    assert asyncio.run(scenario()) >= 0.199


def test_many_leaders_beat_less_often_but_often_enough() -> None:
    times = Timeouts()
    assert [leader_interval_s(times, groups) for groups in (4, 500, 800, 1000, 4000)] == [0.5, 0.5, 0.8, 1.0, 1.0]
    short = timeouts_from(heartbeat_timeout_s=1.0)
    assert leader_interval_s(short, 1000) == 0.2
    # A silent rank is late after two intervals of its own, and the coordinator must learn of it before it is lost.
    assert LATE * times.heartbeat_interval_s + leader_interval_s(times, 4000) < times.heartbeat_timeout_s


def test_what_is_news_to_the_control_thread() -> None:
    progress = Progress()
    assert not progress.tick("forward", 1, 0)
    assert progress.tick("backward", 1, 1)
    assert not progress.tick("forward", 1, 1)
    assert progress.tick("reduce", 1, 1)
    assert progress.complete
    assert not progress.tick("reduce", 1, 1)
    assert not progress.tick("vote", 1, 1)
    assert not progress.tick("apply", 1, 0)
    assert progress.tick("reduce", 2, 0), "a group without pieces"
