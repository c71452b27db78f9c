"""How much slow groups give back and who takes it, against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from spare_megatron.placement import build_placement
from spare_megatron.protocol.rebalance import GAIN, MARGIN, first_given, shared_out, unbegun, wanted


class Step:
    """Some groups, each with the pieces of its shard, K each."""

    def __init__(self, paces: dict[int, tuple[int, float]], redundancy: int, pieces: int) -> None:
        self.paces, self.pieces = paces, pieces
        self._hosts = build_placement(len(paces), redundancy).hosts()

    def left(self, group: int) -> Sequence[int]:
        """What a group may give, in the order in which it does."""
        end = (group + 1) * self.pieces
        return first_given([range(end - self.paces[group][0], end)], self.pieces)

    def hosts(self, piece: int) -> Sequence[int]:
        return self._hosts[piece // self.pieces].tolist()

    def asked(self) -> dict[int, int]:
        return wanted(self.paces, self.left, self.hosts)

    def given(self, asked: dict[int, int]) -> dict[int, Sequence[int]]:
        return {group: self.left(group)[:count] for group, count in asked.items()}

    def end_s(self, asked: dict[int, int], taken: dict[int, list[int]]) -> float:
        left = {g: n - asked.get(g, 0) + len(taken.get(g, ())) for g, (n, _) in self.paces.items()}
        return max(left[group] * piece_s for group, (_, piece_s) in self.paces.items())

    def least_s(self) -> float:
        """Of all ways to give the pieces that are left to hosts of their shards."""
        names = sorted(self.paces)
        loose = [group for group in names for _ in range(self.paces[group][0])]
        best = float("inf")
        for takers in itertools.product(*(self._hosts[group].tolist() for group in loose)):
            best = min(best, max(takers.count(group) * self.paces[group][1] for group in names))
        return best


@pytest.mark.parametrize("seed", range(60))
def test_the_step_ends_within_a_piece_of_the_least(seed: int) -> None:
    draw = random.Random(seed)
    groups = draw.choice((2, 3))
    paces = {group: (draw.randrange(4), draw.choice((1.0, 1.0, 1.5, 2.0, 3.0))) for group in range(groups)}
    step = Step(paces, draw.randrange(1, groups + 1), 4)
    asked = step.asked()
    taken = shared_out(step.given(asked), paces, step.hosts)
    before_s, after_s = step.end_s({}, {}), step.end_s(asked, taken)
    slowest_s = max(piece_s for _, piece_s in paces.values())
    assert after_s <= before_s
    assert sum(asked.values()) == sum(map(len, taken.values()))
    assert after_s <= step.least_s() + max(GAIN, 1 + MARGIN) * slowest_s
    for group, pieces in taken.items():
        assert all(group in step.hosts(piece) for piece in pieces)


def test_a_group_at_half_speed_is_relieved_by_all_although_one_alone_hosts_its_shard() -> None:
    step = Step({0: (8, 1.0), 1: (8, 1.0), 2: (12, 2.0), 3: (8, 1.0)}, 2, 16)
    asked = step.asked()
    taken = shared_out(step.given(asked), step.paces, step.hosts)
    assert step.end_s(asked, taken) <= 14.0, "52 units of work at 3.5 groups' speed, cut into pieces, are 13.7"


def test_groups_that_are_nearly_even_are_left_alone() -> None:
    assert Step({0: (8, 1.0), 1: (8, 1.05), 2: (8, 1.0)}, 3, 8).asked() == {}
    assert Step({0: (8, 1.0)}, 1, 8).asked() == {}
    assert Step({0: (8, 1.0), 1: (8, 9.0)}, 1, 8).asked() == {}, "no other host"


def test_pieces_are_given_of_all_shards_in_turn_and_those_of_a_patch_last() -> None:
    assert first_given([], 4) == []
    assert first_given([(0, 1, 2, 3)], 4) == [3, 2, 1, 0]
    assert first_given([(1, 2, 3, 8, 9, 10, 5)], 4) == [3, 10, 5, 2, 9, 1, 8]
    assert first_given([(1, 2, 3), (), (8, 9, 16)], 4) == [3, 2, 1, 9, 16, 8]
    assert unbegun([(1, 2, 3), (8, 9)], 3) == [[3], [8, 9]]
    assert unbegun([(1, 2, 3), (8, 9)], 0) == [[], []]
    assert unbegun([(1, 2, 3), (8, 9)], 5) == [[1, 2, 3], [8, 9]]


def test_a_patch_is_passed_on_by_hosts_that_all_have_as_much_of_it() -> None:
    """Hosts of a lost shard end last, all at one time; what they can give to others is of their own shards."""
    groups, pieces = 12, 8
    hosts = build_placement(groups, 3).hosts()
    lost = 4
    plans = {g: [list(range(g * pieces, (g + 1) * pieces)), list[int]()] for g in range(groups) if g != lost}
    keepers = [host for host in hosts[lost].tolist() if host != lost]
    for n, piece in enumerate(range(lost * pieces, (lost + 1) * pieces)):
        plans[keepers[n % len(keepers)]][1].append(piece)
    loads = {group: sum(map(len, plan)) for group, plan in plans.items()}
    paces = {group: (load, 1.0) for group, load in loads.items()}

    def of(piece: int) -> list[int]:
        return [host for host in hosts[piece // pieces].tolist() if host != lost]

    asked = wanted(paces, lambda group: first_given(plans[group], pieces), of)
    given = {group: first_given(plans[group], pieces)[:count] for group, count in asked.items()}
    taken = shared_out(given, paces, of)
    ends = {group: load - asked.get(group, 0) + len(taken.get(group, ())) for group, load in loads.items()}
    assert max(loads.values()) == pieces + pieces // len(keepers)
    assert max(ends.values()) <= pieces + 2, "96 pieces on 11 groups; 12 without relief"
