"""Describes a model for a conversion: its sizes, by the names of Megatron's flags, and one of its tensors.

:class:`ModelShape` is made from a checkpoint's ``args`` (:mod:`.model_args`) or a Hugging Face ``config.json``
(:mod:`.hf_config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder, by the names of Megatron's flags."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    max_position_embeddings: int
    padded_vocab_size: int
    vocab_size: int | None = None
    """Number of ids that the tokenizer has, where it is known; the other rows are padding."""
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = True
    qk_layernorm: bool = False
    swiglu: bool = False
    quick_geglu: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] | None = None
    """How many tokens before and after its own a token sees, in layers with a window."""
    window_attn_skip_freq: tuple[int, ...] | None = None
    """For each layer 1 if it has the window; None means that all have it, where there is one."""
    bias_gelu_fusion: bool = True
    """True means GELU in its tanh form, which Megatron's fused kernel computes; False means the exact one."""
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    """Width of an expert; None is that of a dense layer."""
    moe_layer_freq: tuple[int, ...] | None = None
    """For each layer 1 if it has experts, 0 if it is dense; None means that all have experts."""
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_aux_loss_coeff: float = 0.0
    mtp_num_layers: int | None = None
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_type: str | None = None
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    yarn_original_max_position_embeddings: int | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_correction_range_round_to_int: bool = True

    @property
    def gated(self) -> bool:
        """Whether the first feed-forward weight has two halves."""
        return self.swiglu or self.quick_geglu

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many tokens before its own a token sees; None is all."""
        left = self.window_size[0] if self.window_size else None
        pattern = self.window_attn_skip_freq or (1,) * self.num_layers
        return tuple(left if windowed else None for windowed in pattern)

    @property
    def layers_apart(self) -> bool:
        """Whether megatron-core stores each layer by itself, because layers differ."""
        return self.moe_layer_freq is not None

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is one of experts."""
        return self.num_experts is not None and (self.moe_layer_freq is None or self.moe_layer_freq[layer] == 1)

    @property
    def group_width(self) -> int:
        """Rows of the fused query, key and value weight that belong to one query group."""
        return (self.num_attention_heads // self.num_query_groups + 2) * self.kv_channels


@dataclass(frozen=True)
class Entry:
    """One logical tensor."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    """The axis that tensor parallelism splits."""
    gated: bool = False
    """Whether it has two halves along axis 0 (gate and input), each of which is split by itself."""
    layer: int | None = None
    """Number of its layer; those that predict more tokens come after all others."""
    expert: int | None = None

    def of_expert(self, expert: int) -> Entry:
        """The same tensor of another expert."""
        name = self.name.replace(f".experts.{self.expert}.", f".experts.{expert}.")
        return dataclasses.replace(self, name=name, expert=expert)

    @property
    def predicts(self) -> bool:
        """Whether it is of a layer that predicts one more token."""
        return self.name.startswith("mtp.")

    @property
    def vocabulary(self) -> bool:
        """Whether it has one row for each token id."""
        return self.name in (WORDS, OUTPUT)


NO_ITERATION = 1
"""The iteration that Megatron's tools give a model without one; they cannot resume from 0 or 'release'."""


def iteration_of(saved: object) -> int:
    """The iteration of a checkpoint that says it is ``saved``: a step, a word for none, or nothing."""
    return saved if isinstance(saved, int) and saved > 0 else NO_ITERATION


class TensorSource(Protocol):
    """Reads a checkpoint, one logical tensor at a time."""

    shape: ModelShape
    iteration: int
    args: Mapping[str, Any]
    """Megatron's args as the checkpoint has them; empty for other formats."""
    folder: Path
    """Where tokenizer files are looked for."""

    def read(self, entry: Entry) -> torch.Tensor:
        """The whole tensor. Where rows are token ids, their number may differ from the entry's (other padding)."""

    def dtype(self, entry: Entry) -> torch.dtype:
        """The tensor's stored dtype, found without reading the tensor."""


WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
