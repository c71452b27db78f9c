"""Snapshot shards as bytes: whatever the tensors and the number of parts, the parts together are the snapshot shard,
byte for byte."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.transfer import snapshot_shards
from spare_megatron.transfer.snapshot_shards import (
    ALIGNED_BYTES,
    ByteSpace,
    ReceiveBuffer,
    SendBuffer,
    flat_bytes,
    pack_header,
    read_header,
)
from spare_megatron.transfer.transport import SnapshotShard

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
)
SHAPES = st.lists(st.integers(0, 9), max_size=3)
TENSORS = st.dictionaries(st.text(max_size=5), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6)


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bytes; only for bool not all of them are values."""
    random = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=random)
    return raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def snapshot_shard_of(tensors: dict[str, tuple[torch.dtype, list[int]]]) -> SnapshotShard:
    made = {name: tensor_of(*kind, seed) for seed, (name, kind) in enumerate(tensors.items())}
    return SnapshotShard(made, {"lr": 0.1, "names": sorted(made)})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, NaN as well."""
    alike = (one.dtype, one.shape, one.is_contiguous()) == (other.dtype, other.shape, other.is_contiguous())
    return alike and (not one.nbytes or torch.equal(flat_bytes(one), flat_bytes(other)))


def chunks_of(outgoing: SendBuffer) -> list[tuple[int, memoryview]]:
    return [outgoing.chunk(number) for number in range(-(-outgoing.size // snapshot_shards.CHUNK_BYTES))]


def land(snapshot_shard: SnapshotShard, parts: int, step: int = 1 << 30) -> SnapshotShard:
    """Every part through a ReceiveBuffer, ``step`` bytes at a time."""
    reported = read_header(pack_header(snapshot_shard))
    places = {name: torch.empty_like(tensor, device="cpu") for name, tensor in reported.tensors.items()}
    for part in range(parts):
        outgoing, incoming = SendBuffer(snapshot_shard, part, parts), ReceiveBuffer(places, part, parts)
        assert outgoing.size == incoming.size
        for checksum, chunk in chunks_of(outgoing):
            assert incoming.due == len(chunk)
            while room := incoming.room():
                size = min(step, len(room))
                at = len(chunk) - incoming.due
                room[:size] = chunk[at : at + size]
                incoming.advance(size)
            assert incoming.settle(checksum)
        assert incoming.done
    return SnapshotShard({name: places[name] for name in reported.tensors}, reported.values)


@given(TENSORS, st.integers(1, 5), st.sampled_from((64, 100, 1 << 20)), st.sampled_from((1, 7, 1 << 30)))
def test_the_parts_together_are_the_snapshot_shard(tensors, parts: int, chunk_bytes: int, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_shards, "CHUNK_BYTES", chunk_bytes)
        snapshot_shard = snapshot_shard_of(tensors)
        landed = land(snapshot_shard, parts, step)
        raw = b"".join(
            bytes(chunk) for part in range(parts) for _, chunk in chunks_of(SendBuffer(snapshot_shard, part, parts))
        )
    assert landed.values == snapshot_shard.values
    assert landed.tensors.keys() == snapshot_shard.tensors.keys()
    assert all(same(landed.tensors[name], snapshot_shard.tensors[name]) for name in snapshot_shard.tensors)
    ordered = [snapshot_shard.tensors[name] for name in sorted(snapshot_shard.tensors)]
    assert raw == b"".join(flat_bytes(tensor).numpy().tobytes() for tensor in ordered if tensor.nbytes)


@given(TENSORS, st.integers(1, 5))
def test_tensors_of_other_devices_are_filled_chunk_by_chunk(tensors, parts: int) -> None:
    """No tensor counts as this machine's memory; all arrive through the one chunk of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_shards, "CHUNK_BYTES", 128)
        patch.setattr(snapshot_shards, "in_memory", lambda tensor: False)
        snapshot_shard = snapshot_shard_of(tensors)
        landed = land(snapshot_shard, parts)
        assert all(same(landed.tensors[name], snapshot_shard.tensors[name]) for name in snapshot_shard.tensors)
        full = {name: tensor for name, tensor in landed.tensors.items() if tensor.nbytes}
        if full:
            room = ReceiveBuffer(full, 0, 1).room()
            room[:] = bytes(len(room))
        assert all(same(full[name], snapshot_shard.tensors[name]) for name in full), (
            "nothing was written past the checksum"
        )


