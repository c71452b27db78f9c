"""Random walks of a whole job through the real controller: any order, repeats, losses, deaths at any moment.

Safety is checked after every event, then liveness: with no further fault the job ends, finished or wiped out.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.pure.world import World

WALK = st.lists(st.integers(0, 2**16), min_size=20, max_size=400)


SETTINGS = settings(
    max_examples=300,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SETTINGS
@given(
    num_groups=st.integers(2, 5),
    pieces=st.integers(1, 3),
    redundancy=st.integers(1, 4),
    granularity=st.sampled_from(["microbatch", "shard"]),
    faults=st.integers(0, 15),
    formed=st.sampled_from([True, True, True, False]),
    walk=WALK,
)
def test_any_interleaving_is_safe_and_ends(
    num_groups: int, pieces: int, redundancy: int, granularity: str, faults: int, formed: bool, walk: list[int]
) -> None:
    world = World(num_groups, pieces, min(redundancy, num_groups), granularity, steps=5, faults=faults)
    if formed:
        world.form()
    _walk(world, walk)


@SETTINGS
@given(
    num_groups=st.integers(2, 5),
    pieces=st.integers(1, 3),
    redundancy=st.integers(2, 5),
    granularity=st.sampled_from(["microbatch", "shard"]),
    faults=st.integers(1, 12),
    audit_rate=st.sampled_from([0.3, 1.0]),
    walk=WALK,
)
def test_wrong_arithmetic_in_an_audited_piece_is_never_committed(
    num_groups: int, pieces: int, redundancy: int, granularity: str, faults: int, audit_rate: float, walk: list[int]
) -> None:
    world = World(num_groups, pieces, min(redundancy, num_groups), granularity, 5, faults, audit_rate)
    world.form()
    _walk(world, walk)


@SETTINGS
@given(
    num_groups=st.integers(2, 5),
    granularity=st.sampled_from(["microbatch", "shard"]),
    faults=st.integers(1, 12),
    walk=WALK,
)
def test_damaged_weights_are_never_in_a_checkpoint_that_counts(
    num_groups: int, granularity: str, faults: int, walk: list[int]
) -> None:
    world = World(num_groups, 2, num_groups, granularity, 5, faults, damages=True)
    world.form()
    _walk(world, walk)


def _walk(world: World, walk: list[int]) -> None:
    for number in walk:
        choice = world.pick(number)
        if choice is None:
            break
        note(choice[0])
        choice[1]()
    _run_out(world)
    world.replay()


def _run_out(world: World) -> None:
    """No further fault: what can happen happens, in a fair (seeded) order, until the job is over."""
    order = random.Random(0)
    for _ in range(20_000):
        if world.state.stopped:
            break
        choices = world.enabled()
        assert choices, "the job stands still: " + "\n".join(world.trace[-12:])
        order.choice(choices)[1]()
    assert world.state.stopped, "the job does not end: " + "\n".join(world.trace[-12:])
    if world.state.stopped == "finished":
        assert sorted(world.applied_result) == list(range(1, world.spec.last_step + 1))
