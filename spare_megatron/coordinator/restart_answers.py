"""Answers the launcher's question whether a lost group may be started again.

The launcher sees how processes end. Only the coordinator knows why the group was lost, and whether the job goes on. A
group that was fenced because its results were wrong is not started again: the same devices would compute the next
results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.coordinator.suspicion import Suspicion
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Action, SendFenced


class RestartAnswers:
    """The answers of one coordinator. Used in one event loop."""

    def __init__(self, state: Callable[[], State], waits: Callable[[], bool]) -> None:
        """``waits`` returns True while nothing is decided."""
        self._state, self._waits = state, waits
        self._wrong: dict[tuple[int, int], str] = {}
        """(group, incarnation) that was fenced for good -> why."""

    def observe(self, actions: Sequence[Action]) -> None:
        """Take note of the groups that are fenced for good."""
        for action in actions:
            if isinstance(action, SendFenced) and action.lasting:
                self._wrong[action.group, action.incarnation] = action.reason

    def memo(self) -> list[list[Any]]:
        """What :meth:`recall` needs after a restart, as JSON values."""
        return [[*member, why] for member, why in sorted(self._wrong.items())]

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Go on from the memo ``wrong`` of a snapshot, which may be older than this module."""
        self._wrong = {(group, incarnation): why for group, incarnation, why in memo.get("wrong", ())}

    def handler(self, suspicion: Suspicion) -> Callable[[pb.LostGroup, object], Any]:
        """The handler of the call AskRestart. What ``suspicion`` has collected is decided first, so that the answer
        knows of every exit that was reported before the question."""

        async def answer(request: pb.LostGroup, _: object) -> pb.RestartAnswer:
            suspicion.flush()
            return self.answer(request.group, request.incarnation)

        return answer

    def answer(self, group: int, incarnation: int) -> pb.RestartAnswer:
        """Whether ``group`` may be started again, no process of which is left after its ``incarnation``."""
        if self._waits():
            return pb.RestartAnswer()
        state, wrong = self._state(), self._wrong.get((group, incarnation))
        if state.phase in ("ending", "stopped") or state.leave:
            return pb.RestartAnswer(never=True)
        if wrong is not None:
            return pb.RestartAnswer(never=True, why=wrong)
        present = state.incarnation_of(group)
        if present is not None and present > incarnation:
            return pb.RestartAnswer(never=True, why=f"its incarnation {present} is there")
        # While the job forms nobody is a learner; where its exit is not known yet, its place is taken.
        now, drained = state.phase == "running" and present is None, group in state.drained
        highest = state.highest.get(group, -1)
        return pb.RestartAnswer(now=now and not drained, highest_incarnation=highest, drained=now and drained)
