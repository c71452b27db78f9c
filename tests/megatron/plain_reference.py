"""Plain megatron-core data parallelism: what the groups must reproduce.

One torch.distributed world over all ranks, megatron-core's own DistributedDataParallel with its own gradient
reduction, its own ``finalize_model_grads``, optimizer and schedule, and Megatron's sampler order. Of this project
only the CPU shims are used, without which megatron-core does not run here. As a script it takes one JSON file (see
:func:`main`) and torchrun's variables, and rank 0 writes the per-step losses as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import optimizer as core_optimizer  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from spare_megatron.megatron_adapter.core_differences import routing_tracker  # noqa: E402
from spare_megatron.megatron_adapter.model.gloo_device import LOOPBACK, shared_gloo_device  # noqa: E402
from tests.megatron import toy  # noqa: E402

CPU_SETTINGS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "batch_p2p_comm": False,
    "deallocate_pipeline_outputs": False,
    "pipeline_dtype": torch.float32,
}


def train(rank: int, world_size: int, store: dist.Store, case: dict[str, Any]) -> list[dict[str, float]]:
    """Per-step loss, gradient norm and learning rate of ``case`` (as in test_parity) over ``world_size`` ranks."""
    with world(rank, world_size, store, case):
        chunks, optimizer, config = build(case)
        return steps(case, chunks, optimizer, config, schedule_of(case, optimizer), range(case["steps"]))


@contextmanager
def world(rank: int, size: int, store: dist.Store, case: dict[str, Any], timeout_s: float = 60) -> Iterator[None]:
    """megatron-core's parallel state over all ranks."""
    with shared_gloo_device(LOOPBACK):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=case["tensor"],
            pipeline_model_parallel_size=case["pipeline"],
            virtual_pipeline_model_parallel_size=case["virtual"],
            expert_model_parallel_size=case["expert"],
            create_gloo_process_groups=False,
        )
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def schedule_of(case: dict[str, Any], optimizer: Any) -> OptimizerParamScheduler:
    """The learning rates of ``case``."""
    return OptimizerParamScheduler(optimizer, **toy.scheduler(case["steps"], case["global_batch_size"]))


def steps(
    case: dict[str, Any], chunks: list[Any], optimizer: Any, config: Any, schedule: Any, which: range
) -> list[dict[str, float]]:
    """Train the steps ``which``, counted from 0."""
    data_ranks = mpu.get_data_parallel_world_size()
    batch = case["global_batch_size"]
    count = batch // (case["micro_batch_size"] * data_ranks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if case["virtual"]:
        config.microbatch_group_size_per_vp_stage = case["pipeline"]
    history = []
    for step in which:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(toy.forward_step, convention=case["convention"]),
            data_iterator=[_sampler(case, step * batch) for _ in chunks],
            model=chunks,
            num_microbatches=count,
            seq_length=toy.SEQ,
            micro_batch_size=case["micro_batch_size"],
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        schedule.step(increment=batch)
        more: dict[str, Any] = {}  # on ranks of the last stage
        MTPLossLoggingHelper.track_mtp_metrics(1 / count, step, None, total_loss_dict=more)
        MTPLossLoggingHelper.tracker.clear()  # the next case of this process may have none
        more |= routing_losses(case, config, 1 / count, step)
        more = {name: float(value) for name, value in more.items() if name.endswith("loss")}
        history.append({"loss": _loss(reports), "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"], **more})
    return history


def routing_losses(case: dict[str, Any], config: Any, scale: float, step: int) -> dict[str, Any]:
    """What megatron-core reports of its routers, by the call of Megatron's training loop. Collective."""
    if not config.num_moe_experts:
        return {}
    found: dict[str, Any] = {}
    kinds = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    reported = {
        "force_initialize": True,
        "track_names": [kinds[config.moe_router_load_balancing_type], *(["z_loss"] * bool(config.moe_z_loss_coeff))],
        "num_layers": case["hybrid"].count("E") if case.get("hybrid") else config.num_layers,
        "moe_layer_freq": config.moe_layer_freq,
        "mtp_num_layers": config.mtp_num_layers,
        "total_loss_dict": found,
    }
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import track_moe_metrics

        track_moe_metrics(scale, step, **reported)
    else:
        # for a stage of a hybrid model without routers Megatron's call makes shorter tensors than those of other stages
        for name in reported["track_names"]:
            get_moe_metrics_tracker().ensure_initialized(name, config.num_layers + (config.mtp_num_layers or 0))
        get_moe_metrics_tracker().report(scale, step, **reported)
    return found


