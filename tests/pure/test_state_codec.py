"""A state that is encoded, written as JSON and decoded is the same state, and decides the same from there on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.messages import Event
from spare_megatron.protocol.state import Plan
from spare_megatron.protocol.state_codec import decode_state, encode_state
from tests.explore.model import Model
from tests.explore.shape import Shape
from tests.explore.shapes import ANY, SHARDS
from tests.explore.walk import walk


def again(state: State) -> State:
    """As a restart reads it."""
    return decode_state(json.loads(json.dumps(encode_state(state))))


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """Equal in value, type and order, also where the classes define no equality."""
    assert type(one) is type(other), where
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert one.tobytes() == other.tobytes(), where
        assert one.flags.writeable == other.flags.writeable, where
    elif isinstance(one, Plan):
        assert one.members == other.members, where
        assert_same(dict(one.added), dict(other.added), f"{where}.added")
        assert_same(one.assignment, other.assignment, f"{where}.assignment")
    elif isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key}]")
    elif isinstance(one, tuple | list):
        assert len(one) == len(other), where
        for number, (mine, its) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, its, f"{where}[{number}]")
    elif is_dataclass(one):
        for item in fields(one):
            assert_same(getattr(one, item.name), getattr(other, item.name), f"{where}.{item.name}")
    else:
        assert one == other, where


def assert_survives(events: list[Event]) -> None:
    """At each event: the state survives, and so do the decisions of a machine that is restarted before each event."""
    state = restarted = initial_state()
    for event in events:
        before = again(restarted)
        assert_same(restarted, before)
        state, decision = step(state, event)
        restarted, repeated = step(before, event)
        assert repeated == decision
        assert_same(state, restarted)
        shared = state.standing is not None and state.plan is state.standing.plan
        assert shared == (restarted.standing is not None and restarted.plan is restarted.standing.plan)
    assert_same(state, again(state))


def test_the_first_state_survives() -> None:
    assert_same(initial_state(), again(initial_state()))


@settings(
    max_examples=75,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    num_groups=st.integers(2, 5),
    pieces=st.integers(1, 3),
    redundancy=st.integers(1, 4),
    granularity=st.sampled_from(["microbatch", "shard"]),
    faults=st.integers(0, 15),
    save_every=st.integers(0, 2),
    audit_rate=st.sampled_from([0.0, 0.5]),
    wrong=st.sampled_from([frozenset[str](), frozenset({"err"}), frozenset({"damage"})]),
    numbers=st.lists(st.integers(0, 2**16), min_size=20, max_size=300),
)
def test_any_state_of_a_walk_survives(
    num_groups: int,
    pieces: int,
    redundancy: int,
    granularity: str,
    faults: int,
    save_every: int,
    audit_rate: float,
    wrong: frozenset[str],
    numbers: list[int],
) -> None:
    reported = frozenset({"speeds"})
    redundancy, kinds = (
        min(redundancy, num_groups),
        ANY | reported | (wrong if audit_rate or wrong == {"damage"} else set()),
    )
    model = Model(
        Shape(num_groups, redundancy, 5, pieces, faults, kinds, (), save_every, audit_rate, granularity, formed=True)
    )
    _, moves = walk(model, numbers)
    note("; ".join(moves))
    assert model.do.received is not None
    assert_survives(model.do.received)


@settings(max_examples=30, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_groups=st.integers(2, 5),
    copies=st.integers(1, 3),
    numbers=st.lists(st.integers(0, 2**16), min_size=20, max_size=300),
)
def test_any_state_with_state_shards_survives(num_groups: int, copies: int, numbers: list[int]) -> None:
    shape = Shape(num_groups, num_groups, 5, faults=10, kinds=SHARDS, state_shards=3, state_copies=copies, formed=True)
    model = Model(shape)
    _, moves = walk(model, numbers)
    note("; ".join(moves))
    assert model.do.received is not None
    assert_survives(model.do.received)


def test_in_a_snapshot_of_an_older_version_every_group_hosts_everything() -> None:
    plain = encode_state(initial_state())
    del plain["state_hosts"]
    assert_same(initial_state(), decode_state(plain))


@pytest.mark.parametrize("field", ["votes", "plan", "assignments", "spec"])
def test_a_state_without_a_field_is_refused(field: str) -> None:
    plain = encode_state(initial_state())
    del plain[field]
    with pytest.raises((KeyError, TypeError)):
        decode_state(plain)
