"""Packed segments: what compiled code and numpy write is the same, each reads the other's, and no bit is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spare_megatron.collectives.packing import BLOCK, Integers, blocks, most_bytes, packed, packed_bytes, unpacked
from spare_megatron.collectives.ring import SLACK_BYTES
from spare_megatron.collectives.ring_native import compiled_ring

COMPILED = compiled_ring()


def values(rng: random.Random, count: int) -> Integers:
    """Blocks of all sizes, up to the least and the greatest of 64 bits."""
    found = list[int]()
    while len(found) < count:
        bits = rng.choice((0, 1, 6, 7, 8, 15, 16, 31, 40, 46, 47, 48, 55, 56, 61, 63))
        found += [rng.randint(-(1 << bits), (1 << bits) - 1) for _ in range(rng.choice((1, 100, BLOCK, 2000)))]
    return np.array(found[:count], dtype=np.int64)


@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
def test_both_kinds_write_and_read_the_same_bytes(count: int) -> None:
    assert COMPILED is not None, "kernels/ring.cpp was not built: pip install -e . needs a C++ compiler"
    rng = random.Random(count)
    for _ in range(20):
        given = values(rng, count)
        expected = packed(given)
        found = np.full(most_bytes(count) + SLACK_BYTES, 7, dtype=np.uint8)
        size = COMPILED.spare_ring_pack(given.ctypes.data, count, found.ctypes.data)
        assert found[:size].tobytes() == expected.tobytes()
        assert size == packed_bytes(expected[: blocks(count)], count) <= most_bytes(count)
        read, back = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        assert COMPILED.spare_ring_unpack(found.ctypes.data, size, count, read.ctypes.data)
        unpacked(expected, count, back)
        assert (read == given).all()
        assert (back == given).all()


def test_a_block_has_the_least_width_that_keeps_its_elements() -> None:
    for width in range(1, 9):
        most = (1 << 8 * width - 1) - 1
        for edge in (most, -most - 1):
            given = np.array([0] * 10 + [edge] + [1] * 10)
            assert packed(given)[0] == width
            assert len(packed(given)) == 1 + 21 * width
            if width < 8:
                beyond = np.array([edge + (1 if edge > 0 else -1)])
                assert packed(beyond)[0] == width + 1


def test_sums_of_48_bits_take_6_bytes() -> None:
    given = np.arange(100 * BLOCK) + (1 << 46)
    assert len(packed(given)) == 100 * (1 + 6 * BLOCK)


@pytest.mark.parametrize("width", [0, 9])
def test_what_is_no_packed_segment_is_refused(width: int) -> None:
    assert COMPILED is not None
    segment = packed(np.arange(2000))
    segment[1] = width
    assert packed_bytes(segment[:2], 2000) == 0
    room = np.zeros(2000, dtype=np.int64)
    assert not COMPILED.spare_ring_unpack(segment.ctypes.data, len(segment), 2000, room.ctypes.data)
    whole = packed(np.arange(2000))
    assert not COMPILED.spare_ring_unpack(whole.ctypes.data, len(whole) - 1, 2000, room.ctypes.data)
