"""Layouts cover every element once; buffers are never handed to two users."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.collectives.buckets import (
    LEAST_BYTES,
    OVERLAPPED_BUCKETS,
    WINDOW,
    BucketLayout,
    BufferPool,
    Header,
    overlapped_bytes,
)
from spare_megatron.collectives.reduction import PlainReduction
from tests.pure import toy_conversion

CPU = torch.device("cpu")


class _User:
    def __init__(self) -> None:
        self.busy = True


def _layout(sizes: list[int], bucket_bytes: int, scalars: tuple[str, ...] = ()) -> BucketLayout:
    tensors = [torch.empty(size) for size in sizes]
    return BucketLayout.of(tensors, dict.fromkeys(scalars, 0.0), PlainReduction(), bucket_bytes)


@given(st.lists(st.integers(0, 5000), max_size=4), st.integers(1, 20000))
def test_buckets_cover_every_element_once(sizes: list[int], bucket_bytes: int) -> None:
    layout = _layout(sizes, bucket_bytes)
    covered = [[0] * size for size in sizes]
    for bucket in layout.buckets:
        assert bucket.start < bucket.stop
        assert (bucket.stop - bucket.start) * 4 <= max(bucket_bytes, 64 * 4) + 64 * 4
        for index in range(bucket.start, bucket.stop):
            covered[bucket.tensor][index] += 1
    assert all(count == 1 for tensor in covered for count in tensor)
    assert len(layout.buckets) >= min(2, sum(sizes)), "fault injection needs a moment between two buckets"


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=4))
def test_an_overlapped_reduction_has_several_buckets_where_there_is_something_to_send(sizes: list[int]) -> None:
    size = overlapped_bytes([torch.empty(one) for one in sizes], 1 << 20)
    layout = _layout(sizes, size)
    assert LEAST_BYTES <= size <= 1 << 20
    assert len(layout.buckets) >= min(OVERLAPPED_BUCKETS, 4 * sum(sizes) // LEAST_BYTES) - 1
    order = [(bucket.tensor, bucket.start) for bucket in layout.buckets]
    assert order == sorted(order), "buckets travel in the order of the layout"


def test_a_header_tells_whether_the_members_mean_the_same() -> None:
    cpu = torch.device("cpu")
    mine, yours = Header.of({"a": 1.0, "b": 2.0}, cpu), Header.of({"b": 3.0, "a": 4.0}, cpu)
    other = Header.of({"a": 1.0, "c": 2.0}, cpu)
    assert mine.values.shape == other.values.shape
    for one, two in ((mine, yours), (other, mine)):
        one.values += two.values
    assert mine.read(2) == {"a": 5.0, "b": 5.0}
    assert other.read(2) is None


def test_groups_that_reduce_different_things_have_different_digests() -> None:
    layouts = [
        _layout([100], 1000),
        _layout([101], 1000),
        _layout([50, 50], 1000),
        _layout([100], 2000),
        _layout([100], 1000, ("loss",)),
        _layout([100], 1000, ("tokens",)),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert max(layout.digest for layout in layouts) < 2**40


def test_a_tensor_that_is_not_flat_is_refused() -> None:
    with pytest.raises(AssertionError, match="one dimension"):
        BucketLayout.of([torch.empty(2, 2)], {}, PlainReduction(), 100)


def test_the_pool_hands_out_no_buffer_that_somebody_may_still_write_to() -> None:
    pool, layout = BufferPool(CPU, CPU, staged=False), _layout([10], 1000)
    first, second = _User(), _User()
    held = pool.take(layout, first)
    assert not pool.free(layout)
    other = pool.take(layout, second)
    assert other.results[0].data_ptr() != held.results[0].data_ptr()
    first.busy = False
    assert pool.free(layout)
    assert pool.take(layout, _User()) is held


def test_memory_of_a_layout_that_is_gone_is_returned() -> None:
    pool, user = BufferPool(CPU, CPU, staged=False), _User()
    user.busy = False
    pool.take(_layout([10], 1000), user)
    pool.take(_layout([20], 1000), user)
    assert len(pool._sets) == 1


def test_plain_sums_need_one_buffer_and_staged_ones_two() -> None:
    layout = _layout([10], 1000)
    shared = BufferPool(CPU, CPU, staged=False).take(layout, _User())
    staged = BufferPool(CPU, CPU, staged=True).take(layout, _User())
    assert shared.wire(0).data_ptr() == shared.result(0).data_ptr()
    assert staged.wire(0).data_ptr() != staged.result(0).data_ptr()


def test_converted_sums_share_the_wire_memory_of_a_few_buckets() -> None:
    tensors = [torch.zeros(size, dtype=torch.int64) for size in (5000, 900, 70)]
    layout = BucketLayout.of(tensors, {}, PlainReduction(), 8 * 512, toy_conversion.Conversion(tensors, 2))
    buffers = BufferPool(CPU, CPU, staged=False).take(layout, _User())
    assert [one.dtype for one in buffers.results] == [torch.float32, torch.float32, torch.int64]
    assert [len(one) for one in (*buffers.results, buffers.check_vector)] == [5000, 900, 70, 2]
    converted = [number for number in range(len(layout.buckets)) if layout.is_converted(number)]
    assert [layout.buckets[number].tensor for number in converted[-2:]] == [1, 1]
    assert len(converted) == len(layout.buckets) - 1 > WINDOW
    for number in converted:
        wire, bucket = buffers.wire(number), layout.buckets[number]
        assert len(wire) == len(buffers.result(number)) == bucket.stop - bucket.start
        others = [buffers.wire(other).data_ptr() for other in converted[max(0, number - WINDOW + 1) : number]]
        assert wire.data_ptr() not in others, "at most WINDOW of them are on their way"
    assert buffers.wire(len(converted)).data_ptr() == buffers.results[2].data_ptr()
    plain = BucketLayout.of(tensors, {}, PlainReduction(), 8 * 512)
    assert plain.digest != layout.digest
