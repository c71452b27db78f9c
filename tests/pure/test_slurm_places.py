"""Where groups run in a Slurm allocation, where they move when their nodes are lost, and how those that wait for nodes
put theirs together."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spare_megatron.cli.slurm import spare_nodes
from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.launch import slurm_commands
from spare_megatron.launch.fit_host import until_fit
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.node_looks import JobNodes, look_at_nodes
from spare_megatron.launch.slurm_attempt import first_nodes
from spare_megatron.launch.slurm_places import LEFT_OUT_AFTER, Move, SlurmPlaces


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


def test_a_node_that_a_drained_group_has_left_is_no_room() -> None:
    places = SlurmPlaces(allocation(2, 1, (1, 1, 1)), 1)
    assert places.has_room
    assert places.move(1, {1}, {0, 2}, rest={1}) == {1: 2}
    assert not places.has_room


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


def test_a_spare_node_in_the_rack_of_the_rest_of_the_group_is_taken_first() -> None:
    places = SlurmPlaces(allocation(2, 2, (1,) * 6), 2)
    places.racks = dict(enumerate("aabbab"))
    assert places.move(1, {2}, {0, 1, 3, 4, 5}) == {2: 5}
    assert places.move(0, {1}, {0, 3, 4, 5}) == {1: 4}


def test_racks_are_the_lowest_switches_or_blocks_of_slurms_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2,05],gpu7
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=r[1-2]n[8-9]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-2,05],gpu7,r[1-2]n[8-9] Switches=s[0-1]
BlockName=b1 BlockIndex=0 Nodes=m[09-10] BlockSize=2
"""
    for text, racks in ((shown, ["s0", "s0", "s1", "b1", ""]), ("", [])):
        answer = subprocess.CompletedProcess((), 0, text, "")
        monkeypatch.setattr(slurm_commands, "ask", lambda *words, answer=answer: answer)
        assert slurm_commands.racks_of(["n05", "gpu7", "r2n8", "m10", "n3"]) == racks


# ----------------------------------------------------------------------------------------------------------- salvage


def test_a_group_that_waits_is_completed_by_another_one_that_waits() -> None:
    """Ties: the lower number is completed. Who gave has the lost node, and is whole when that one is repaired."""
    places = SlurmPlaces(allocation(3, 2, (1,) * 6), 2)
    places.waits(2, {4: "it is dead"})
    assert places.salvage({0, 1, 2, 3, 5}) == {}, "one node makes no group whole"
    places.waits(1, {3: "it burns"})
    assert places.salvage({0, 1, 2, 5}) == {1: [Move(3, 5, "it burns", giver=2)]}
    assert [places.nodes_of(group) for group in range(3)] == [[0, 1], [2, 5], [4, 3]]
    assert places.salvage({0, 1, 2, 5}) == {}, "group 1 waits no more, so it gives nothing"


def test_who_misses_the_fewest_is_completed_from_spares_first_and_then_by_who_misses_most() -> None:
    """Five groups of three nodes and one spare node; group 0 lives."""
    places = SlurmPlaces(allocation(5, 3, (1,) * 16), 3)
    places.waits(1, {3: "", 4: ""})
    places.waits(2, {6: ""})
    places.waits(3, {9: "", 10: ""})
    places.waits(4, {12: "", 13: ""})
    done = places.salvage({0, 1, 2, 5, 7, 8, 11, 14, 15})
    assert done == {2: [Move(6, 15, "")], 1: [Move(3, 14, "", giver=4), Move(4, 11, "", giver=3)]}
    assert places.nodes_of(0) == [0, 1, 2]


def test_a_drained_group_neither_gives_nor_takes() -> None:
    places = SlurmPlaces(allocation(3, 2, (1,) * 6), 2)
    places.waits(1, {2: ""})
    places.waits(2, {4: ""})
    for drained in ([1], [2]):
        assert places.salvage({0, 1, 3, 5}, drained) == {}


def test_a_node_that_failed_the_check_of_the_group_that_was_given_it_is_not_given_to_it_again() -> None:
    """Its giver found it fit before; nor is it a spare node for others."""
    places = SlurmPlaces(allocation(2, 2, (1,) * 4), 2)
    places.waits(0, {0: ""})
    places.waits(1, {3: ""})
    assert places.salvage({1, 2}) == {0: [Move(0, 2, "", giver=1)]}
    places.waits(0, {0: "", 2: "its GPU is gone"})
    assert places.salvage({1, 2, 3}) == {}


