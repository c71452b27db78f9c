"""The settings from which a model, its optimizer and its schedule are built, with megatron-core's names.

:class:`MegatronSettings` has plain values, so that it can be made from flags, hashed into a job's fingerprint and
written into a checkpoint. Its mappings name fields of megatron-core's dataclasses.

May assume nothing. Promises: importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.megatron_adapter.versions import release


@dataclass(frozen=True)
class MegatronSettings:
    """Model, optimizer and schedule of a job; the same on every rank of every group."""

    transformer: Mapping[str, Any]
    """Fields of megatron-core's TransformerConfig (or MLATransformerConfig), except the parallel sizes of JobShape."""
    optimizer: Mapping[str, Any]
    """Fields of megatron-core's OptimizerConfig; 'optimizer' may also be 'ademamix'."""
    scheduler: Mapping[str, Any]
    """Arguments of OptimizerParamScheduler after the optimizer; lengths are in samples, as Megatron counts them."""
    padded_vocab_size: int
    seq_length: int
    max_position_embeddings: int
    ademamix: Mapping[str, Any] | None = None
    """Fields of :class:`~spare_megatron.config.sections.AdemamixConfig` where 'optimizer' is 'ademamix'."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's DistributedDataParallelConfig."""
    untie_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    fp16_lm_cross_entropy: bool = False
    hybrid_layer_pattern: str | None = None
    """The layers of a HybridModel, in megatron-core's words; None: the model is a GPTModel."""
    spec: tuple[str, ...] = ()
    """Module and name of the specification of a hybrid model's layers; empty: megatron-core's, or its torch layers."""
    transformer_impl: str = "auto"
    """'local', 'transformer_engine', or 'auto': transformer-engine where it is installed and there is CUDA."""
    experimental: bool = False
    """Whether megatron-core may use what it calls experimental."""
    seed: int = 1234
    divides_state: bool = False
    """Whether each group keeps only some state shards. Then no part of the optimizer is whole in a group, and it is not
    megatron-core's distributed one, whose parts would be whole."""
    schedule: str = "core"
    """'core': megatron-core's own pipeline schedules; 'tickets': our programs, on its forward and backward steps."""

    def get(self, name: str, default: Any = None) -> Any:
        """A field of ``transformer``."""
        return self.transformer.get(name, default)

    @property
    def virtual_pipeline(self) -> int | None:
        """Model chunks of each pipeline stage, None without interleaving."""
        return self.get("virtual_pipeline_model_parallel_size")

    @property
    def expert(self) -> int:
        """Expert-parallel degree, carved out of TP x CP x D."""
        return self.get("expert_model_parallel_size", 1)

    @property
    def expert_tensor(self) -> int | None:
        """Expert-tensor-parallel degree; None means the tensor-parallel degree."""
        return self.get("expert_tensor_parallel_size")


def splits_optimizer(settings: MegatronSettings, shape: JobShape) -> bool:
    """Whether megatron-core's distributed optimizer splits a group's optimizer state over its inner data and context
    ranks: when the flags ask for it and there is more than one of these ranks."""
    return bool(settings.optimizer.get("use_distributed_optimizer")) and shape.inner_data * shape.context > 1


