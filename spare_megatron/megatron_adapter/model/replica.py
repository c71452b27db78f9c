"""One group's share of the model on this rank: chunks, gradient buffers, optimizer and learning-rate schedule.

They are built of megatron-core's own parts. The only difference from plain Megatron is :class:`GroupDDP`: it has
megatron-core's contiguous gradient buffers and never reduces them, because the step loop reduces them over groups.

May assume: ``init_group_world`` has run. Promises: every group that is given the same settings builds the same
parameters; :attr:`Replica.chunks` has one entry for each virtual stage of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from spare_megatron.megatron_adapter.shims import cuda_available, install_cpu_shims


def with_objects(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TransformerConfig with objects in place of words; other values stay as they are. Settings have
    plain values, so that they can be hashed and stored; a few of them name functions and enum members."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.enums import AttnBackend

    words: dict[str, dict[str, Any]] = {
        "activation_func": {
            "gelu": torch.nn.functional.gelu,
            "silu": torch.nn.functional.silu,
            "quick_gelu": quick_gelu,
            "squared_relu": squared_relu,
        },
        "init_method": {"xavier_uniform": torch.nn.init.xavier_uniform_},
        "output_layer_init_method": {"xavier_uniform": torch.nn.init.xavier_uniform_},
        "attention_backend": {member.name: member for member in AttnBackend},
    }
    made = {
        name: words[name].get(value, value) if name in words and isinstance(value, str) else value
        for name, value in fields.items()
    }
    if fields.get("bias_activation_fusion") and "activation_func" not in fields and not cuda_available():
        # The fused kernel computes GELU's tanh form. Without it the same model must compute the same function.
        made |= {
            "activation_func": partial(torch.nn.functional.gelu, approximate="tanh"),
            "bias_activation_fusion": False,
        }
    return made


install_cpu_shims()

from megatron.core import tensor_parallel
from megatron.core.config import set_experimental_flag
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_model_config

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.megatron_adapter.core_differences import (
    count_copies_of_experts,
    known_fields,
    rates_by_width,
    transformer_fields,
)
from spare_megatron.megatron_adapter.model import rng
from spare_megatron.megatron_adapter.model.ademamix import replace_adam
from spare_megatron.megatron_adapter.model.home_rows import Row
from spare_megatron.megatron_adapter.model.hybrid_layers import check_kind, hybrid_provider
from spare_megatron.megatron_adapter.model.settings import (
    MegatronSettings,
    check_routing,
    check_settings,
    language_model_arguments,
    splits_optimizer,
    uses_local_layers,
)
from spare_megatron.megatron_adapter.model.soap import order_before_updates
from spare_megatron.megatron_adapter.model.tied_head import TiedHead
from spare_megatron.megatron_adapter.model.world import GroupWorld
from spare_megatron.megatron_adapter.shims import compute_device

ModelProvider = Callable[..., torch.nn.Module]
"""Megatron's model provider: (pre_process, post_process[, vp_stage, config, pg_collection]) -> module."""

CPU_TRANSFORMER_SETTINGS: dict[str, tuple[Any, str]] = {
    "use_cpu_initialization": (True, "there is no other device"),
    "gradient_accumulation_fusion": (False, "a CUDA kernel; it also bypasses the gradient hook"),
    "masked_softmax_fusion": (False, "a CUDA kernel"),
    "bias_activation_fusion": (False, "needs the jit fuser"),
    "bias_dropout_fusion": (False, "needs the jit fuser"),
    "apply_rope_fusion": (False, "a CUDA kernel"),
    "moe_permute_fusion": (False, "a CUDA kernel"),
    "moe_router_fusion": (False, "a CUDA kernel"),
    "persist_layer_norm": (False, "a CUDA kernel"),
    "batch_p2p_comm": (False, "wrong gradients with two pipeline stages and virtual stages"),
    "deallocate_pipeline_outputs": (False, "wrong gradients with overlapped sends on gloo"),
}
"""Field of TransformerConfig -> (the value it must have without CUDA, why)."""