def test_a_group_with_fewer_stages_gives_the_fit_nodes_that_it_does_not_use() -> None:
    """Three groups of four nodes: group 2 has lost one and runs on two, so one node is idle."""
    places = SlurmPlaces(allocation(3, 4, (1,) * 12), 4)
    places.waits(2, {9: "it is dead"})
    assert places.smaller(2, {8, 10, 11}, [(4, 4), (2, 2), (1, 1)]) == (2, [(8, 0), (10, 0)])
    assert places.missed_at_home(2) == [9, 11]
    fit = set(range(12)) - {9}
    places.waits(1, {4: "it burns"})
    assert places.salvage(fit - {4}) == {1: [Move(4, 11, "it burns", giver=2)]}
    assert places.nodes_of(2) == [8, 9, 10, 4]
    places.waits(0, {0: ""})
    assert places.salvage(fit - {0, 4}) == {}, "it uses the others"
    places.still_misses(2, {9: "it is dead"})
    assert places.salvage(fit - {0}) == {0: [Move(0, 4, "", giver=2)]}, "node 4 is fit again, and idle"
    assert places.could_move(2, (), fit), "a group whose missed nodes are fit goes home"
    places.waits_no_more(2)
    assert places.missed_at_home(2) == [8, 9, 10, 0]


def test_a_group_with_fewer_stages_is_not_completed_where_it_runs() -> None:
    places = SlurmPlaces(allocation(2, 2, (1,) * 5), 2)
    places.waits(0, {0: ""})
    assert places.smaller(0, {1}, [(1, 1)]) == (1, [(1, 0)])
    assert places.salvage({1, 2, 3, 4}) == {}
    places.waits(1, {2: ""})
    assert places.smaller(1, (), [(1, 1)]) is None, "no node is left"


def test_a_group_whose_results_were_wrong_leaves_all_its_nodes_and_gives_none() -> None:
    """Any of them may be the one. Nothing is started there, and no look takes the nodes after them for those."""
    places = SlurmPlaces(allocation(2, 2, (1,) * 8), 2)
    nodes = JobNodes({node: f"n{node}" for node in range(8)}, range(5), left=(2, 3), wrong="it shows")
    looked = list[int]()

    def check(some: Collection[int]) -> dict[int, HealthFault]:
        looked.extend(some)
        return {}

    look = look_at_nodes(places, 1, nodes, check)
    assert (look.fault, look.fit) == (HealthFault("node", "its results were wrong on n2: it shows"), set())
    assert (places.waiting(), places.of(1)) == ({}, ((2, 0), (3, 0)))
    nodes = replace(nodes, here=range(8))
    assert look_at_nodes(places, 1, nodes, check).fault is None
    assert places.nodes_of(1) == looked == [4, 5]
    assert places.resting == {2, 3}
    assert look_at_nodes(places, 1, nodes, check).moves == {}


def test_a_node_that_leaves_the_job_while_its_group_waits_is_said_once_more() -> None:
    """Nobody can repair that, unlike a node that does not answer: only another node helps."""
    places = SlurmPlaces(allocation(2, 2, (1,) * 4), 2)
    here = [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2}, {0, 1, 2}]
    said: list[str] = []

    async def look() -> HealthFault | None:
        nodes = JobNodes({node: f"n{node}" for node in range(4)}, here.pop(0))
        silent = {3: HealthFault("node", "n3: no answer")}
        return look_at_nodes(places, 1, nodes, lambda some: {one: silent[one] for one in some if one in silent}).fault

    async def goes_on() -> bool:
        return bool(here)

    async def at_once(_: float) -> None:
        return None

    assert not asyncio.run(until_fit(look, "group 1", said.append, goes_on, at_once))
    assert [re.sub("; looked.*", "", one) for one in said] == [
        "group 1 is not started again yet, n3: no answer",
        "group 1 is not started again yet, Slurm does not name n3 as a node of the job",
    ]


