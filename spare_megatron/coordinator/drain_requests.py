"""Answers an operator's request that groups leave (spare-drain), and lets the machine decide it."""

from __future__ import annotations

from collections.abc import Callable

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.coordinator.ring_addresses import RingAddresses
from spare_megatron.protocol.draining import refusal
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import DrainRequested


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
            return pb.DrainAnswer(refusal="the coordinator decides nothing at the moment; try again")
        state = self._state()
        meant = {group: state.highest[group] for group in state.drained} if request.undo else state.present
        at_hosts = self._addresses.groups_at(request.hosts, meant)
        if request.hosts and not at_hosts:
            which = "drained group" if request.undo else "group that is there"
            return pb.DrainAnswer(refusal=f"no {which} has a rank at {request.hosts[0]}")
        groups = tuple(sorted({*request.groups, *at_hosts}))
        event = DrainRequested(groups, request.reason, request.undo)
        refused = refusal(state, event)
        if not refused:
            self._apply(event)
            if self._waits():
                refused = "the request could not be written down yet; look at spare-status, and try again"
        return pb.DrainAnswer(refusal=refused, groups=groups)
