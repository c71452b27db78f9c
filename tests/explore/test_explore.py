"""Every interleaving of the smallest shapes (tests.explore.model says what is modelled and checked).

Every state is visited. A search that finds a violation prints the shortest list of moves that leads to it;
``python -m tests.explore --shape NAME --play 'MOVES'`` prints what happens in each move.
"""

from __future__ import annotations

import pytest

from tests.explore.model import Model
from tests.explore.search import Explorer
from tests.explore.shape import Shape
from tests.explore.shapes import ANY, FULL, PLAIN

LARGEST = (
    "three groups, each shard on two, a learner called as the last resort",
    "two groups, two pieces of a shard, one that is slow and asked, and any fault",
    "three groups, one that is drained and is back, each shard on two",
    "three groups, each shard on two, one step, any fault",
    "two groups, two state shards twice, any two of a few faults",
    "three groups, two state shards twice, two losses",
)
"""Half of the time of all. Random walks (:mod:`.test_walks`) go through what they have in common with others: any fault
of three groups with every shard on all, and the faults of two groups with state shards one by one. All moves of the
last one are among those of the same shape in which a group may also find that it cannot keep a shard."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LARGEST else name for name in PLAIN]
)
def test_every_interleaving_is_safe_and_ends(name: str) -> None:
    print(f"{name}: {Explorer(Model(PLAIN[name])).explore()}")


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FULL)
def test_every_interleaving_of_larger_shapes_is_safe_and_ends(name: str) -> None:
    print(f"{name}: {Explorer(Model(FULL[name])).explore()}")


REDUCED = {
    **{kind: Shape(faults=1, kinds=frozenset({kind})) for kind in sorted(ANY - {"late", "return", "takeover"})},
    "takeover": Shape(steps=1, faults=1, kinds=frozenset({"takeover"})),
    "return": Shape(faults=2, kinds=frozenset({"kill", "return"})),
    "cut and fail": Shape(steps=1, faults=2, kinds=frozenset({"cut", "fail"}), save_every=1),
    "three groups": Shape(3, 2, steps=1, faults=1, kinds=frozenset({"suspect"}), formed=True),
}


LONG = ("return", "three groups")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in REDUCED]
)
def test_the_partial_order_reduction_loses_no_state_of_the_machine(name: str) -> None:
    few, all_of_them = Model(REDUCED[name]), Model(REDUCED[name])
    reduced, complete = Explorer(few).explore(), Explorer(all_of_them, every_move=True).explore()
    print(f"{name}: {reduced}, without the reduction {complete}")
    assert few.do.brains.states == all_of_them.do.brains.states
    assert reduced.ends.keys() == complete.ends.keys()
    assert reduced.states < complete.states
