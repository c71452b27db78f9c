"""Which samples a piece has, against Megatron's samplers written naively: rank by rank, from the first sample on."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.data.microbatch_loader import validation_batch
from spare_megatron.data.sampling import SampleOrder, permutation
from tests.pure.megatron_sampler import Rows, in_order


def shuffled(total: int, consumed: int, size: int, rank: int, ranks: int, sharding: bool) -> Rows:
    """The rest of the epoch that ``consumed`` lies in."""
    whole = total - total % (size * ranks)
    epoch, inside = divmod(consumed, whole)
    if sharding:
        bucket = total // (size * ranks) * size
        order = [rank * bucket + index for index in permutation(bucket, epoch)][inside // ranks :]
    else:
        order = list(permutation(total // size * size, epoch)[inside:][rank::ranks])
    rows = [order[start : start + size] for start in range(0, len(order), size)]
    return [row for row in rows if len(row) == size][: (whole - inside) // (size * ranks)]


shapes = st.builds(
    lambda groups, inner, size, pieces, microbatches: JobShape(
        num_groups=groups,
        micro_batch_size=size,
        global_batch_size=groups * inner * size * pieces * microbatches,
        inner_data=inner,
        piece_microbatches=microbatches,
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
)


@settings(max_examples=60)
@given(shapes, st.integers(0, 3), st.integers(1, 4))
def test_in_order_is_megatrons_sampler(shape: JobShape, steps_before: int, steps: int) -> None:
    batch = shape.global_batch_size
    consumed, total = steps_before * batch, (steps_before + steps) * batch
    order = SampleOrder(shape, total)
    ranks = shape.num_groups * shape.inner_data
    for shard in range(shape.num_groups):
        for inner in range(shape.inner_data):
            rank = shard * shape.inner_data + inner
            want = iter(in_order(total, consumed, shape.micro_batch_size, rank, ranks))
            for step in range(steps):
                for j in range(shape.microbatches_per_shard):
                    number = shard * shape.microbatches_per_shard + j
                    assert order.microbatch(consumed + step * batch, number, inner) == next(want)
            assert list(want) == []


def test_a_shuffled_order_begins_with_a_whole_row() -> None:
    """A job that goes on with another number of groups: Megatron's sampler asserts it."""
    shape = JobShape(num_groups=3, micro_batch_size=2, global_batch_size=12)
    SampleOrder(shape, 50).check_begin(32)
    SampleOrder(shape, 50, "cyclic").check_begin(36)
    with pytest.raises(ConfigError, match="consumed 32 samples, which are no multiple of 6 = 3 data-parallel ranks x"):
        SampleOrder(shape, 50, "cyclic").check_begin(32)


@settings(max_examples=60)
@given(shapes, st.booleans(), st.integers(0, 9), st.integers(0, 12), st.integers(1, 5))
def test_shuffled_is_megatrons_random_sampler(
    shape: JobShape, sharding: bool, rest: int, rows_before: int, epoch_rows: int
) -> None:
    ranks = shape.num_groups * shape.inner_data
    size = shape.micro_batch_size
    row = ranks * size
    total = epoch_rows * row + rest % row
    order = SampleOrder(shape, total, "cyclic", sharding)
    consumed = rows_before * row
    for first in range(0, shape.microbatches, shape.microbatches_per_shard):
        shard = first // shape.microbatches_per_shard
        for inner in range(shape.inner_data):
            rank = shard * shape.inner_data + inner
            want: Rows = []
            while len(want) < shape.microbatches_per_shard:
                want += shuffled(total, consumed + len(want) * row, size, rank, ranks, sharding)
            got = [order.microbatch(consumed, first + j, inner) for j in range(shape.microbatches_per_shard)]
            assert got == list(islice(want, shape.microbatches_per_shard))


@settings(max_examples=30)
@given(shapes, st.sampled_from(["single", "cyclic"]))
def test_a_step_takes_each_of_its_samples_once(shape: JobShape, kind: str) -> None:
    order = SampleOrder(shape, shape.global_batch_size, kind)
    taken = [
        sample
        for number in range(shape.microbatches)
        for inner in range(shape.inner_data)
        for sample in order.microbatch(0, number, inner)
    ]
    assert sorted(taken) == list(range(shape.global_batch_size))


def test_the_order_of_the_public_contract() -> None:
    """sample(step, i, j, b) = consumed + (j * N * D + i * D + d) * micro-batch-size + b."""
    shape = JobShape(num_groups=3, micro_batch_size=2, global_batch_size=48, inner_data=2)
    order = SampleOrder(shape, 1000)
    i, j, d = 2, 3, 1
    want = [96 + (j * 3 * 2 + i * 2 + d) * 2 + b for b in (0, 1)]
    assert order.microbatch(96, i * shape.microbatches_per_shard + j, d) == want


def test_the_end_of_the_data() -> None:
    shape = JobShape(num_groups=2, micro_batch_size=2, global_batch_size=8)
    order = SampleOrder(shape, 11)
    assert order.microbatch(4, 0, 0) == [4, 5]
    with pytest.raises(IndexError, match="samples 8 to 9 of a data set of 11"):
        order.microbatch(4, 1, 0)
    with pytest.raises(IndexError, match="microbatch 4 of 4"):
        order.microbatch(0, 4, 0)
    with pytest.raises(ConfigError, match="the data set has 3 samples, but --dataloader-type cyclic needs at least 4"):
        SampleOrder(shape, 3, "cyclic")


def test_validation_goes_on_from_one_evaluation_to_the_next() -> None:
    batches = [
        validation_batch(state, iteration, 3, 10, final=False) for state in (10, 20, 30) for iteration in range(3)
    ]
    final = [validation_batch(35, iteration, 3, 10, final=True) for iteration in range(3)]
    assert batches + final == list(range(12))
    assert validation_batch(35, 1, 3, None, final=True) == 1
