"""Multi-latent attention of DeepSeek's kinds: the fields of ``config.json``, and those of a shape."""

from __future__ import annotations

from typing import Any

from spare_megatron.checkpoint.convert.hf_values import ConfigValues
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

EPSILON = 1e-6
"""Of the norms of latents in transformers, whatever the config says; megatron-core has one epsilon for all norms."""


def latents(config: ConfigValues, heads: int) -> dict[str, Any]:
    """A shape's fields of multi-latent attention."""
    config.refuse(rope_interleave=True)
    groups = config.whole("num_key_value_heads", heads)
    if groups != heads:
        raise ConfigError(
            f"config.json has num_key_value_heads {groups}, which is not converted; with latents only "
            f"num_attention_heads, which is {heads}, is"
        )
    epsilon = config.number("rms_norm_eps")
    if epsilon != EPSILON:
        raise ConfigError(
            f"config.json has rms_norm_eps {epsilon}, which is not converted; transformers' norms of latents have "
            f"{EPSILON} in any case, and megatron-core has one value for all norms"
        )
    turned = config.size("qk_rope_head_dim")
    if turned % 2:
        raise ConfigError(f"config.json has qk_rope_head_dim {turned}, but rotary embeddings need an even number")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config.whole("q_lora_rank"),
        "kv_lora_rank": config.size("kv_lora_rank"),
        "qk_head_dim": config.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": turned,
        "v_head_dim": config.size("v_head_dim"),
        "rope_type": "rope",
    }


def latent_fields(shape: ModelShape) -> dict[str, Any]:
    """The fields of ``config.json``; none for a model with usual attention. ConfigError for one with which transformers
    would compute something else."""
    if not shape.multi_latent_attention:
        return {}
    if shape.norm_epsilon != EPSILON:
        raise ConfigError(
            f"the model was trained with --norm-epsilon {shape.norm_epsilon}, which is not converted, as transformers' "
            f"norms of latents have {EPSILON} in any case; train with --norm-epsilon {EPSILON}"
        )
    return {
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_head_dim,
        "qk_rope_head_dim": shape.qk_pos_emb_head_dim,
        "v_head_dim": shape.v_head_dim,
    }
