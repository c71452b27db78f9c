"""Whom votes find wrong in a job whose groups keep only some state shards (protocol rule 12): every place at which one
group of a small job can be damaged. No group that is right is fenced, and no step is committed on what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pure.scenario import Player

RIGHT, WRONG = "a", "b"


def opened(groups: int, copies: int) -> Player:
    """A job of which every group is about to vote on the weights after its first step."""
    player = Player()
    everybody = ",".join(map(str, range(groups)))
    player.play(f"open N={groups} K=1 r={groups} steps=9 shards={groups} copies={copies}")
    player.play(f"hello {everybody}")
    player.play(f"vote {everybody} weights={RIGHT}")
    assert player.state.committed == (1, 1)
    return player


def hosts_of(player: Player, shard: int) -> list[int]:
    return sorted(host.group for host in player.state.state_hosts if host.shard == shard)


def vote(player: Player, damaged: tuple[int, int] | None, unlike: set[int]) -> None:
    """All members vote: the copy of ``damaged``, (shard, group), is another, and so are the weights of ``unlike``."""
    for group in sorted(player.state.live):
        kept = [host.shard for host in player.state.state_hosts if host.group == group and host.counts]
        state = ",".join(f"{shard}:{7 if (shard, group) == damaged else 0}" for shard in kept)
        player.play(f"vote {group} weights={WRONG if group in unlike else RIGHT} state={state}")


def verdict(player: Player, damaged: tuple[int, int] | None, unlike: set[int]) -> set[int] | str:
    """The groups that are fenced, 'commit', or the outcome of the job."""
    members = set(player.state.live)
    for _ in range(2):  # the second votes say where
        vote(player, damaged, unlike)
        if player.state.phase == "stopped":
            return player.state.outcome
        if player.state.committed[0] == 2:
            return "commit"
        if members != set(player.state.live):
            return members - set(player.state.live)
    raise AssertionError("two rounds of votes have decided nothing")


def jobs() -> Iterator[tuple[int, int, int, int]]:
    """(groups, copies, shard, group)."""
    for groups in (2, 3, 4, 5):
        for copies in range(1, groups):
            for shard in range(groups):
                for group in range(groups):
                    yield groups, copies, shard, group


@pytest.mark.parametrize("what", ["a moment", "the weights that it made", "its copy of weights"])
def test_one_group_is_damaged(what: str) -> None:
    for groups, copies, shard, group in jobs():
        player = opened(groups, copies)
        hosts = hosts_of(player, shard)
        if (group in hosts) == (what == "its copy of weights"):
            continue
        at = f"{what} of {groups} groups with {copies} copies: shard {shard} in group {group}"
        unlike = set[int]()
        if what == "its copy of weights":
            unlike = {group}
        elif what == "the weights that it made":
            others = set(range(groups)) - set(hosts)
            unlike = {group} | (others if group == hosts[0] else set())
        damaged = None if what == "its copy of weights" else (shard, group)
        result = verdict(player, damaged, unlike)
        if copies == 1:  # nothing can compare what its only host has
            assert result == ("failed" if damaged is None else "commit"), at
        elif damaged is None or (copies > 2 and unlike <= {group}):
            assert result == {group}, at
        elif copies == 2:
            assert result == "failed", at
        else:  # a primary: others computed on what it had made
            assert result == "failed" or (isinstance(result, set) and result <= {group} | unlike), at


def test_weights_are_damaged_on_their_way() -> None:
    """All that do not host the shard have the same wrong ones: often most members."""
    for groups, copies, shard, _ in jobs():
        player = opened(groups, copies)
        hosts = set(hosts_of(player, shard))
        result = verdict(player, None, set(range(groups)) - hosts)
        assert result == "failed" or (isinstance(result, set) and not result & hosts), (groups, copies, shard)
