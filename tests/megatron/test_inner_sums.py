"""Checks of exact sums where ranks of one group share a gradient buffer: wherever a bit flips, the tensor is named.

One group of two ranks has a whole sum on both, or a distributed optimizer's shards; one of four has experts that two
ranks share. Tensor, element and bit are drawn from a seed that is printed.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from spare_megatron.collectives.converting import results_of
from tests.spawn import run_ranks
from tests.tickets import run_of

pytestmark = pytest.mark.timeout(300)

SEED, STEP, PIECES, LENGTH, FLIPS = 20_266, 1, 4, 16, 12
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", str(LENGTH)),
    *("--max-position-embeddings", str(LENGTH), "--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "10"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63", "--split", "100,0,0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
)
INNER = ("--spare-inner-data-parallel", "2", "--global-batch-size", str(2 * PIECES), "--bf16")
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
    *("--moe-router-topk", "2", "--disable-bias-linear", "--tensor-model-parallel-size", "4", "--sequence-parallel"),
    *("--global-batch-size", str(PIECES), "--bf16"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
)
"""Four tensor ranks, two of which have each expert whole."""
CASES = {
    "whole": INNER,
    "whole, 32 bits": (*INNER, "--spare-reduce", "exact32"),
    "split": (*INNER, "--use-distributed-optimizer"),
    "split, 32 bits": (*INNER, "--use-distributed-optimizer", "--spare-reduce", "exact32"),
    "experts": EXPERTS,
}


def job_of(flags: tuple[str, ...], rank: int) -> Any:
    """What a rank of a job of one group takes from its flags."""
    from spare_megatron.worker.job_arguments import parse_job

    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": str(rank), "SPARE_NUM_GROUPS": "1"}
    words = [*FLAGS, *flags, "--spare-redundancy", "1", "--spare-piece-microbatches", "1"]
    return parse_job(words, environ)[0]


def engine_of(flags: tuple[str, ...], rank: int, store: Any) -> Any:
    """One rank of a group, with made-up microbatches, which are those of one rank whatever the layout; with a loss per
    token some tokens do not count."""
    from spare_megatron.megatron_adapter.model.world import init_group_world

    # megatron-core's word on experts that are whole on a tensor rank
    warnings.filterwarnings(
        "ignore", message="`sequence_parallel` is set to `True`, but tensor model parallel size is 1"
    )
    job = job_of(flags, rank)
    settings, inner_data = job.settings(128), job.shape.inner_data
    sizes = {"expert": settings.expert, "expert_tensor": settings.expert_tensor}
    sizes["virtual_pipeline"] = settings.virtual_pipeline
    world = init_group_world(job.shape, rank, store, **sizes, timeout_s=60.0)
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model.replica import build_replica

    replica = build_replica(settings, world)

    def source(step: int, pieces: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for piece in pieces:
            drawn = torch.Generator().manual_seed(1000 + piece * inner_data + world.data_rank)
            tokens, mask = torch.randint(0, 63, (1, LENGTH + 1), generator=drawn), torch.ones(1, LENGTH)
            if replica.config.calculate_per_token_loss:
                mask = (torch.rand(1, LENGTH, generator=drawn) < 0.7).float()
            yield tokens, mask

    def forward_step(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> Any:
        tokens, mask = next(data)
        positions, labels = torch.arange(LENGTH).unsqueeze(0), tokens[:, 1:].contiguous()
        output = model(tokens[:, :-1], positions, None, labels=labels, loss_mask=mask)
        return output, partial(loss_of, mask.view(-1))

    return MegatronEngine(replica, world, forward_step, source, method=job.spare.reduce)


def loss_of(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total, count = (losses.float().view(-1) * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.clone().detach().view(1), count.view(1)])}


def worker(rank: int, store: Any, cases: Sequence[str]) -> dict[str, Any]:
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model import world

    found = {}
    for name in cases:
        engine = engine_of(CASES[name], rank, PrefixStore(name, store))
        try:
            found[name] = checked(engine, random.Random(f"{SEED} {name} {rank}"))
        finally:
            world.destroy()
    return found


def checked(engine: Any, draw: random.Random) -> dict[str, Any]:
    """What the checks say of one step as it is, and with one bit flipped in each of three places."""
    engine.begin_step(STEP)
    engine.run(STEP, run_of(range(PIECES)))
    given = list(engine.local_sum())
    reduced = results_of(engine.conversion(), given)
    scalars = engine.scalars()
    accumulators_fault = partial(engine.accumulators_fault, suspected=True)
    exact, failure_free = engine.exact, [accumulators_fault(), engine.result_fault(reduced)]
    shared = [number for number, buffer in enumerate(exact._buffers) if buffer.sum.group.size() > 1]
    kept = [(slot, part) for slot, part in exact._kept if exact._slots[slot].buffer in shared]
    missed = []
    for _ in range(FLIPS):
        slot, part = draw.choice(kept)
        one, place = exact._slots[slot], draw.randrange(part.size)
        places = {
            "accumulator": (exact._buffers[one.buffer].accumulator, one.start, accumulators_fault),
            "sum inside the group": (given[one.buffer], part.at, accumulators_fault),
            "reduced result": (reduced[one.buffer], part.at, lambda: engine.result_fault(reduced)),
        }
        for what, (values, start, fault) in places.items():
            bits = values.view(torch.int32) if values.is_floating_point() else values
            at, bit = start + place, draw.randrange(values.element_size() * 8 - 1)
            bits[at] ^= 1 << bit
            reported = fault()
            bits[at] ^= 1 << bit
            if reported != f"the {what} of {one.name} does not have the checksum of its pieces":
                missed.append(f"{what} of {one.name} at {at}, bit {bit}: {reported!r}")
    slot, part = draw.choice(kept)
    damaged = [tensor.clone() for tensor in given]
    damaged[exact._slots[slot].buffer][part.at] ^= 1
    digest = engine.result_digest(reduced, scalars)
    name = next(iter(scalars))
    beside = reduced[exact.num_buffers]
    other = [engine.result_digest(reduced, {**scalars, name: math.nextafter(scalars[name], math.inf)})]
    beside[-1] ^= 1
    other.append(engine.result_digest(reduced, scalars))
    beside[-1] ^= 1
    exact.finalize(reduced[: exact.num_buffers], 8.0, False)
    before = {"all": engine.weights_digest(), **engine.weights_checksums()}
    for blocks in exact.format.tensors.values():
        blocks[draw.randrange(len(blocks))] += 1
    if not exact.format.tensors:
        values = list(exact.format.values)
        values[draw.randrange(len(values))] = 60
        exact.format.adopt(values)
    after = {"all": engine.weights_digest(), **engine.weights_checksums()}
    return {
        "voted with other scales": sorted(name for name in before if before[name] != after[name]),
        "failure-free": failure_free,
        "flips": FLIPS * len(places),
        "missed": missed,
        "digests": [digest, engine.result_digest(reduced, scalars), *other],
        "damaged before": engine.result_fault(results_of(engine.conversion(), damaged)),
        "infinite": [exact.format.peaks.infinite(divisor) for divisor in (8.0, -8.0, 1e-42, -1e-42)],
        "bound_bits": exact.format.scales.bound_bits,
        "scattered": [buffer.sum.scattered for buffer in exact._buffers],
    }


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    print(f"seed {SEED}")
    two, four = [name for name in CASES if name != "experts"], ["experts"]
    found = [run_ranks("tests.megatron.test_inner_sums:worker", [cases] * n) for cases, n in ((two, 2), (four, 4))]
    return {name: [one[name] for one in ranks] for ranks in found for name in ranks[0]}


@pytest.mark.parametrize("name", CASES)
def test_flipped_bits_are_named_wherever_they_strike(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    for found in results[name]:
        assert found["failure-free"] == ["", ""]
        assert found["missed"] == []
        assert found["flips"] == 3 * FLIPS
        assert any(found["scattered"]) == (name.startswith("split"))


@pytest.mark.parametrize("name", CASES)
def test_a_sum_that_is_damaged_before_it_is_converted_is_named(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for found in results[name]:
        assert "the sum over the groups of " in found["damaged before"]
        assert found["damaged before"].endswith(" does not have the checksum of its pieces")


@pytest.mark.parametrize("name", CASES)
def test_other_scales_are_notified_by_what_is_voted(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Integers of other scales have the checksums of their pieces all the same, and whoever owns them converts for
    all."""
    for found in results[name]:
        assert found["voted with other scales"] == ["all", "scales_of_exact_sums"]


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_notified_by_what_is_beside_it_too(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    for found in results[name]:
        digest, again, *others = found["digests"]
        assert digest == again
        assert len({digest, *others}) == 3


@pytest.mark.parametrize("name", CASES)
def test_a_quotient_beyond_fp32_is_notified(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Sums of this model are near 1."""
    for found in results[name]:
        assert found["infinite"] == [False, False, True, True]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_that_adds_is_room_in_the_bound(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Two ranks add into a shared element."""
    terms = 2 * PIECES
    expected = 31 - terms.bit_length() if "32" in name else 62 - (terms - 1).bit_length()
    assert {found["bound_bits"] for found in results[name]} == {expected}