class GroupDDP(DistributedDataParallel):
    """megatron-core's DDP with its gradient buffers, without its reduction."""

    accumulate: Callable[[torch.nn.Parameter], None] | None = None
    """Called to add a parameter's gradient after each backward pass; None adds it to ``main_grad``, in fp32."""
    arrived: Callable[[torch.nn.Parameter], None] | None = None
    """Called after a parameter's gradient was added."""

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        plain = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if self.accumulate is None:
                plain(*unused)
            elif param.grad is not None:
                self.accumulate(param)
                param.grad = None
            if self.arrived is not None:
                self.arrived(param)

        return hook

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: the step loop sums gradients inside the group and over groups."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Do nothing, so that ``finalize_model_grads`` only does what concerns the inside of the group."""


@dataclass
class Replica:
    """The model chunks, optimizer and schedule of one rank of a group."""

    chunks: list[GroupDDP]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    config: TransformerConfig
    """Config of the first chunk; the schedule reads its run-time fields."""
    settings: MegatronSettings
    head: TiedHead | None = None
    """With exact sums, the output layer's use of a weight that the embedding on the same stage has too."""
    row: Row | None = None
    """Where this stands for one row of several that the rank has: which part of the chunks is the row's."""


def transformer_config(settings: MegatronSettings, shape: JobShape) -> TransformerConfig:
    """megatron-core's TransformerConfig from the settings, the group's parallel degrees and the needs of this
    machine. ConfigError, with megatron-core's reason, where it refuses them."""
    values = with_objects(settings.transformer)
    values.update(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        context_parallel_size=shape.context,
    )
    dtype = torch.bfloat16 if values.get("bf16") else torch.float16 if values.get("fp16") else torch.float32
    values.setdefault("params_dtype", dtype)
    if shape.pipeline > 1:
        values.setdefault("pipeline_dtype", values["params_dtype"])
    if settings.virtual_pipeline is not None:
        values["batch_p2p_comm"] = False
    if not cuda_available():
        values.update({name: value for name, (value, _) in CPU_TRANSFORMER_SETTINGS.items()})
    elif uses_local_layers(settings):
        values["persist_layer_norm"] = False
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    yarn = {name: values.pop(name) for name in list(values) if name.startswith("yarn_")}
    try:
        config = kind(**transformer_fields(kind, values))
    except (ValueError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"megatron-core refuses the model: {reason}; change the flags") from error
    for name, value in yarn.items():  # megatron-core asks for attributes that its dataclass has not
        setattr(config, name, value)
    return config


def default_model_provider(settings: MegatronSettings, config: TransformerConfig) -> ModelProvider:
    """The model provider of Megatron's pretrain_gpt.py, or where layers are written out of its pretrain_hybrid.py: a
    model with local or transformer-engine layers."""
    if settings.hybrid_layer_pattern is not None:
        return hybrid_provider(settings, config)

    def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        from megatron.core.models.gpt import gpt_layer_specs as specs

        engine = not uses_local_layers(settings)
        norms: dict[str, Any] = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
        if config.experimental_attention_variant is not None:
            from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

            block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
            last = block
        else:
            block = specs.get_gpt_decoder_block_spec(config, engine, vp_stage=vp_stage, **norms)
            last = specs.get_gpt_decoder_layer_specs(config, engine, **norms)[-1]  # the stage may have no decoder layer
        mtp = specs.get_gpt_mtp_block_spec(config, last, engine, vp_stage) if config.mtp_num_layers else None
        return GPTModel(
            config=config,
            transformer_layer_spec=block,
            pre_process=pre_process,
            post_process=post_process,
            rope_scaling=settings.use_rope_scaling,
            rope_scaling_factor=settings.rope_scaling_factor,
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
            **language_model_arguments(settings),
        )

    return provide


