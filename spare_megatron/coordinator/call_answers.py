"""Answers calls to the coordinator: whether a lost group may be started again, and that groups are to leave.

The launcher, which asks the first, sees how processes end. Only the coordinator knows why the group was lost, and
whether the job goes on. A group that was fenced because its results were wrong is not started again on the same
devices, which would compute the next results. The second is an operator's request (spare-drain), which the machine
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.coordinator.ring_addresses import RingAddresses
from spare_megatron.coordinator.suspicion import Suspicion
from spare_megatron.protocol.draining import refusal
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Action, DrainRequested, SendFenced


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
        present = state.incarnation_of(group)
        if present is not None and present > incarnation:
            return pb.RestartAnswer(never=True, why=f"its incarnation {present} is there")
        # While the job forms nobody is a learner; where its exit is not known yet, its place is taken.
        free, lasting = state.phase == "running" and present is None, state.drained - state.drained_for_now
        here = free and wrong is None
        return pb.RestartAnswer(
            now=here and group not in state.drained,
            highest_incarnation=state.highest.get(group, -1),
            drained=here and group in lasting,
            elsewhere=free and not here,
            why=wrong if free else "",
        )


class DrainRequests:
    """The requests to one coordinator. Used in one event loop."""

    def __init__(
        self,
        state: Callable[[], State],
        waits: Callable[[], bool],
        apply: Callable[[DrainRequested], None],
        addresses: RingAddresses,
    ) -> None:
        """``waits`` returns True while nothing is decided."""
        self._state, self._waits, self._apply, self._addresses = state, waits, apply, addresses

    async def answer(self, request: pb.DrainRequest, _: object) -> pb.DrainAnswer:
        """The handler of the call Drain."""
        if self._waits():
            return pb.DrainAnswer(refusal="the coordinator decides nothing at the moment; try again", undecided=True)
        state = self._state()
        meant = {group: state.highest[group] for group in state.drained} if request.undo else state.present
        at_hosts = self._addresses.groups_at(request.hosts, meant)
        if request.hosts and not at_hosts:
            which = "drained group" if request.undo else "group that is there"
            return pb.DrainAnswer(refusal=f"no {which} has a rank at {request.hosts[0]}")
        groups = tuple(sorted({*request.groups, *at_hosts}))
        event = DrainRequested(groups, request.reason, request.undo, request.for_now)
        refused, undecided = refusal(state, event), False
        if not refused:
            self._apply(event)
            if undecided := self._waits():
                refused = "the request could not be written down yet; look at spare-status, and try again"
        return pb.DrainAnswer(refusal=refused, groups=groups, undecided=undecided, epoch=self._state().epoch)