def build(case: dict[str, Any]) -> tuple[list[Any], Any, TransformerConfig]:
    routing_tracker().clear()  # an earlier case of this process may have had fewer layers
    seed = case["seed"] + 100 * mpu.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    half = bool(case["transformer"].get("bf16"))
    given = {**toy.TRANSFORMER, **case["transformer"]}
    if "activation_func" in given:
        given["activation_func"] = getattr(torch.nn.functional, given["activation_func"])
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    config = kind(
        **{
            **given,
            **CPU_SETTINGS,
            **({"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16} if half else {}),
            "tensor_model_parallel_size": case["tensor"],
            "pipeline_model_parallel_size": case["pipeline"],
            "virtual_pipeline_model_parallel_size": case["virtual"],
            "expert_model_parallel_size": case["expert"],
        }
    )
    chunks = []
    shared = case.get("distributed", False)
    for stage in range(case["virtual"] or 1):
        vp_stage = stage if case["virtual"] else None
        if case.get("hybrid"):
            chunks.append(hybrid_chunk(case, config, vp_stage, shared))
            continue
        block = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=vp_stage)
        model = GPTModel(
            config,
            block,
            toy.VOCAB,
            toy.SEQ,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=case["tied"],
            position_embedding_type=case.get("positions", "learned_absolute"),
            mtp_block_spec=get_gpt_mtp_block_spec(config, block, False, vp_stage) if config.mtp_num_layers else None,
            vp_stage=vp_stage,
        )
        model = Float16Module(config, model) if half else model
        chunks.append(_wrapped(config, model, stage, shared))
    optimizer = {**toy.OPTIMIZER, **case.get("optimizer", {})}
    reported = OptimizerConfig(**optimizer, use_distributed_optimizer=shared, bf16=config.bf16)
    reported.params_dtype = config.params_dtype
    kinds = None
    if getattr(config, "use_mup", False):  # as Megatron-LM's setup_model_and_optimizer
        by_width = core_optimizer.get_mup_config_overrides(reported, config.mup_width_mult, reported.optimizer)
        kinds = {**core_optimizer.get_standard_config_overrides(reported), **by_width}
    return chunks, get_megatron_optimizer(reported, chunks, kinds, use_gloo_process_groups=False), config


def hybrid_chunk(case: dict[str, Any], config: Any, vp_stage: int | None, shared: bool) -> DistributedDataParallel:
    """A chunk of megatron-core's HybridModel (since 0.18), of torch layers."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from spare_megatron.megatron_adapter.model.hybrid_layers import local_stack

    model = HybridModel(
        config,
        local_stack(config),
        toy.VOCAB,
        toy.SEQ,
        case["hybrid"],
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case.get("positions", "learned_absolute"),
        vp_stage=vp_stage,
    )
    return _wrapped(config, model, vp_stage or 0, shared)


def _wrapped(config: Any, model: Any, stage: int, shared: bool) -> DistributedDataParallel:
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=shared
    )
    return DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0)


def _sampler(case: dict[str, Any], consumed: int) -> Iterator[dict[str, torch.Tensor]]:
    """MegatronPretrainingSampler: consecutive runs of micro-batch-size samples go to consecutive data ranks."""
    size, ranks, rank = case["micro_batch_size"], mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    while True:
        first = consumed + rank * size
        yield toy.microbatch(range(first, first + size))
        consumed += ranks * size


def _loss(reports: list[dict[str, torch.Tensor]]) -> float:
    """The loss as Megatron logs it, on every rank: averaged over microbatches or tokens, and data ranks."""
    vector = torch.zeros(2, dtype=torch.float64)
    if reports and mpu.get_tensor_model_parallel_rank() == 0:
        for report in reports:
            value = report["lm loss"].double().view(-1)
            vector += value if value.numel() == 2 else torch.tensor([value.item(), 1.0], dtype=torch.float64)
    dist.all_reduce(vector)
    return (vector[0] / vector[1]).item()


def main() -> None:
    """``python -m tests.megatron.plain_reference CASE.json OUT.json`` under torchrun's variables."""
    case = json.loads(Path(sys.argv[1]).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    history = train(rank, size, store, case)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(history))


if __name__ == "__main__":
    main()