def build_replica(
    settings: MegatronSettings, world: GroupWorld, model_provider: ModelProvider | None = None
) -> Replica:
    """Build the model chunks, optimizer and schedule of this rank, with :func:`default_model_provider` unless one is
    given.

    Collective over the group. ConfigError for settings that cannot be trained correctly.
    """
    check_settings(settings, world.shape)
    set_experimental_flag(settings.experimental)
    rng.seed_start(settings.seed, world.pipeline_rank)
    config = transformer_config(settings, world.shape)
    provider = model_provider or default_model_provider(settings, config)
    modules = _provide_chunks(provider, world)
    check_kind(settings, modules[0])
    config = get_model_config(modules[0])
    _check_config(config, world)
    split = splits_optimizer(settings, world.shape)
    chunks = [_wrap(module, index, settings, split) for index, module in enumerate(modules)]
    optimizer = build_optimizer(settings, config, chunks, split and not settings.divides_state)
    if settings.divides_state:
        _prepare_for_shards(optimizer, split)
    scheduler = OptimizerParamScheduler(optimizer, **settings.scheduler)
    return Replica(chunks, optimizer, scheduler, config, settings)


def _prepare_for_shards(optimizer: MegatronOptimizer, split: bool) -> None:
    """Have the fp32 weights, and the state of them that a checkpoint has, in host memory until the group knows which
    shards it keeps: no device needs room for all. With ``split`` each rank has the gradients of its part only, as with
    a distributed optimizer."""
    from megatron.core import parallel_state

    for part in optimizer.chained_optimizers:
        for main in (main for group in getattr(part, "fp32_from_float16_groups", ()) for main in group):
            main.data = main.data.cpu()
        if split:
            part.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()