def test_shared_nodes_are_exchanged_only_where_local_numbers_stay_right() -> None:
    """Groups of 3 ranks on nodes of 2: groups 0 and 1 share node 1, groups 2 and 3 node 4."""
    places = SlurmPlaces(allocation(4, 3, (2,) * 6), 3)
    assert (places.of(0), places.of(3)) == (((0, 0), (0, 1), (1, 0)), ((4, 1), (5, 0), (5, 1)))
    places.waits(0, {1: ""})
    places.waits(3, {5: ""})
    assert places.salvage({0, 2, 3, 4}) == {3: [Move(5, 0, "", giver=0)]}, "place 1 of node 4 is not for a last rank"
    assert (places.of(0), places.of(3)) == (((5, 0), (5, 1), (1, 0)), ((4, 1), (0, 0), (0, 1)))


@dataclass
class Nodes:
    """A job whose nodes break and are repaired, and whose launcher looks at lost groups, as it does under Slurm."""

    groups: int
    size: int
    """Nodes of a group."""
    spares: int
    racks: Sequence[str] = ()
    shapes: Sequence[tuple[int, int]] = ()
    """Stages and nodes of the shapes in which a group may run that misses some."""

    def __post_init__(self) -> None:
        count = self.groups * self.size + self.spares
        self.places = SlurmPlaces(allocation(self.groups, self.size, (1,) * count), self.size)
        self.places.racks = dict(enumerate(self.racks))
        self.broken: set[int] = set()
        self.live = set(range(self.groups))
        self.waiting: list[int] = []
        self.used: dict[int, set[int]] = {}
        """Group in a smaller shape -> the nodes on which it runs."""

    def fit(self) -> set[int]:
        return set(range(self.groups * self.size + self.spares)) - self.broken

    def breaks(self, node: int) -> None:
        self.broken.add(node)
        for group in sorted(self.live):
            if node in self.used.get(group, self.places.nodes_of(group)):
                self.live.remove(group)
                self.used.pop(group, None)
                self.waiting.append(group)

    def homeward(self) -> None:
        """The launcher looks at what groups in smaller shapes miss."""
        for group in sorted(self.used):
            away = {node: "" for node in self.places.missed_at_home(group) if node in self.broken}
            if self.places.could_move(group, away, self.fit()):
                del self.used[group]
                self.live.remove(group)
                self.waiting.append(group)
                self.look(group)
            else:
                self.places.still_misses(group, away)

    def look(self, group: int, drained: Collection[int] = ()) -> None:
        """A look at a group that waits, and at those that it completes; Slurm has not noticed what is broken."""
        before = {one: self.places.of(one) for one in range(self.groups)}
        nodes = JobNodes({node: f"n{node}" for node in range(99)}, range(len(self.fit() | self.broken)), drained)
        look = look_at_nodes(
            self.places,
            group,
            nodes,
            lambda some: {node: HealthFault("node", f"n{node} is broken") for node in some if node in self.broken},
        )
        if look.fault is None:
            assert not self.broken.intersection(self.places.nodes_of(group))
            self.waiting.remove(group)
            self.live.add(group)
        elif shape := self.places.smaller(group, look.fit, self.shapes):
            self.used[group] = {node for node, _ in shape[1]}
            assert not self.broken & self.used[group]
            self.waiting.remove(group)
            self.live.add(group)
        given = {move.giver for moves in look.moves.values() for move in moves} - {None}
        completed = look.moves.keys() - ({group} if look.fault else set())
        assert not given & completed, "who gives is not completed"
        for one in range(self.groups):
            assert one in self.waiting or one == group or one in self.used or self.places.of(one) == before[one]
            assert self.used.get(one, set()) <= set(self.places.nodes_of(one)), "a node in use was given away"
            assert one in look.moves or one in given or self.places.of(one) == before[one]
            assert one not in drained or self.places.of(one) == before[one]
        owned = [node for one in range(self.groups) for node in self.places.nodes_of(one)]
        assert len(set(owned)) == len(owned) == self.groups * self.size, "a node has two owners"
        for other in look.moves.keys() - {group}:
            self.look(other, drained)

    def settle(self) -> None:
        """Look at all that wait, several times: groups that find a spare node broken try others."""
        for _ in range(2 + self.spares):
            for group in list(self.waiting):
                if group in self.waiting:
                    self.look(group)