def uses_local_layers(settings: MegatronSettings) -> bool:
    """Whether the model is built of megatron-core's own torch layers instead of transformer-engine's."""
    if settings.transformer_impl == "auto":
        import importlib.util

        import torch

        return not (torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"))
    return settings.transformer_impl == "local"


def language_model_arguments(settings: MegatronSettings) -> dict[str, Any]:
    """The arguments that megatron-core's GPTModel and HybridModel have in common, but for those of the stage."""
    return {
        "vocab_size": settings.padded_vocab_size,
        "max_sequence_length": settings.max_position_embeddings,
        "fp16_lm_cross_entropy": settings.fp16_lm_cross_entropy,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not settings.untie_embeddings_and_output_weights,
        "position_embedding_type": settings.position_embedding_type,
        "rotary_percent": settings.rotary_percent,
        "rotary_base": settings.rotary_base,
        "seq_len_interpolation_factor": settings.rotary_seq_len_interpolation_factor,
    }


def check_settings(settings: MegatronSettings, shape: JobShape) -> None:
    """ConfigError, with the reason, for settings that this adapter cannot train correctly."""
    transformer = settings.transformer
    if shape.context > 1 and uses_local_layers(settings):
        raise ConfigError(
            f"--context-parallel-size {shape.context} needs transformer-engine's attention: megatron-core's local "
            "attention asserts a context-parallel size of 1; use --context-parallel-size 1 or install "
            "transformer-engine on a machine with CUDA"
        )
    latent = transformer.get("multi_latent_attention") and transformer.get("q_lora_rank") is None
    if latent and transformer.get("qk_layernorm") and uses_local_layers(settings) and release() >= (0, 19):
        raise ConfigError(
            "--qk-layernorm with --multi-latent-attention and without --q-lora-rank needs transformer-engine: "
            "megatron-core's local layers have no norm of such queries since 0.19; give --q-lora-rank, or leave "
            "--qk-layernorm out"
        )
    check_routing(
        transformer.get("moe_router_load_balancing_type", "aux_loss"), transformer.get("moe_router_force_biased")
    )
    inner = shape.tensor * shape.context * shape.inner_data
    expert_tensor = settings.expert_tensor or shape.tensor
    expert = settings.expert * expert_tensor
    if inner % expert:
        enough = expert // math.gcd(expert, shape.tensor * shape.context)
        raise ConfigError(
            f"expert parallelism {settings.expert} x expert tensor parallelism {expert_tensor} = {expert} does not "
            f"divide {inner} = TP {shape.tensor} x CP {shape.context} x inner data parallelism {shape.inner_data}; "
            f"use --spare-inner-data-parallel {enough}"
        )
    virtual = settings.virtual_pipeline
    if virtual is not None and shape.pipeline < 2:
        raise ConfigError(
            f"{virtual} virtual stages need --pipeline-model-parallel-size of at least 2, but it is {shape.pipeline}"
        )
    given = [name for name in _ONLY_CORE if settings.schedule != "core" and transformer.get(name)]
    if given:
        raise ConfigError(f"--spare-schedule {settings.schedule} knows no {given[0]}; use --spare-schedule core")
    unknown = set(settings.scheduler) - _SCHEDULER_FIELDS
    if unknown:
        raise ConfigError(
            f"scheduler settings {sorted(unknown)} are unknown; known are {', '.join(sorted(_SCHEDULER_FIELDS))}"
        )


def check_routing(balancing: str | Sequence[str], force_biased: float | None) -> None:
    """ConfigError for ways to route tokens to experts that depend on which microbatches a group has computed."""
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind in REFUSED_BALANCING:
            why, instead = REFUSED_BALANCING[kind]
            raise ConfigError(f"--moe-router-load-balancing-type {kind} is not supported: {why}; {instead}")
    if force_biased is not None and force_biased < 0:
        raise ConfigError(
            f"moe_router_force_biased {force_biased:g} is not supported: it keeps the random bias of the first "
            "microbatch that a rank computes; use a positive one or none"
        )


_ELSE = "use aux_loss or seq_aux_loss"
REFUSED_BALANCING = {
    "global_aux_loss": (
        "each microbatch's loss follows from the tokens of all microbatches that its ranks computed before it in the "
        "step, so moving a microbatch changes it",
        _ELSE,
    ),
    "quantile_balancing": (
        "its bias is computed from the microbatches of one group and its audits, so moving a microbatch changes it",
        _ELSE,
    ),
}
"""Value of ``--moe-router-load-balancing-type`` -> (why it is refused, what to use); the flags' table has them too."""
_ONLY_CORE = ("variable_seq_lengths", "num_microbatches_with_partial_activation_checkpoints", "use_ring_exchange_p2p")
"""Fields of TransformerConfig that megatron-core's schedules honour and our programs do not."""
_SCHEDULER_FIELDS = frozenset(
    {
        "init_lr",
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_steps",
        "wd_incr_style",
        "use_checkpoint_opt_param_scheduler",
        "override_opt_param_scheduler",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
    }
)
