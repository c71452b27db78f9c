"""Connections that are ready for the loss of a neighbour: it costs no call, and what happens to them harms no epoch."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from spare_megatron.collectives.handshake import Member
from spare_megatron.collectives.replica_communicators import Membership
from tests.process.middle import Middle, Tap
from tests.process.relay import Relay, Silent
from tests.process.test_replica import Groups, request_of

TIMEOUT_S = 4.0
"""Of the ring: forty beats in it."""
PATIENCE_S = 30.0


@pytest.fixture
def six() -> Iterator[Groups]:
    groups = Groups(6, timeout_s=TIMEOUT_S)
    yield groups
    groups.close()


def _sum(groups: Groups, members: Iterable[int]) -> None:
    outcomes = groups.reduce({group: request_of(group) for group in members})
    assert all(outcome.ok for outcome in outcomes.values()), outcomes
    total = float(sum(members))
    assert all(outcome.tensors[0][0] == total for outcome in outcomes.values())


def _await(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert true()


def _get_ready(groups: Groups, members: Iterable[int]) -> None:
    _await(lambda: all(groups.replicas[group].ready for group in members))


def _calls(groups: Groups) -> list[int]:
    return [replicas.calls for replicas in groups.replicas]


def _sockets() -> int:
    """How many sockets this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def test_one_death_after_the_other_costs_no_call(six: Groups) -> None:
    """Down to a ring of two; then all come back, and each arrival costs two calls."""
    members = list(range(6))
    six.view(tuple(members))
    _sum(six, members)
    _get_ready(six, members)
    assert [replicas.ready_calls for replicas in six.replicas] == [1] * 6
    for dead in (3, 0, 5, 2):
        six.replicas[dead].close()
        members.remove(dead)
        six.view(tuple(members))
        _sum(six, members)
        _get_ready(six, members)
        assert _calls(six) == [1] * 6


def test_two_deaths_at_once_cost_one_call(six: Groups) -> None:
    six.view(tuple(range(6)))
    _sum(six, range(6))
    _get_ready(six, range(6))
    six.view((0, 1, 4, 5))
    _sum(six, (0, 1, 4, 5))
    assert _calls(six) == [1, 2, 1, 1, 1, 1]
    _get_ready(six, (0, 1, 4, 5))


def test_an_arrival_costs_two_calls_and_leaves_nothing_behind(six: Groups) -> None:
    """A neighbour of before is ready at once; what nobody has a use for is closed."""
    gc.collect()  # what tests before this one have left
    before = _sockets()
    six.view((0, 1, 2, 4, 5))
    _sum(six, (0, 1, 2, 4, 5))
    _get_ready(six, (0, 1, 2, 4, 5))
    six.view(tuple(range(6)))
    _sum(six, range(6))
    _get_ready(six, range(6))
    assert _calls(six) == [1, 1, 2, 1, 1, 1]
    _await(lambda: _sockets() - before == 6 * 8)  # of both ends


class Ahead:
    """Four groups in epoch 1. Group 0 calls group 2 through a tap, where the calls 1 and 2 are those of group 1, and 3
    and 4 the connections of group 0 for data and control, and so on."""

    def __init__(self, tap: Tap) -> None:
        self.groups = Groups(4, timeout_s=TIMEOUT_S)
        self.middle = Middle(self.groups.replicas[2].address, tap)

    def __enter__(self) -> Ahead:
        members = tuple(map(Member, range(4)))
        for group, replicas in enumerate(self.groups.replicas):
            right_at = self.middle.address if group == 1 else self.groups.replicas[(group + 1) % 4].address
            replicas.adopt(Membership(1, members, right_at))
        self.groups.epoch = 1
        _sum(self.groups, range(4))
        return self

    def __exit__(self, *_: object) -> None:
        self.groups.close()
        with self.middle:
            pass

    def lose(self, late: bool = False) -> list[int]:
        """Group 1 is lost, and the others sum in the first epoch without it; ``late``: group 0 learns of it last.
        Returns how often each has called."""
        self.groups.view((0, 2, 3), (2, 3) if late else None)
        if late:
            time.sleep(0.05)
            self.groups.replicas[0].adopt(self.groups.membership(self.groups.epoch, (0, 2, 3), 0))
        _sum(self.groups, (0, 2, 3))
        return _calls(self.groups)


def test_one_that_ends_is_made_anew_and_the_epoch_goes_on() -> None:
    """Both connections are cut in the middle of beats, twice."""
    cutting = set[int]()
    with Ahead(lambda down, call, at, data: call not in cutting) as four:
        _get_ready(four.groups, range(4))
        assert four.middle.calls == 4
        for calls in (4, 6):
            cutting.update((calls - 1, calls))
            _await(lambda count=calls: four.middle.calls == count + 2)
            _get_ready(four.groups, range(4))
        _sum(four.groups, range(4))
        assert four.groups.replicas[0].ready_calls == 3
        assert four.lose() == [1] * 4


