"""The ring as streams of bytes: members in one process, bytes moved in random portions."""

from __future__ import annotations

import random

import pytest
import torch

from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.ring import Packing, RingStreams, Shares
from tests.pure import toy_conversion

SEGMENT_BYTES = 64


def _all_reduce(
    wires: list[torch.Tensor],
    rng: random.Random,
    sources: list[torch.Tensor] | None = None,
    converted: list[ConvertedBucket] | None = None,
    shares: Shares | None = None,
) -> list[int]:
    """Moves bytes between neighbours, at most ``room`` of them on the way, until every member has everything.
    Returns how many bytes each has sent."""
    size = len(wires)
    scratches = [torch.empty(SEGMENT_BYTES, dtype=torch.uint8) for _ in wires]
    rings = [
        RingStreams(
            wire,
            rank,
            size,
            scratches[rank],
            sources and sources[rank],
            converted and converted[rank],
            shares=shares,
            packing=Packing.of(SEGMENT_BYTES // 8),
        )
        for rank, wire in enumerate(wires)
    ]
    pipes, counts = [bytearray() for _ in range(size)], [0] * size
    while not all(ring.over for ring in rings):
        moved = False
        for rank in rng.sample(range(size), size):
            ring, right, left = rings[rank], pipes[rank], pipes[rank - 1]
            if ring.outgoing is not None and len(right) < 150:
                portion = bytes(ring.outgoing[: rng.randint(1, 50)])
                right += portion
                ring.sent(len(portion))
                counts[rank] += len(portion)
                moved = True
            if ring.incoming is not None and left:
                number = min(rng.randint(1, 50), len(left), len(ring.incoming))
                ring.incoming[:number] = left[:number]
                del left[:number]
                ring.received(number)
                moved = True
        assert moved or all(ring.over for ring in rings), "the ring stands still"
    assert not any(pipes), "more was sent than received"
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_member_gets_the_sum(size: int, dtype: torch.dtype) -> None:
    seed = 100 * size + dtype.itemsize
    print(f"seed {seed}")
    rng = random.Random(seed)
    for numel in (0, 1, size - 1, size, size + 1, 16, 17, 127, 640, 1003):
        whole = [torch.tensor([rng.randint(-9, 9) for _ in range(numel)]).to(dtype) for _ in range(size)]
        wires = [tensor.clone() for tensor in whole]
        _all_reduce(wires, rng)
        apart, sources = [torch.full_like(tensor, 7) for tensor in whole], [tensor.clone() for tensor in whole]
        _all_reduce(apart, rng, sources)
        for wire in (*wires, *apart):
            assert torch.equal(wire, torch.stack(whole).sum(0).to(dtype)), f"{numel} elements"
        assert all(map(torch.equal, sources, whole)), "a source was written"


def test_all_members_get_the_same_bits_where_order_matters() -> None:
    generator = torch.Generator().manual_seed(5)
    wires = [torch.randn(1000, generator=generator) * 10.0 ** (3 * rank) for rank in range(5)]
    _all_reduce(wires, random.Random(5))
    for wire in wires[1:]:
        assert torch.equal(wire, wires[0])


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_each_element_is_converted_once_and_all_members_get_the_result(size: int, dtype: torch.dtype) -> None:
    seed = 10 * size + dtype.itemsize
    print(f"seed {seed}")
    rng = random.Random(seed)
    for numel in (1, size - 1, size, size + 1, 16, 17, 127, 640, 1003):
        given = [torch.tensor([rng.randint(-99, 99) for _ in range(numel)]).to(dtype) for _ in range(size)]
        tallies = [toy_conversion.Conversion([one], 1).begin() for one in given]
        results = [torch.full((numel,), torch.nan) for _ in given]
        buckets = [ConvertedBucket(tally, 0, 0, result) for tally, result in zip(tallies, results, strict=True)]
        sources = [one.clone() for one in given]
        _all_reduce([torch.full_like(one, 7) for one in given], rng, sources, buckets)
        expected = toy_conversion.converted(torch.stack(given).sum(0))
        assert all(torch.equal(result, expected) for result in results), f"{numel} elements"
        assert all(map(torch.equal, sources, given)), "a source was written"
        assert torch.stack([tally.check_vector() for tally in tallies]).sum(0).tolist() == [0, numel]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_share_goes_once_around_or_only_as_far_as_it_is_needed(size: int) -> None:
    rng = random.Random(size)
    for _ in range(20):
        numels = tuple(rng.choice((0, 0, 1, 5, 17, 100, 640)) for _ in range(size))
        hops = tuple(rng.randint(0, size - 1) for _ in range(size))
        shares = Shares(numels, hops)
        given = [torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int32) for numel in numels]
        wires = [
            torch.cat([one if rank == giver else torch.full_like(one, 7) for giver, one in enumerate(given)])
            for rank in range(size)
        ]
        sent = _all_reduce(wires, rng, shares=shares)
        for rank, wire in enumerate(wires):
            for giver, (one, found) in enumerate(zip(given, wire.split(numels), strict=True)):
                here = (rank - giver) % size <= hops[giver]
                assert torch.equal(found, one if here else torch.full_like(one, 7)), (shares, rank, giver)
        assert sum(sent) == sum(4 * numel * hop for numel, hop in zip(numels, hops, strict=True))
