"""Random walks of larger jobs than can be explored whole: any order, repeats, losses, deaths at any moment.

Model and checks are the explorer's (:mod:`tests.explore.world`). Safety is checked after every event, then liveness:
with no further fault the job ends. Then the walk's journal is written and replayed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.explore.model import Model
from tests.explore.shape import Shape
from tests.explore.shapes import ANY
from tests.explore.walk import journalled, run_out, walk

WALK = st.lists(st.integers(0, 2**16), min_size=20, max_size=400)
GRANULARITY = st.sampled_from(["microbatch", "shard"])


SETTINGS = settings(
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SETTINGS
@given(
    num_groups=st.integers(2, 5),
    pieces=st.integers(1, 3),
    redundancy=st.integers(1, 4),
    granularity=GRANULARITY,
    faults=st.integers(0, 15),
    formed=st.sampled_from([True, True, True, False]),
    save_every=st.integers(0, 2),
    numbers=WALK,
)
def test_any_interleaving_is_safe_and_ends(
    num_groups: int,
    pieces: int,
    redundancy: int,
    granularity: str,
    faults: int,
    formed: bool,
    save_every: int,
    numbers: list[int],
) -> None:
    redundancy = min(redundancy, num_groups)
    kinds = ANY | {"speeds"}
    _walk(
        Shape(num_groups, redundancy, 5, pieces, faults, kinds, (), save_every, 0.0, granularity, formed=formed),
        numbers,
    )


@SETTINGS
@given(
    num_groups=st.integers(2, 5),
    pieces=st.integers(1, 3),
    redundancy=st.integers(2, 5),
    granularity=GRANULARITY,
    faults=st.integers(1, 12),
    audit_rate=st.sampled_from([0.3, 1.0]),
    numbers=WALK,
)
def test_wrong_arithmetic_in_an_audited_piece_is_never_committed(
    num_groups: int, pieces: int, redundancy: int, granularity: str, faults: int, audit_rate: float, numbers: list[int]
) -> None:
    redundancy, kinds = min(redundancy, num_groups), ANY | {"err"}
    _walk(Shape(num_groups, redundancy, 5, pieces, faults, kinds, (), 0, audit_rate, granularity, True), numbers)


@SETTINGS
@given(
    num_groups=st.integers(2, 5),
    redundancy=st.integers(1, 5),
    granularity=GRANULARITY,
    faults=st.integers(1, 12),
    save_every=st.integers(0, 2),
    numbers=WALK,
)
def test_damaged_weights_are_never_in_a_checkpoint_that_counts(
    num_groups: int, redundancy: int, granularity: str, faults: int, save_every: int, numbers: list[int]
) -> None:
    redundancy, kinds = min(redundancy, num_groups), ANY | {"damage"}
    _walk(Shape(num_groups, redundancy, 5, 2, faults, kinds, (), save_every, 0.0, granularity, True), numbers)


def _walk(shape: Shape, numbers: list[int]) -> None:
    model = Model(shape)
    world, moves = walk(model, numbers)
    note(f"{shape}\nplay it: {'; '.join(moves)}")
    over = run_out(model, world, moves)
    with tempfile.TemporaryDirectory() as folder:
        journalled(model, over, Path(folder) / "journal.jsonl")
    if over.brain.state.outcome == "finished":
        assert over.brain.state.committed[0] == shape.steps
