"""Sends the machine's actions as orders on the groups' streams.

Before a view a group receives the addresses of the next group in its ring, and of the donors of its offer, unless it
has received them on this stream already. So a death brings addresses to one group, an arrival to
one, and to all others nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.encoded_order import EncodedOrder
from spare_megatron.coordinator.ring_addresses import RingAddresses
from spare_megatron.coordinator.streams import Streams
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import AcceptSave, Action, SendAsk, SendCommit, SendFenced, SendStop, SendView
from spare_megatron.protocol.view import MemberId, View

NOBODY = -1
"""No group: it audits and serves nothing."""


class ActionDispatcher:
    """Sends actions in order; views may have to wait."""

    def __init__(self, streams: Streams, fencing: int, state: Callable[[], State], addresses: RingAddresses) -> None:
        """``state`` returns the present state: a view that waited and is out of date by then is not sent."""
        self._streams, self._fencing, self._state = streams, fencing, state
        self._addresses = addresses
        self._waiting: dict[MemberId, SendView] = {}
        """The newest view of a group, while its delay lasts or addresses of its neighbour or donors are not known."""
        self._live: tuple[tuple[int, int], ...] = ()
        self._live_encoded = b""
        """The part of an order that has the live set, which all views of an epoch share; of the last view."""

    def received(self, group: int, incarnation: int) -> None:
        """Send the views that waited for the addresses of a group, which are known now."""
        for send in [send for send in self._waiting.values() if (group, incarnation) in _reached(send.view)]:
            self._send(send)

    def announce(self, action: Action) -> None:
        """Send one action of the machine."""
        if isinstance(action, SendView):
            self._view(action)
        elif isinstance(action, SendCommit):
            self._commit(action)
        elif isinstance(action, SendAsk):
            asked = pb.Asked(step=action.step, ask=protobuf_codec.fill(pb.ReliefAsk(), action.ask))
            self._streams.send(action.group, action.incarnation, pb.Order(asked=asked))
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
        """Send a commit: the same order to all groups but those that audit or serve something."""
        audits, serves = dict(action.audits), dict(action.serves)

        def order(group: int) -> EncodedOrder:
            commit = pb.Commit(
                step=action.step,
                epoch=action.epoch,
                leave=action.leave,
                save=action.save,
                audits=audits.get(group, ()),
                serves=[protobuf_codec.fill(pb.Offer(), offer) for offer in serves.get(group, ())],
            )
            return EncodedOrder("commit", pb.Order(commit=commit).SerializeToString())

        plain, own = order(NOBODY), {group: order(group) for group in audits.keys() | serves.keys()}
        self._streams.send_each({group: own.get(group, plain) for group in action.groups})

    def _view(self, send: SendView) -> None:
        """Send a view now, or once its delay is over and the addresses of the neighbour and the donors are known: a
        coordinator that has just taken the lease may not have learned of them yet. A newer view takes its place."""
        self._waiting[send.view.receiver] = send
        if send.delay_s > 0:
            asyncio.get_running_loop().call_later(send.delay_s, self._over, send)
        else:
            self._send(send)

    def _over(self, send: SendView) -> None:
        """The delay of a view is over."""
        if self._waiting.get(send.view.receiver) is send:
            now = self._waiting[send.view.receiver] = replace(send, delay_s=0.0)
            self._send(now)

    def _send(self, send: SendView) -> None:
        view, state = send.view, self._state()
        is_new = (view.epoch, view.committed) == (state.epoch, state.committed)
        if is_new and (send.delay_s or any(self._addresses.of(member) is None for member in _reached(view))):
            return
        del self._waiting[view.receiver]
        if is_new:
            self._tell_neighbour(view)
            self._tell_donors(view)
            own = pb.Order()
            protobuf_codec.fill(own.view, view, leave_out="live")
            order = EncodedOrder("view", self._encoded_live(view), own.SerializeToString())
            self._streams.send(*view.receiver, order)

    def _tell_neighbour(self, view: View) -> None:
        neighbour = view.neighbour
        stream = self._streams.of(*view.receiver)
        if neighbour is None or stream is None or stream.neighbour == neighbour:
            return
        stream.neighbour = neighbour
        reported = pb.Neighbour(group=neighbour[0], incarnation=neighbour[1], addresses=self._addresses.of(neighbour))
        stream.send(pb.Order(neighbour=reported))

    def _tell_donors(self, view: View) -> None:
        offer, stream = view.offer, self._streams.of(*view.receiver)
        if offer is None or stream is None or stream.offer == offer.number:
            return
        stream.offer = offer.number
        serving_at = [pb.Addresses(values=self._addresses.serving_at(donor)) for donor in offer.donors]
        stream.send(pb.Order(donors=pb.Donors(number=offer.number, serving_at=serving_at)))

    def _encoded_live(self, view: View) -> bytes:
        """The live set of ``view`` as a part of its order."""
        if view.live is not self._live:
            order = pb.Order()
            order.view.live.values.extend(number for pair in view.live for number in pair)
            self._live, self._live_encoded = view.live, order.SerializeToString()
        return self._live_encoded


def _reached(view: View) -> Iterator[MemberId]:
    """The groups whose ranks those of a view's group connect to."""
    if view.neighbour is not None:
        yield view.neighbour
    if view.offer is not None:
        yield from view.offer.donors
