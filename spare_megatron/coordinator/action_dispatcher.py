"""Sends the machine's actions as orders on the groups' streams.

A view names the store through which the ranks of a replica communicator find each other. The store needs torch, which
takes a second to load, so it starts in the background while groups already say Hello, and views wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spare_megatron.control import control_pb2 as pb
from spare_megatron.control import protobuf_codec
from spare_megatron.control.encoded_order import EncodedOrder
from spare_megatron.controller.machine import State
from spare_megatron.controller.messages import AcceptSave, Action, SendCommit, SendFenced, SendStop, SendView, View
from spare_megatron.coordinator.streams import Streams


class Speaker:
    """Sends actions in order; views may have to wait."""

    def __init__(self, streams: Streams, fencing: int, state: Callable[[], State], with_store: bool) -> None:
        """``state`` returns the present state: a view that waited and is out of date by then is not sent."""
        self._streams, self._fencing, self._state = streams, fencing, state
        self._waits_for_store = with_store
        self._store: Any = None
        self._address = ""
        self._held: list[SendView] = []
        self._live: tuple[tuple[int, int], ...] = ()
        self._live_encoded = b""
        """The part of an order that has the live set, which all views of an epoch share; of the last view."""

    async def start_store(self, host: str) -> None:
        """Host the store until cancelled; then send the views that waited for it."""

        def start() -> Any:
            from spare_megatron.collectives.store import StoreServer

            return StoreServer(host)

        self._store = await asyncio.to_thread(start)
        self._address, self._waits_for_store = f"{host}:{self._store.port}", False
        held, self._held = self._held, []
        for send in held:
            self._view(send)
        await asyncio.Event().wait()

    def say(self, action: Action) -> None:
        """Send one action of the machine."""
        if isinstance(action, SendView):
            self._view(action)
        elif isinstance(action, SendCommit):
            self._commit(action)
        elif isinstance(action, SendFenced):
            fenced = pb.Fenced(fencing=self._fencing, reason=action.reason)
            self._streams.send(action.group, action.incarnation, pb.Order(fenced=fenced))
            self._streams.end(action.group, action.incarnation)
        elif isinstance(action, SendStop):
            stop = pb.Stop(outcome=action.outcome, reason=action.reason)
            self._streams.send_all(action.groups, pb.Order(stop=stop))
        elif isinstance(action, AcceptSave):
            accepted = pb.SaveAccepted(step=action.step, directory=action.directory)
            self._streams.send(action.group, action.incarnation, pb.Order(save_accepted=accepted))

    def _commit(self, action: SendCommit) -> None:
        """Send a commit: the same order to all groups that audit nothing, and its own to each group that does."""

        def order(audits: tuple[int, ...]) -> EncodedOrder:
            commit = pb.Commit(
                step=action.step, epoch=action.epoch, leave=action.leave, save=action.save, audits=audits
            )
            return EncodedOrder("commit", pb.Order(commit=commit).SerializeToString())

        plain, own = order(()), {group: order(pieces) for group, pieces in action.audits}
        self._streams.send_each({group: own.get(group, plain) for group in action.groups})

    def _view(self, send: SendView) -> None:
        """Send a view now, or once the store is there and its delay is over."""
        view, state = send.view, self._state()
        if self._waits_for_store:
            self._held.append(send)
        elif send.delay_s > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(send.delay_s, self._view, replace(send, delay_s=0.0))
        elif (view.epoch, view.committed) == (state.epoch, state.committed):
            prefix = f"life{state.life}/coordinator{self._fencing}"
            own = pb.Order(view=pb.ViewOrder(store=self._address, store_prefix=prefix))
            protobuf_codec.fill(own.view.view, replace(view, live=()))
            order = EncodedOrder("view", self._encoded_live(view), own.SerializeToString())
            self._streams.send(view.group, view.incarnation, order)

    def _encoded_live(self, view: View) -> bytes:
        """The live set of ``view`` as a part of its order."""
        if view.live is not self._live:
            order = pb.Order()
            order.view.view.live.values.extend(number for pair in view.live for number in pair)
            self._live, self._live_encoded = view.live, order.SerializeToString()
        return self._live_encoded
