"""A learner that hangs before it is ready is found, once, and no other."""

from __future__ import annotations

import asyncio

import pytest

from spare_megatron.config.timeouts import Timeouts
from spare_megatron.coordinator import suspicion
from spare_megatron.coordinator.failure_detector import Detector
from spare_megatron.coordinator.suspicion import LearnerWatch
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Event
from spare_megatron.protocol.view import Offer

OFFER = Offer((1, 3), 1, 5, ((0, 0),))


def late(watch: LearnerWatch, learner: Learner | None, at_s: float) -> list[tuple[int, int]]:
    """Who is late of the learner of group 1 and one that is always ready; the time-out is 10 s."""
    learners = {0: Learner(2, ready=True)} | ({1: learner} if learner else {})
    return [(loss.group, loss.incarnation) for loss in watch.late(learners, 10.0, at_s)]


def test_a_learner_that_does_not_get_ready_is_found_once() -> None:
    watch = LearnerWatch()
    assert late(watch, Learner(3), 100.0) == []
    assert late(watch, Learner(3), 110.0) == []
    assert late(watch, Learner(3), 110.1) == [(1, 3)]
    assert late(watch, Learner(3), 150.0) == []


def test_each_offer_that_ends_and_each_incarnation_begin_anew() -> None:
    watch = LearnerWatch()
    assert late(watch, Learner(3), 0.0) == []
    assert late(watch, Learner(3, ready=True), 9.0) == []
    assert late(watch, Learner(3, ready=True, offer=OFFER), 90.0) == []
    assert late(watch, Learner(3, voids=1), 91.0) == []
    assert late(watch, Learner(3, voids=2), 100.0) == []
    assert late(watch, Learner(4), 109.0) == []
    assert late(watch, None, 115.0) == []
    assert late(watch, Learner(4), 120.0) == []
    assert late(watch, Learner(4), 130.5) == [(1, 4)]


def test_a_pause_of_the_coordinator_makes_no_learner_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(seconds: float, tick_s: float) -> list[Event]:
        now_s, decided = 0.0, list[Event]()
        monkeypatch.setattr(suspicion.time, "monotonic", lambda: now_s)
        state = State(phase="running", epoch=2, live={0: 0}, holders=frozenset({0}), learners={1: Learner(3)})
        one = suspicion.Suspicion(
            Detector(Timeouts(), now_s),
            lambda: state,
            lambda event, detect_s=0.0: decided.append(event),
            lambda then: None,
            lambda: False,
        )
        while now_s < seconds:
            one.look()
            now_s += tick_s
        one.flush()
        return decided

    [lost] = asyncio.run(play(601.0, 0.1))
    assert [(one.group, one.incarnation, one.cause) for one in lost.losses] == [(1, 3, "stalled")]
    assert asyncio.run(play(601.0, 100.0)) == []
