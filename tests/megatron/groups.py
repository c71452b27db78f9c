"""The groups' side of the parity tests: N MegatronEngines, their sums exchanged by the test instead of by the runtime.

Every rank of every group runs :func:`train`; ranks of the same position add their ``local_sum`` in a gloo group that
exists for this test only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.collectives.converting import results_of
from spare_megatron.config.shape import JobShape
from spare_megatron.megatron_adapter.model import world as group_world
from spare_megatron.megatron_adapter.model.settings import MegatronSettings
from tests.megatron import toy
from tests.tickets import run_of


def settings_of(case: dict[str, Any]) -> MegatronSettings:
    """The case in the adapter's words."""
    transformer = {**toy.TRANSFORMER, **case["transformer"], "expert_model_parallel_size": case["expert"]}
    if case["virtual"]:
        transformer["virtual_pipeline_model_parallel_size"] = case["virtual"]
    return MegatronSettings(
        transformer=transformer,
        optimizer={**toy.OPTIMIZER, **case.get("optimizer", {})},
        ademamix=case.get("ademamix"),
        scheduler=toy.scheduler(case["steps"], case["global_batch_size"]),
        padded_vocab_size=toy.VOCAB,
        seq_length=toy.SEQ,
        max_position_embeddings=toy.SEQ,
        untie_embeddings_and_output_weights=not case["tied"],
        position_embedding_type=case.get("positions", "learned_absolute"),
        hybrid_layer_pattern=case.get("hybrid"),
        seed=case["seed"],
        divides_state=case.get("divides_state", False),
        schedule=case.get("schedule", "core"),
    )


def shape_of(case: dict[str, Any]) -> JobShape:
    return JobShape(
        num_groups=case["groups"],
        micro_batch_size=case["micro_batch_size"],
        global_batch_size=case["global_batch_size"],
        tensor=case["tensor"],
        pipeline=case["pipeline"],
        inner_data=case["inner_data"],
        piece_microbatches=case["piece_microbatches"],
    )


def source_of(shape: JobShape, data_rank: int) -> Any:
    """Microbatches of (step, number) in Megatron's sampler order."""

    def source(step: int, numbers: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        for number in numbers:
            shard, j = divmod(number, shape.microbatches_per_shard)
            row = (j * shape.num_groups + shard) * shape.inner_data + data_rank
            first = (step - 1) * shape.global_batch_size + row * shape.micro_batch_size
            yield toy.microbatch(range(first, first + shape.micro_batch_size))

    return source


def engine_of(case: dict[str, Any], position: int, store: dist.Store) -> Any:
    """Join the group's world and build its engine."""
    settings, shape = settings_of(case), shape_of(case)
    world = group_world.init_group_world(
        shape, position, store, virtual_pipeline=settings.virtual_pipeline, expert=settings.expert, timeout_s=60.0
    )
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model.replica import build_replica

    return MegatronEngine(
        build_replica(settings, world),
        world,
        partial(toy.forward_step, convention=case["convention"]),
        source_of(shape, world.data_rank),
        method=case["reduce"],
        state_shards=case.get("state_shards"),
    )


def exchange(peers: Any, engine: Any) -> tuple[list[torch.Tensor], dict[str, float]]:
    """What the sums over the groups of one position's tensors become, and those of scalars."""
    tensors = [tensor.clone() for tensor in engine.local_sum()]
    scalars = engine.scalars()
    vector = torch.tensor([scalars[name] for name in sorted(scalars)], dtype=torch.float64)
    for tensor in (*tensors, vector):
        peers.allreduce([tensor]).wait()
    return results_of(engine.conversion(), tensors), dict(zip(sorted(scalars), vector.tolist(), strict=True))


def peers_of(store: dist.Store, group: int, groups: int) -> Any:
    """The replica communicator of this test: gloo over the same position of all groups."""
    return dist.ProcessGroupGloo(store, group, groups, timedelta(seconds=60))


def train(group: int, position: int, store: dist.Store, case: dict[str, Any]) -> list[dict[str, float]]:
    """Per-step loss, gradient norm and learning rate; pieces are dealt as ``case['loads']`` says."""
    engine = engine_of(case, position, dist.PrefixStore(f"group{group}", store))
    try:
        peers = peers_of(dist.PrefixStore(f"peers{position}", store), group, case["groups"])
        return [one_step(engine, peers, case, group, step) for step in range(1, case["steps"] + 1)]
    finally:
        group_world.destroy()


def one_step(engine: Any, peers: Any, case: dict[str, Any], group: int, step: int) -> dict[str, float]:
    """Compute, exchange and apply one step."""
    engine.begin_step(step)
    for segment in dealt(case, group):
        engine.run(step, run_of(segment))
    sums, scalars = exchange(peers, engine)
    if case["reduce"] == "fp32" and case["transformer"].get("moe_router_enable_expert_bias"):
        check_routed(sums[-1], case)
    report = engine.apply(step, sums, scalars)
    return {name: report[name] for name in ("loss", "grad_norm", "lr", *report.get("reported", ()))}


def check_routed(counts: torch.Tensor, case: dict[str, Any]) -> None:
    """Each token of the batch, and no other one, was counted where a layer of this rank sent it: pads were not."""
    tokens = case["global_batch_size"] * toy.SEQ // case["inner_data"]
    expected = tokens * case["transformer"]["moe_router_topk"]
    found = counts.view(-1, case["transformer"]["num_moe_experts"]).sum(dim=1).tolist()
    assert found == [expected] * len(found), f"{found} routed in the layers, not {expected} in each"


def dealt(case: dict[str, Any], group: int) -> list[list[int]]:
    """This group's segments: its own shard, or as many pieces as ``loads`` gives each group, in two segments."""
    pieces = list(range(shape_of(case).pieces))
    if case["loads"] is None:
        share = shape_of(case).pieces_per_shard
        return [pieces[group * share : (group + 1) * share]]
    first = sum(case["loads"][:group])
    own = pieces[::-1][first : first + case["loads"][group]]
    return [own[: case["cut"]], own[case["cut"] :]] if case["cut"] else [own]
