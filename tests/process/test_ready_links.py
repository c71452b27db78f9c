"""Connections that are ready for the loss of a neighbour: it costs no call, and what happens to them harms no epoch."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from spare_megatron.collectives.handshake import Member
from spare_megatron.collectives.replica_communicators import Membership
from tests.process.middle import Middle
from tests.process.relay import Mute, Relay
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
    before = _sockets()
    six.view((0, 1, 2, 4, 5))
    _sum(six, (0, 1, 2, 4, 5))
    _get_ready(six, (0, 1, 2, 4, 5))
    six.view(tuple(range(6)))
    _sum(six, range(6))
    _get_ready(six, range(6))
    assert _calls(six) == [1, 1, 2, 1, 1, 1]
    _await(lambda: _sockets() - before == 6 * 8)  # of both ends


def test_one_that_ends_is_made_anew_and_the_epoch_goes_on() -> None:
    """Group 0 is told by group 1 of an address before group 2, where its own call is cut in two of its beats."""
    groups, cutting = Groups(4, timeout_s=TIMEOUT_S), set[int]()
    with Middle(groups.replicas[2].address, lambda down, call, at, data: call not in cutting) as middle:
        try:
            members = tuple(map(Member, range(4)))
            for group in range(4):
                right_at = middle.address if group == 1 else groups.replicas[(group + 1) % 4].address
                groups.replicas[group].adopt(Membership(1, members, right_at))
            groups.epoch = 1
            _sum(groups, range(4))
            _get_ready(groups, range(4))
            assert middle.calls == 4, "two connections of group 1, two of group 0"
            for calls in (4, 6):
                cutting.update((calls - 1, calls))
                _await(lambda count=calls: middle.calls == count + 2)
                _get_ready(groups, range(4))
            assert groups.replicas[0].ready_calls == 3
            _sum(groups, range(4))
            assert _calls(groups) == [1] * 4
            groups.view((0, 2, 3))
            _sum(groups, (0, 2, 3))
            assert _calls(groups) == [1] * 4
        finally:
            groups.close()


def test_one_that_is_mute_harms_no_epoch_and_is_not_used() -> None:
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
        relay.strike(Mute(lambda way: {way.sender, way.receiver} == {0, 2}))
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
