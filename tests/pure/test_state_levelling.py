"""Moves of state shards between groups (protocol rule 26): whatever losses and returns have left, they come to an end,
groups keep as many shards as each other then, and no shard has fewer copies meanwhile."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from spare_megatron.planning.state_copies import copied, kept_by_all, without
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.state import State
from spare_megatron.protocol.state_levelling import levelled
from spare_megatron.protocol.state_shards import remaining, renewed
from spare_megatron.protocol.view import COUNTS, UNABLE, StateHost

GROUPS = 7


def after_losses(groups: int, copies: int, changes: list[int]) -> State:
    """The hosts after losses (of a group that is there) and returns (of one that is not); copies are made again after
    each, but groups never move any."""
    state = kept_by_all(groups, copies)
    for number, group in enumerate(changes, 1):
        if group % groups not in state.live:
            state = replace(state, live={**state.live, group % groups: number})
        elif len(state.live) > copies:
            state = copied(without(state, group % groups))
    return replace(state, live={group: state.live.get(group, 99) for group in range(groups)})


def kept(state: State) -> list[int]:
    """How many shards each member keeps, without those that it is to get."""
    counts = Counter(host.group for host in state.state_hosts if host.counts)
    return [counts[group] for group in sorted(state.live)]


def number_of_hosts(state: State) -> Counter[int]:
    """Of each shard, those that count."""
    return Counter(host.shard for host in state.state_hosts if host.counts)


@given(groups=st.integers(3, GROUPS), copies=st.integers(2, 3), changes=st.lists(st.integers(0, 6), max_size=12))
def test_moves_come_to_an_end_and_leave_all_groups_alike(groups: int, copies: int, changes: list[int]) -> None:
    state = after_losses(groups, min(copies, groups - 1), changes)
    due, squares, moves = state.job.state_copies, sum(one**2 for one in kept(state)), 0
    to_move = sum(max(0, one - due) for one in kept(state))
    while True:
        named, what = levelled(state)
        if not what:
            break
        moves += 1
        assert sum(host.is_new for host in named.state_hosts) == 1, "one move at a time"
        assert levelled(named) == (named, ""), "something moves while a host is new"
        state, _ = levelled(copied(remaining(renewed(named))))
        struck = replace(state, state_hosts=tuple(host for host in state.state_hosts if host.counts))
        assert all(number == due for number in number_of_hosts(struck).values())
        assert sum(one**2 for one in kept(struck)) <= squares - 2, "a move that is of no use, or is taken back"
        state, squares = struck, sum(one**2 for one in kept(struck))
    assert set(kept(state)) == {due}, "some keep more than others"
    assert moves == to_move, "more moves than are needed"


@given(
    groups=st.integers(3, GROUPS),
    changes=st.lists(st.integers(0, 6), max_size=12),
    asked=st.integers(0, 6),
    leaves=st.booleans(),
)
def test_some_groups_are_never_asked(groups: int, changes: list[int], asked: int, leaves: bool) -> None:
    """Who is to leave, and who had no room for a shard."""
    state = after_losses(groups, 2, changes)
    group, keeps = asked % groups, {host.shard for host in state.state_hosts if host.group == asked % groups}
    assume(len(keeps) < groups)
    refused = next(shard for shard in range(groups) if shard not in keeps)
    if leaves:
        state = replace(state, drained=frozenset({group}))
    else:
        hosts = (*state.state_hosts, StateHost(refused, group, state.live[group], UNABLE))
        state = replace(state, state_hosts=tuple(sorted(hosts, key=lambda host: (host.shard, host.group))))
    for _ in range(2 * groups**2):
        state, what = levelled(state)
        assert not any(host.is_new and host.group == group for host in state.state_hosts)
        if not what:
            return
        renamed = (replace(host, standing=COUNTS) if host.is_new else host for host in state.state_hosts)
        state = replace(state, state_hosts=tuple(renamed))
    raise AssertionError("moves do not come to an end")


def test_a_shard_with_too_many_hosts_loses_the_fullest_only() -> None:
    """An operator takes a drain back: the group's shards have new hosts, and it still counts."""
    state = kept_by_all(4, 2)
    hosts = sorted((*state.state_hosts, StateHost(0, 2, 0)), key=lambda host: (host.shard, host.group))
    after, what = levelled(replace(state, state_hosts=tuple(hosts)))
    assert what == "group 2 drops state shard 0"
    assert after.state_hosts == state.state_hosts
