"""Makes events of what the detector finds: losses, standstills, joiners that are late, learners that hang.

Findings that become known together make one event. Durations in events are measured here, by this process's own clock.
While the machine decides nothing (the job is not open, or the disk fails) findings are kept, and groups are not judged
for standing still, because they wait for this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from spare_megatron.coordinator.failure_detector import Attempt, Detector, Finding
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.membership import waited_for
from spare_megatron.protocol.messages import Event, JoinersLate, Loss, Lost, Standstill


class LearnerWatch:
    """Watches all learners of a job: that their start, and what they do after an offer has ended, does not hang. Nobody
    waits for a learner, so it would hang for good although its heartbeats go on. To be asked at every tick of the
    detector."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[int, int, int], float] = {}
        """(group, incarnation, offers that have ended) -> since when it is not ready."""

    def late(self, learners: Mapping[int, Learner], timeout_s: float, at_s: float) -> list[Loss]:
        """The learners that have been neither ready nor had an offer for ``timeout_s``; each is returned once.

        ``at_s`` is of a clock that stands still while this process does."""
        unready = [
            (group, known.incarnation, known.voids)
            for group, known in sorted(learners.items())
            if known.offer is None and not known.ready
        ]
        self._since_s = {one: self._since_s.get(one, at_s) for one in unready}
        due = [one for one, since_s in self._since_s.items() if at_s - since_s > timeout_s]
        self._since_s |= dict.fromkeys(due, float("inf"))
        detail = f"it could not be brought up to date for {timeout_s:g} s, because it was not ready"
        return [Loss(group, incarnation, "stalled", detail=detail) for group, incarnation, _ in due]


TOGETHER_S = 0.003
"""Losses that become known within this time make one epoch, because the ranks of one host die within
milliseconds."""


class Decide(Protocol):
    """The function that gets the events."""

    def __call__(self, event: Event, detect_s: float = 0.0) -> None:
        """Decide ``event``; ``detect_s`` is the time since the first evidence for it."""


class Suspicion:
    """Collects the detector's findings and hands them on as events. Used in one event loop."""

    def __init__(
        self,
        detector: Detector,
        state: Callable[[], State],
        decide: Decide,
        then: Callable[[Callable[[], None]], None],
        waits: Callable[[], bool],
    ) -> None:
        """``then`` calls a function once all events given to ``decide`` before are decided; ``waits`` returns True
        while nothing is decided."""
        self._detector, self._state, self._decide, self._then, self._waits = detector, state, decide, then, waits
        self._learners = LearnerWatch()
        self._findings: list[Finding] = []
        self._failing: tuple[tuple[int, Mapping[int, int]], float] | None = None
        """The step that fails and its members, and since when; None while none has failed."""
        self._joiners: tuple[int, float] | None = None
        """The epoch whose holders wait for joiners, and since when; None while they do not."""

    def lose(self, finding: Finding) -> None:
        """Collect a finding; all that become known together make one event."""
        if not self._findings:
            asyncio.get_running_loop().call_later(TOGETHER_S, self.flush)
        self._findings.append(finding)

    def flush(self) -> None:
        """Make one event of what was collected. While nothing is decided, findings are kept until the next call."""
        if self._waits() or not self._findings:
            return
        findings, self._findings = self._findings, []
        state = self._state()
        progress = self._detector.progress(state.live, state.step_in_flight)
        losses = tuple(sorted((one.loss for one in findings), key=lambda loss: loss.group))
        detect_s = max(0.0, time.monotonic() - min(one.since_s for one in findings))
        stalled = any(loss.cause == "stalled" for loss in losses)
        self._decide(Lost(losses, progress, self.failing_s() if stalled else 0.0), detect_s)
        self._then(partial(self._spare, losses))

    def failing_s(self) -> float:
        """How long the step in flight has failed for its present members, as far as this process knows."""
        state, now_s = self._state(), time.monotonic()
        what = (state.step_in_flight, state.live)
        if self._failing is None or self._failing[0] != what:
            self._failing = what, now_s
        return round(now_s - self._failing[1], 3)

    def look(self) -> None:
        """Ask the detector what has happened by now."""
        state, now_s = self._state(), time.monotonic()
        running = state.phase == "running" and not self._waits()
        attempt = None if self._waits() else _attempt(state)
        for finding in self._detector.tick(now_s, attempt):
            self.lose(finding)
        waits = state.joiners or not running  # nobody stands still who waits for a joiner
        stuck = "" if waits or attempt is None else self._detector.standstill(now_s, attempt)
        if stuck:
            self._decide(Standstill(state.epoch, stuck, self.failing_s()))
        self._look_at_joiners(running)
        learners, timeout_s = state.learners if running else {}, self._detector.startup_timeout_s
        for loss in self._learners.late(learners, timeout_s, self._detector.at_s(now_s)):
            self._detector.lost(loss.group, loss.incarnation)
            self.lose(Finding(loss, now_s))

    def _look_at_joiners(self, running: bool) -> None:
        """Make an event when the holders of the last state have waited for joiners for the heartbeat time-out."""
        state, now_s = self._state(), time.monotonic()
        if not running or not state.joiners or not self._detector.all_wait(state.holders):
            self._joiners = None
            return
        if self._joiners is None or self._joiners[0] != state.epoch:
            self._joiners = state.epoch, now_s
        waited_s = now_s - self._joiners[1]
        if waited_s > self._detector.heartbeat_timeout_s:
            self._joiners = None
            self._decide(JoinersLate(state.epoch, round(waited_s, 3)))

    def _spare(self, losses: Sequence[Loss]) -> None:
        """Watch the groups again that the machine has kept in spite of a finding."""
        for loss in losses:
            if self._state().live.get(loss.group) == loss.incarnation:
                self._detector.spare(loss.group, time.monotonic())


def _attempt(state: State) -> Attempt | None:
    """What the members do together now, and who has done its part; None while nothing is waited for."""
    if state.phase == "running":
        return Attempt(state.epoch, _judged(state), state.votes.keys(), state.joiners)
    if state.phase == "ending":
        return Attempt(state.epoch, state.live, state.applied_last & state.votes.keys())
    return None


def _judged(state: State) -> Mapping[int, int]:
    """The members for which the progress time-out is: not joiners without a piece, who have a grace of their own."""
    if not state.joiners:
        return state.live
    spared = set(waited_for(state))
    return {group: incarnation for group, incarnation in state.live.items() if group not in spared}
