"""What users' own objects keep from step to step: it goes with the engine's state, votes compare it, checkpoints have
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.worker import carried_state
from spare_megatron.worker.carried_state import CarryingEngine, carried, carry_state
from tests.process.toy_engine import ToyEngine
from tests.tickets import run_of


class Counter:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.extra: Any = None

    def after_step(self, step: int, figures: Mapping[str, Any]) -> None:
        self.seen.append(step + round(figures["lr"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "extra": self.extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.extra = list(state["seen"]), state["extra"]


@pytest.fixture(autouse=True)
def _nothing_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_state, "_owners", {})


def engine() -> ToyEngine:
    return ToyEngine(0, 1, 1, 1, 0.0)


def trained(steps: int) -> tuple[CarryingEngine, Counter]:
    counter = Counter()
    one = CarryingEngine(engine(), {"counter": counter})  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        one.begin_step(step)
        one.run(step, run_of([0]))
        one.apply(step, one.local_sum(), one.scalars())
    return one, counter


def test_another_rank_goes_on_from_the_state() -> None:
    one, counter = trained(3)
    other, late = trained(0)
    values, tensors = one.state_values(), one.state_tensors()
    counter.seen.append(99)
    for name, tensor in other.state_tensors().items():
        tensor.copy_(tensors[name])
    other.adopt_state(3, values)
    assert late.seen == [1, 2, 3]
    counter.seen.pop()
    assert other.weights_digest() == one.weights_digest()


class TwoRows(ToyEngine):
    """A rank with the rows of two pipeline stages."""

    def rows(self) -> list[ToyEngine]:
        return [engine(), engine()]


def test_the_rows_of_a_rank_must_come_with_one_state() -> None:
    counter = Counter()
    one = CarryingEngine(TwoRows(0, 1, 1, 1, 0.0), {"counter": counter})  # type: ignore[arg-type]
    theirs, other = trained(3)
    first = theirs.state_values()
    other.extra = "another"
    second = theirs.state_values()
    for values in (first, second):  # two offers, one after the other
        for row in one.rows():
            row.adopt_state(3, values)
    assert counter.extra == "another"
    row, last = one.rows()
    row.adopt_state(3, first)
    with pytest.raises(ConfigError, match=r"of 'counter' \(carry_state\) .*null.* and .*another.* after step 3; let"):
        last.adopt_state(3, second)


def test_what_an_engine_compares_beside_its_weights_stays_a_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = trained(1)
    alone = one.weights_digest()
    monkeypatch.setattr(ToyEngine, "weights_digest", lambda engine: f"{engine.digest()}+shard")
    assert one.weights_digest() == f"{alone}+shard"


def test_votes_see_a_state_that_differs_and_name_it() -> None:
    one, _ = trained(2)
    other, counter = trained(2)
    assert one.weights_digest() == other.weights_digest()
    assert one.weights_digest() != one.engine.weights_digest()
    counter.extra = {"seconds": 1.5}
    assert one.weights_digest() != other.weights_digest()
    ours, theirs = one.weights_checksums(), other.weights_checksums()
    assert {name for name in ours if ours[name] != theirs[name]} == {"carried.counter"}
    assert all(-(2**63) <= value < 2**63 for value in ours.values())


def test_a_checkpoint_has_it(caplog: pytest.LogCaptureFixture) -> None:
    one, _ = trained(2)
    kept = one.with_states({"method": "exact"})
    assert kept is not None
    assert kept["method"] == "exact"
    other, counter = trained(0)
    other.restore(kept)
    assert counter.seen == [1, 2]
    assert not caplog.messages
    other.restore({"method": "exact"})
    other.restore(None)
    CarryingEngine(engine(), {}).restore(kept)  # type: ignore[arg-type]
    assert [message[:40] for message in caplog.messages] == [
        "the checkpoint has no state of 'counter'",
        "the checkpoint has no state of 'counter'",
        "the checkpoint has a state of 'counter',",
    ]


def test_nothing_changes_where_nothing_is_carried() -> None:
    bare = engine()
    one = CarryingEngine(bare, {})  # type: ignore[arg-type]
    assert one.weights_digest() == bare.weights_digest()
    assert one.weights_checksums() == bare.weights_checksums()
    assert one.with_states(None) is None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ((1, 2), "a tuple at ['extra']"),
        ({"a": [0, {1}]}, "a set at ['extra']['a'][1]"),
        ({1: 2}, "a dict at ['extra']"),
    ],
)
def test_what_is_no_json_is_one_sentence(value: Any, where: str) -> None:
    counter = Counter()
    counter.extra = value
    with pytest.raises(ConfigError) as caught:
        CarryingEngine(engine(), {"counter": counter})  # type: ignore[arg-type]
    assert where in str(caught.value)
    assert "'counter'" in str(caught.value)


def test_what_is_handed_over() -> None:
    first, second = Counter(), Counter()
    carry_state("b", first)
    carry_state("a", second)
    carry_state("b", first)
    assert list(carried().items()) == [("a", second), ("b", first)]
    with pytest.raises(ValueError, match="another object has this name"):
        carry_state("a", first)
    with pytest.raises(TypeError, match="int has no state_dict and no load_state_dict"):
        carry_state("c", 3)  # type: ignore[arg-type]
