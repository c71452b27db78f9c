"""Where groups run in a Slurm allocation, and where they move when their nodes are lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.cli.slurm import spare_nodes
from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.launch.slurm_life import first_nodes
from spare_megatron.launch.slurm_places import LEFT_OUT_AFTER, SlurmPlaces


def allocation(groups: int, size: int, rooms: tuple[int, ...]) -> Allocation:
    return Allocation("7", len(rooms), sum(rooms), tasks_of_nodes=rooms).with_spares(groups, size)


def test_a_group_moves_to_a_spare_node_and_on_to_the_next() -> None:
    places = SlurmPlaces(allocation(3, 4, (4, 4, 4, 4, 4)), 4)
    assert places.of(1) == ((1, 0), (1, 1), (1, 2), (1, 3))
    assert places.move(1, {1}, {0, 2, 3, 4}) == {1: 3}
    assert places.of(1) == ((3, 0), (3, 1), (3, 2), (3, 3))
    assert places.move(2, {2}, {0, 3, 4}) == {2: 4}
    assert places.move(1, {1, 3}, {0, 4}) == {}, "nothing is spare any more"
    assert places.nodes_of(1) == [3]
    assert not places.has_room or sum(map(len, map(places.of, range(3)))) == 12


def test_of_a_group_of_many_nodes_only_the_lost_one_is_replaced() -> None:
    places = SlurmPlaces(allocation(2, 6, (2,) * 8), 6)
    assert places.move(0, {1}, {0, 2, 3, 4, 5, 7}) == {1: 7}
    assert places.of(0) == ((0, 0), (0, 1), (7, 0), (7, 1), (2, 0), (2, 1))


def test_small_groups_share_a_spare_node() -> None:
    places = SlurmPlaces(allocation(4, 2, (4, 4, 4)), 2)
    assert places.move(0, {0}, {1, 2}) == {0: 2}
    assert places.move(1, {0}, {1, 2}) == {0: 2}
    assert (places.of(0), places.of(1)) == (((2, 0), (2, 1)), ((2, 2), (2, 3)))


def test_a_later_node_of_a_group_has_no_other_ranks_before_its_own() -> None:
    places = SlurmPlaces(allocation(2, 4, (2, 2, 2, 2, 4)), 4)
    assert places.move(0, {0}, {1, 2, 3, 4}) == {0: 4}
    assert places.move(1, {3}, {1, 2, 4}) == {}, "local numbers of its ranks there would not begin at 0"
    assert places.move(1, {2}, {1, 3, 4}) == {2: 4}
    assert places.of(1) == ((4, 2), (4, 3), (3, 0), (3, 1))


def test_a_node_that_fails_again_and_again_is_named() -> None:
    places = SlurmPlaces(allocation(1, 2, (2, 2)), 2)
    for now_s in (0.0, 3700.0, 3800.0):
        assert places.failing([0]) == []
        places.lost(0, now_s)
    assert places.failing([0]) == [], "the first was more than an hour before"
    places.lost(0, 3900.0)
    assert LEFT_OUT_AFTER == 3
    assert places.failing([0, 1]) == [0]


@given(
    rooms=st.lists(st.integers(1, 4), min_size=2, max_size=8),
    size=st.integers(1, 6),
    deaths=st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 7))), max_size=12),
)
def test_places_are_given_once_and_never_on_a_node_that_is_away(
    rooms: list[int], size: int, deaths: list[tuple[int, set[int]]]
) -> None:
    groups = max(1, sum(rooms) // size - 1)
    if groups * size > sum(rooms):
        return
    places, nodes = SlurmPlaces(allocation(groups, size, tuple(rooms)), size), set(range(len(rooms)))
    for group, away in deaths:
        group %= groups
        before = places.of(group)
        moves = places.move(group, away, nodes - away)
        if not moves:
            assert places.of(group) == before
        else:
            assert not {node for node, _ in places.of(group)} & away
            assert set(moves) == {node for node, _ in before} & away
        given_out = [place for one in range(groups) for place in places.of(one)]
        assert len(set(given_out)) == len(given_out) == groups * size
        assert all(number < rooms[node] for node, number in given_out)
        firsts = [
            next(place[1] for place in places.of(group) if place[0] == node) for node in places.nodes_of(group)[1:]
        ]
        assert not moves or not any(
            firsts[index] for index, node in enumerate(places.nodes_of(group)[1:]) if node in moves.values()
        )


def test_what_spares_there_are_is_said_and_the_first_step_keeps_off_them() -> None:
    one = allocation(3, 4, (4, 4, 4, 4))
    assert list(spare_nodes(one)) == ["1 spare node: it can take the place of a lost node"]
    assert first_nodes(one) == ("--nodes=3", "--relative=0")
    two = allocation(2, 4, (4, 4, 4, 2))
    assert list(spare_nodes(two)) == ["2 spare nodes: they can take the place of a lost node"]
    none = allocation(4, 4, (4, 4, 4, 4))
    assert (list(spare_nodes(none)), first_nodes(none)) == ([], ())


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [(0, "must be at least 1"), (5, "needs 20 ranks (4 for each group), and the job has 16 on 4 nodes")],
)
def test_more_groups_than_the_job_has_nodes_for(groups: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        allocation(groups, 4, (4, 4, 4, 4))
