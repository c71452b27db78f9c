"""What all groups receive alike is encoded once, on the wire nothing is different, and a view that waited never comes
after a newer one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.encoded_order import AnyOrder, order_bytes
from spare_megatron.coordinator.action_dispatcher import ActionDispatcher
from spare_megatron.coordinator.ring_addresses import RingAddresses
from spare_megatron.coordinator.streams import Streams
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import SendCommit, SendView
from spare_megatron.protocol.view import View

LIVE = tuple((group, group % 3) for group in range(5))
VIEWS = [
    View(
        g, g % 3, 4, 2, LIVE, (6, 3), 7, ((g,), (9 + g,)), (g,), leave=False, audits=((), (g,)), disputed=(1, 2), save=3
    )
    for g, _ in LIVE
]


class Recorded(Streams):
    """Keeps the last order of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[int, AnyOrder] = {}

    def send(self, group: int, incarnation: int, order: AnyOrder) -> None:
        """As of a connected group."""
        self.orders[group] = order

    def send_each(self, orders) -> None:  # type: ignore[no-untyped-def]
        """As of connected groups."""
        self.orders.update(orders)


def dispatcher_of(streams: Streams) -> ActionDispatcher:
    """Of a coordinator in the epoch of the views."""
    addresses = RingAddresses()
    for group, incarnation in LIVE:
        addresses.learn(group, incarnation, [f"host:{group}"], [""])
    return ActionDispatcher(streams, 2, lambda: State(epoch=4, committed=(6, 3), job_attempt=1), addresses)


def test_each_group_gets_its_own_view_with_the_shared_live_set() -> None:
    streams = Recorded()
    one = dispatcher_of(streams)
    other_epoch = replace(VIEWS[0], live=LIVE[:2])
    for view in (*VIEWS, other_epoch):
        one.announce(SendView(view))
        order = pb.Order.FromString(order_bytes(streams.orders[view.group]))
        assert order.WhichOneof("kind") == streams.orders[view.group].WhichOneof("kind") == "view"
        assert protobuf_codec.read(order.view, View) == view


def test_all_groups_without_an_audit_get_the_same_encoded_commit() -> None:
    streams = Recorded()
    dispatcher_of(streams).announce(SendCommit((0, 1, 2), 7, 4, False, ((1, (5,)),)))
    assert streams.orders[0] is streams.orders[2]
    for group, audits in ((0, []), (1, [5])):
        order = pb.Order.FromString(order_bytes(streams.orders[group]))
        assert (order.commit.step, order.commit.epoch, list(order.commit.audits)) == (7, 4, audits)


def reported(streams: Recorded) -> list[tuple[int, ...]]:
    """What the newest view says of each group's standing pieces."""
    orders = (pb.Order.FromString(order_bytes(order)) for order in streams.orders.values())
    return [protobuf_codec.read(order.view, View).standing for order in orders]


def test_a_delayed_view_does_not_come_after_a_newer_one_of_the_same_epoch() -> None:
    async def play() -> None:
        streams = Recorded()
        one = dispatcher_of(streams)
        one.announce(SendView(VIEWS[0], delay_s=0.01))
        assert reported(streams) == []
        one.announce(SendView(replace(VIEWS[0], standing=(77,))))
        await asyncio.sleep(0.05)
        assert reported(streams) == [(77,)]
        one.announce(SendView(VIEWS[0], delay_s=0.01))
        await asyncio.sleep(0.05)
        assert reported(streams) == [VIEWS[0].standing]

    asyncio.run(play())


def test_a_delayed_view_does_not_replace_a_newer_one_that_waits_for_addresses() -> None:
    async def play() -> None:
        streams, addresses = Recorded(), RingAddresses()
        one = ActionDispatcher(streams, 2, lambda: State(epoch=4, committed=(6, 3), job_attempt=1), addresses)
        one.announce(SendView(VIEWS[0], delay_s=0.01))
        one.announce(SendView(replace(VIEWS[0], standing=(77,))))
        one.received(1, 1)
        await asyncio.sleep(0.05)
        assert reported(streams) == []
        addresses.learn(1, 1, ["host:1"], [""])
        one.received(1, 1)
        assert reported(streams) == [(77,)]

    asyncio.run(play())


def test_the_groups_of_a_node_are_those_with_a_rank_there() -> None:
    addresses = RingAddresses()
    addresses.learn(0, 0, ["10.0.0.1:1", "10.0.0.2:1"], [])
    addresses.learn(1, 0, ["10.0.0.2:2", "10.0.0.3:1"], [])
    addresses.learn(2, 1, ["[fd00::7]:1", ""], [])
    present = {0: 0, 1: 0, 2: 1}
    assert addresses.groups_at(["10.0.0.2"], present) == [0, 1]
    assert addresses.groups_at(["n7", "fd00::7"], present) == [2]
    assert addresses.groups_at(["10.0.0.1"], {0: 1, 1: 0}) == [], "another incarnation of it ran there"