@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 4),
    spares=st.integers(0, 4),
    racks=st.integers(0, 3),
    seed=st.randoms(use_true_random=False),
    events=st.lists(
        st.tuples(st.sampled_from(["breaks", "breaks", "repaired", "look"]), st.integers(0, 27)), max_size=40
    ),
)
@example(
    groups=2,
    size=2,
    spares=2,
    racks=0,
    seed=random.Random(0),
    events=[*(("breaks", node) for node in range(5)), ("look", 1), ("repaired", 2)],
)
def test_after_any_losses_and_repairs_as_many_groups_are_whole_as_nodes_allow(
    groups: int, size: int, spares: int, racks: int, seed: random.Random, events: list[tuple[str, int]]
) -> None:
    """At any moment nodes break or are repaired and any group that waits is looked at; racks only say which node is
    taken first."""
    count = groups * size + spares
    world = Nodes(groups, size, spares, [str(seed.randrange(racks)) for _ in range(count)] if racks else ())
    for event, number in events:
        node = number % count
        if event == "breaks":
            world.breaks(node)
        elif event == "repaired":
            world.broken.discard(node)
        elif world.waiting:
            world.look(world.waiting[number % len(world.waiting)])
    world.settle()
    assert len(world.live) == min(groups, len(world.fit()) // size)


@given(
    groups=st.integers(2, 5),
    size=st.integers(1, 4),
    spares=st.integers(0, 2),
    events=st.lists(
        st.tuples(st.sampled_from(["breaks", "breaks", "repaired", "look", "home"]), st.integers(0, 21)), max_size=40
    ),
)
def test_groups_with_fewer_stages_keep_what_they_use_and_come_home_when_all_is_repaired(
    groups: int, size: int, spares: int, events: list[tuple[str, int]]
) -> None:
    world = Nodes(groups, size, spares, shapes=[(stages, stages) for stages in range(size - 1, 0, -1)])
    for event, number in events:
        node = number % (groups * size + spares)
        if event == "breaks":
            world.breaks(node)
        elif event == "repaired":
            world.broken.discard(node)
        elif event == "home":
            world.homeward()
        elif world.waiting:
            world.look(world.waiting[number % len(world.waiting)])
    world.settle()
    fit = len(world.fit())
    assert sum(len(world.used.get(group, range(size))) for group in world.live) >= size * min(groups, fit // size)
    world.broken.clear()
    world.homeward()
    world.settle()
    assert len(world.live) == groups
    assert not world.used


@pytest.mark.parametrize(("groups", "size", "spares"), [(2, 2, 0), (2, 2, 1), (3, 2, 0), (2, 3, 1), (3, 1, 1)])
def test_of_every_set_of_broken_nodes_as_many_groups_as_possible_are_whole(groups: int, size: int, spares: int) -> None:
    """Whatever the order in which the groups are looked at."""
    count = groups * size + spares
    for broken in itertools.product((False, True), repeat=count):
        for order in itertools.permutations(range(groups)):
            world = Nodes(groups, size, spares)
            for node in itertools.compress(range(count), broken):
                world.breaks(node)
            world.waiting.sort(key=order.index)
            world.settle()
            assert len(world.live) == min(groups, broken.count(False) // size), (broken, order)


@given(
    rooms=st.lists(st.integers(1, 4), min_size=2, max_size=8),
    size=st.integers(1, 6),
    looks=st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 7)), st.booleans()), max_size=12),
)
def test_nodes_of_any_number_of_ranks_are_exchanged_without_a_place_for_two(
    rooms: list[int], size: int, looks: list[tuple[int, set[int], bool]]
) -> None:
    """Groups on parts of nodes: each keeps one run of places on a node, which begins at 0 except on its first node."""
    groups = sum(rooms) // size
    if groups < 1:
        return
    places, nodes = SlurmPlaces(allocation(groups, size, tuple(rooms)), size), set(range(len(rooms)))
    for group, unfit, gone in looks:
        places.waits(group % groups, dict.fromkeys(unfit & nodes, ""))
        usable = nodes - unfit if gone else nodes
        for completed in places.salvage(usable):
            assert set(places.nodes_of(completed)) <= usable
        given_out = [place for one in range(groups) for place in places.of(one)]
        assert len(set(given_out)) == len(given_out) == groups * size
        assert all(number < rooms[node] for node, number in given_out)
        for one in range(groups):
            runs = [
                [place for _, place in run] for _, run in itertools.groupby(places.of(one), key=lambda place: place[0])
            ]
            assert len(runs) == len(places.nodes_of(one))
            assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
            assert not any(run[0] for run in runs[1:])


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