@pytest.mark.parametrize("held", [3, 4])
@pytest.mark.parametrize("late", [False, True])
def test_half_a_call_is_not_counted_on(held: int, late: bool) -> None:
    """One of the two connections is still on its way when the neighbour between is lost."""
    go_on = threading.Event()

    def tap(down: bool, call: int, at: int, data: bytearray) -> bool:
        return call != held or go_on.wait(PATIENCE_S)

    with Ahead(tap) as four:
        _await(lambda: four.middle.calls == 4)
        time.sleep(0.2)  # the other one has proved itself
        assert four.lose(late) == [2, 1, 1, 1]
        go_on.set()
        _get_ready(four.groups, (0, 2, 3))


@pytest.mark.parametrize("held", [3, 4])
def test_half_a_call_is_made_anew_in_the_same_ring(held: int) -> None:
    go_on = threading.Event()

    def tap(down: bool, call: int, at: int, data: bytearray) -> bool:
        return call != held or go_on.wait(PATIENCE_S)

    with Ahead(tap) as four:
        _await(lambda: four.middle.calls == 4)
        time.sleep(0.2)
        four.groups.view((0, 1, 2, 3))
        go_on.set()
        _sum(four.groups, range(4))
        _get_ready(four.groups, range(4))
        assert four.lose() == [1] * 4


def test_calls_that_fail_halfway_leave_nothing_behind() -> None:
    """The connection for control is cut in its first words, again and again; that for data stands each time."""
    before = _sockets()
    with Ahead(lambda down, call, at, data: call < 4 or call > 12 or call % 2 == 1 or down or at > 0) as four:
        _await(lambda: four.middle.calls >= 14)
        _get_ready(four.groups, range(4))
        four.groups.view((0, 1, 2, 3))
        _sum(four.groups, range(4))
        _get_ready(four.groups, range(4))
        four.middle.cut()
        four.groups.view((0, 1, 2, 3))
        _await(lambda: _sockets() - before <= 4 * 8 + 4 + 1 + len(four.middle.ends))


@pytest.mark.parametrize("noticed", [False, True])
def test_the_end_of_the_connection_for_data_alone_costs_one_call(noticed: bool) -> None:
    """Nobody waits for bytes on it; after a beat another call is made. Where that comes between the end and the loss,
    the loss costs no call."""
    with Ahead(lambda *_: True) as four:
        _get_ready(four.groups, range(4))
        caller = four.groups.replicas[0]
        assert caller.ready_calls == 1
        for end in four.middle.ends[4:6]:
            end.shutdown(socket.SHUT_RDWR)
        if noticed:
            _await(lambda: caller.ready_calls == 2)
            _get_ready(four.groups, range(4))
        first, *others = four.lose()
        assert others == [1, 1, 1]
        assert first == 1 if noticed else first == 2 or caller.ready_calls > 1


def test_one_that_was_silent_for_a_few_beats_is_not_used() -> None:
    """Nothing passes any more on the way of group 0's call; another way is open."""
    stop = threading.Event()

    def tap(down: bool, call: int, at: int, data: bytearray) -> bool:
        if stop.is_set() and call > 2:
            data.clear()
        return True

    with Ahead(tap) as four:
        _get_ready(four.groups, range(4))
        stop.set()
        time.sleep(0.3 * TIMEOUT_S)
        assert four.lose() == [2, 1, 1, 1]


def test_one_that_is_silent_harms_no_epoch_and_is_not_used() -> None:
    """Nothing passes between groups 0 and 2, who are no neighbours."""
    groups, relay = Groups(4, timeout_s=TIMEOUT_S / 4), Relay()
    try:
        members = tuple(map(Member, range(4)))
        for group in range(4):
            right = (group + 1) % 4
            front = relay.front(group, right, groups.replicas[right].address)
            groups.replicas[group].adopt(Membership(1, members, front))
        groups.epoch = 1
        _sum(groups, range(4))
        _get_ready(groups, range(4))
        relay.strike(Silent(lambda way: {way.sender, way.receiver} == {0, 2}))
        for _ in range(10):
            time.sleep(TIMEOUT_S / 16)
            _sum(groups, range(4))
        assert not groups.replicas[0].ready
        assert not groups.replicas[2].ready
        groups.view((0, 2, 3))
        _sum(groups, (0, 2, 3))
        assert _calls(groups) == [2, 1, 1, 1], "group 0 calls group 2 on another way"
    finally:
        groups.close()
        relay.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_changes_at_any_time(six: Groups, seed: int) -> None:
    """Views come at moments at which connections are being made ready, to some members later than to others; at the end
    each member has the eight connections of its place."""
    draw, before = random.Random(seed), _sockets()
    print(f"seed {seed}")
    members = set(range(6))
    for _ in range(40):
        members = members ^ set(draw.sample(range(6), draw.choice((0, 1, 1, 1, 2)))) or members
        order = tuple(sorted(members))
        late = tuple(draw.sample(order, draw.randrange(len(order))))
        six.view(order, tuple(group for group in order if group not in late))
        time.sleep(draw.choice((0.0, 0.005, 0.05)))
        for group in late:
            six.replicas[group].adopt(six.membership(six.epoch, order, group))
        _sum(six, order)
        time.sleep(draw.choice((0.0, 0.0, 0.01, 0.12, 0.25)))
    six.view(tuple(range(6)))
    _sum(six, range(6))
    _get_ready(six, range(6))
    _await(lambda: _sockets() - before == 6 * 8)