def _provide_chunks(provider: ModelProvider, world: GroupWorld) -> list[MegatronModule]:
    from megatron.core import parallel_state

    takes = inspect.signature(provider).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    if world.virtual_pipeline is None:
        stages: list[int | None] = [None]
    elif "vp_stage" in takes or takes_any:
        stages = list(range(world.virtual_pipeline))
    else:
        raise ConfigError(
            f"the model provider takes no vp_stage, which {world.virtual_pipeline} virtual pipeline stages need; "
            "add the argument vp_stage=None to it and pass it to the model, or leave virtual stages out"
        )
    chunks: list[MegatronModule] = []
    for stage in stages:
        given: dict[str, Any] = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        }
        offered = {"vp_stage": stage, "config": None, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
        given |= {name: value for name, value in offered.items() if name in takes}
        if takes_any:
            given["vp_stage"] = stage
        module = provider(**given)
        module.model_type = ModelType.encoder_or_decoder
        _mend_prediction_stage(module)
        _mend_whole_experts(module, world)
        if stage is not None:
            module.vp_stage = stage
        chunks.append(module)
    return chunks


def _mend_prediction_stage(module: torch.nn.Module) -> None:
    """Where layers of multi-token prediction have a copy of the embedding on their stage, have the optimizer treat it
    as the first stage's. megatron-core does that in 0.19; in 0.16 ``--decoupled-lr`` drives the copies apart.

    Where embeddings are tied, leave out the weight of the output layer, which gets the copy instead. megatron-core
    makes it, never uses it, and does not save a stage that has it."""
    for part in module.modules():
        if not getattr(part, "mtp_process", False):
            continue
        embedding, head = getattr(part, "embedding", None), getattr(part, "output_layer", None)
        if embedding is not None:
            embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if getattr(part, "share_embeddings_and_output_weights", False) and isinstance(head, torch.nn.Module):
            head.weight = None


def _mend_whole_experts(module: torch.nn.Module, world: GroupWorld) -> None:
    """Where tensor-parallel ranks have whole experts, have their gradients summed over the ranks that have a copy, and
    over no others.

    Before 0.19 megatron-core takes experts without expert parallelism for weights that data-parallel ranks alone have
    copies of: each tensor-parallel rank trains its own, with its part of the sequence. With ``--sequence-parallel`` it
    also adds biases' gradients over all tensor-parallel ranks, which have copies, or other experts."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    if parallel_state.get_expert_tensor_parallel_world_size() == world.shape.tensor:
        return
    for part in module.modules():
        for parameter in part.experts.parameters() if isinstance(part, BaseMoELayer) else ():
            parameter.allreduce, parameter.sequence_parallel = False, False


def _check_config(config: TransformerConfig, world: GroupWorld) -> None:
    """ConfigError where the config that a user's provider built does not fit this group or this machine."""
    shape = world.shape
    for name, value in (
        ("tensor_model_parallel_size", shape.tensor),
        ("pipeline_model_parallel_size", shape.pipeline),
        ("context_parallel_size", shape.context),
    ):
        if getattr(config, name) != value:
            raise ConfigError(
                f"the model provider's config has {name} {getattr(config, name)}, but this group has {value}; "
                f"build the config from the job's flags"
            )
    check_routing(config.moe_router_load_balancing_type, getattr(config, "moe_router_force_biased", None))
    if not cuda_available():
        for name, (setting, reason) in CPU_TRANSFORMER_SETTINGS.items():
            if getattr(config, name, setting) != setting:
                raise ConfigError(
                    f"the model provider's config has {name} {getattr(config, name)}, which cannot run without CUDA "
                    f"({reason}); set it to {setting}"
                )


def _wrap(module: MegatronModule, index: int, settings: MegatronSettings, split: bool) -> GroupDDP:
    rng.set_states_by_layer(module)
    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    module.to(compute_device())
    config = get_model_config(module)
    wrapped = Float16Module(config, module) if config.fp16 or config.bf16 else module
    count_tokens_in_fp32(wrapped)
    values = {
        **settings.ddp,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "average_in_collective": False,
        "use_distributed_optimizer": split,
    }
    ddp = DistributedDataParallelConfig(**known_fields(DistributedDataParallelConfig, values))
    return GroupDDP(config=config, ddp_config=ddp, module=wrapped, disable_bucketing=index > 0)


def count_tokens_in_fp32(model: torch.nn.Module) -> None:
    """Have routers that balance experts by a bias count tokens, and keep the bias, in fp32, whatever the model's
    precision.

    Float16Module converts megatron-core's counts too. bf16 has no odd number above 256, so what a group counts would
    depend on the order of its microbatches, and the bias, which follows the sign of a difference of counts, on which
    group computed them. The bias itself megatron-core makes fp32 at the first forward pass; a group that comes back
    takes results before it.
    """
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.local_tokens_per_expert = module.local_tokens_per_expert.float()
            module.expert_bias.data = module.expert_bias.data.float()


def build_optimizer(
    settings: MegatronSettings, config: TransformerConfig, chunks: list[GroupDDP], split: bool
) -> MegatronOptimizer:
    """The optimizer of the chunks; with ``split`` megatron-core's distributed optimizer, over inner data and context
    ranks."""
    values = {**settings.optimizer, "use_distributed_optimizer": split}
    values.update(fp16=config.fp16, bf16=config.bf16, params_dtype=config.params_dtype)
    mixes = values.get("optimizer") == "ademamix"
    if mixes:
        values["optimizer"] = "adam"
    config_of = OptimizerConfig(**known_fields(OptimizerConfig, values))
    overrides = rates_by_width(config_of, config)
    optimizer = get_megatron_optimizer(config_of, chunks, overrides, use_gloo_process_groups=False)
    order_before_updates(optimizer)
    count_copies_of_experts(optimizer)
    if mixes:
        given = settings.ademamix or {}
        replace_adam(optimizer, **{name.removeprefix("ademamix_"): value for name, value in given.items()})
    return optimizer
