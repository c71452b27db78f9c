"""The fast copy of a state is what ``dataclasses.replace`` makes."""

from __future__ import annotations

import dataclasses

import pytest

from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.machine import initial_state
from spare_megatron.protocol.state import State


def cached(value: State) -> set[str]:
    """What the value has computed once."""
    return value.__dict__.keys() - {field.name for field in dataclasses.fields(value)}


def test_a_changed_copy_is_equal_to_that_of_dataclasses_and_caches_nothing() -> None:
    state = initial_state()
    assert replace(state) == state
    assert replace(state, epoch=7, live={1: 2}) == dataclasses.replace(state, epoch=7, live={1: 2})
    assert state == initial_state(), "the value itself is as it was"
    state.__dict__["computed_once"] = 1
    assert cached(state) == {"computed_once"}
    assert not cached(replace(state, epoch=7))
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(state).epoch = 3  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="State has no field 'epok'"):
        replace(initial_state(), epok=3)  # type: ignore[call-arg]