@given(TENSORS, st.integers(1, 40))
def test_parts_are_contiguous_and_begin_at_round_offsets(tensors, parts: int) -> None:
    space = ByteSpace(snapshot_shard_of(tensors).tensors)
    ranges = [space.part(number, parts) for number in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == space.size
    for (start, stop), (following, _) in itertools.pairwise(ranges):
        assert start <= stop == following
        assert stop % ALIGNED_BYTES == 0 or stop == space.size
        assert stop - start <= space.size / parts + ALIGNED_BYTES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(TENSORS, st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_values_and_shapes_come_out_as_they_went_in(tensors, values) -> None:
    snapshot_shard = SnapshotShard(snapshot_shard_of(tensors).tensors, values)
    reported = read_header(pack_header(snapshot_shard))
    assert reported.values == values
    assert json.dumps(reported.values, sort_keys=True) == json.dumps(values, sort_keys=True), "also -0.0 and 1 for 1.0"
    assert {name: (one.dtype, one.shape) for name, one in reported.tensors.items()} == {
        name: (one.dtype, one.shape) for name, one in snapshot_shard.tensors.items()
    }
    assert all(one.device.type == "meta" for one in reported.tensors.values())


def test_equal_snapshot_shards_have_equal_headers_in_whatever_order_they_are_made() -> None:
    one, two = torch.ones(3), torch.ones((), dtype=torch.bfloat16)
    mine = SnapshotShard({"a": one, "b": two}, {"x": 1, "y": math.inf})
    other = SnapshotShard({"b": two, "a": one}, {"y": math.inf, "x": 1})
    assert pack_header(mine) == pack_header(other)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"{}",
        b"\x80\x04.",
        b'{"tensors": [["a", "load", [1]]], "values": {}}',
        b'{"tensors": [["a", "float32", [-1]]], "values": {}}',
        b'{"tensors": [["a", "float32", [4611686018427387904, 16]]], "values": {}}',
        b'{"tensors": [["a", "int8", [1]], ["a", "int8", [1]]], "values": {}}',
        b'{"tensors": [], "values": []}',
        b"[" * 100_000,
    ],
)
def test_other_words_are_no_header(words: bytes) -> None:
    with pytest.raises(ValueError, match="this is no header of a snapshot shard"):
        read_header(words)


def test_what_cannot_travel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"tensor a .* is not contiguous"):
        pack_header(SnapshotShard({"a": torch.ones(4, 4).t()[:2]}, {}))
    with pytest.raises(TypeError):
        pack_header(SnapshotShard({}, {"a": object()}))
    monkeypatch.setattr(snapshot_shards, "HEADER_BYTES_MAX", 100)
    with pytest.raises(ValueError, match="but 100 is the most"):
        pack_header(SnapshotShard({}, {"a": "x" * 100}))


def test_a_damaged_chunk_comes_again_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_shards, "CHUNK_BYTES", 64)
    snapshot_shard = SnapshotShard({"a": torch.arange(20), "b": torch.ones(3)}, {})
    places = {"a": torch.zeros(20, dtype=torch.int64), "b": torch.zeros(3)}
    outgoing, incoming = SendBuffer(snapshot_shard, 0, 1), ReceiveBuffer(places, 0, 1)
    for number, (checksum, chunk) in enumerate(chunks_of(outgoing)):
        for damage in (1, 0):
            assert (incoming.chunk, incoming.reached) == (number, 64 * number)
            at = 0
            while room := incoming.room():
                room[:] = chunk[at : at + len(room)]
                room[-1] ^= damage
                at += len(room)
                incoming.advance(len(room))
            assert not incoming.done
            assert incoming.settle(checksum) is (damage == 0)
    assert incoming.done
    assert torch.equal(places["a"], snapshot_shard.tensors["a"])
    assert torch.equal(places["b"], snapshot_shard.tensors["b"])


def test_a_portion_is_a_copy() -> None:
    tensor = torch.zeros(100)
    outgoing = SendBuffer(SnapshotShard({"a": tensor}, {}), 0, 1)
    tensor.fill_(1)
    assert bytes(outgoing.chunk(0)[1]) == bytes(400)
