"""Translates between ``config.json`` of Hugging Face models and :class:`~.model.ModelShape`, in both directions.

Kinds: ``gpt2``, ``llama``, ``mistral`` (a Llama without a sliding window), ``mixtral``, ``qwen2``, ``qwen3``. A config
with a setting that has no equivalent in megatron-core is refused, with the setting's value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

KINDS = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TANH_GELU, EXACT_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), ("gelu",)
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's --use-rope-scaling."""


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The model that a ``config.json`` describes; ConfigError where megatron-core has no such model."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ConfigError(f"config.json has model_type {kind!r}, which is not converted; {', '.join(KINDS)} are")
    return _gpt2(config) if kind == "gpt2" else _llama(config, str(kind))


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    _refuse(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, heads = config["n_embd"], config["n_head"]
    activation = config.get("activation_function", "gelu_new")
    if activation not in (*TANH_GELU, *EXACT_GELU):
        raise ConfigError(f"config.json has activation_function {activation!r}, which is not converted; GELU is")
    return ModelShape(
        num_layers=config["n_layer"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=config.get("n_inner") or 4 * hidden,
        max_position_embeddings=config["n_positions"],
        padded_vocab_size=config["vocab_size"],
        vocab_size=config["vocab_size"],
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", True),
        bias_gelu_fusion=activation in TANH_GELU,
        attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1),
    )


def _llama(config: Mapping[str, Any], kind: str) -> ModelShape:
    _refuse(config, hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
    limit = config["max_position_embeddings"]
    window = config.get("sliding_window")
    if kind in ("mistral", "mixtral") and window is not None and window < limit:
        raise ConfigError(f"config.json has sliding_window {window}, which is not converted; full attention is")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_local_experts") if kind == "mixtral" else None
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or hidden // heads,
        ffn_hidden_size=config["intermediate_size"],
        max_position_embeddings=limit,
        padded_vocab_size=config["vocab_size"],
        vocab_size=config["vocab_size"],
        normalization="RMSNorm",
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind == "qwen3",
        swiglu=True,
        bias_gelu_fusion=False,
        num_experts=experts,
        moe_router_topk=config.get("num_experts_per_tok", 2) if experts else 2,
        moe_aux_loss_coeff=config.get("router_aux_loss_coef", 0.0) if experts else 0.0,
        attention_dropout=config.get("attention_dropout", 0.0),
        hidden_dropout=0.0,
        **_rotary(config),
    )


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, from the names of old or new versions of transformers."""
    new = config.get("rope_parameters") or {}
    scaling = new or config.get("rope_scaling") or {}
    base = float(new.get("rope_theta", config.get("rope_theta", 10000.0)))
    if base != int(base):
        raise ConfigError(f"config.json has rope_theta {base}, but --rotary-base takes whole numbers")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": int(base)}
    if kind == "llama3":
        for name, fixed in LLAMA3_SCALING.items():
            if scaling.get(name, fixed) != fixed:
                raise ConfigError(f"config.json has {name} {scaling[name]}, but megatron-core's has {fixed}")
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    elif kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = float(scaling["factor"])
    elif kind != "default":
        raise ConfigError(f"config.json has rope_type {kind!r}, which is not converted; default, linear and llama3 are")
    return found


def _refuse(config: Mapping[str, Any], **plain: Any) -> None:
    for name, value in plain.items():
        if config.get(name, value) != value:
            raise ConfigError(f"config.json has {name} {config[name]!r}, which is not converted; {value!r} is")


def kind_of(shape: ModelShape) -> str:
    """The kind of Hugging Face model that has this shape; ConfigError when there is none."""
    llama = shape.swiglu and shape.normalization == "RMSNorm" and shape.position_embedding_type == "rope"
    if llama and not shape.add_bias_linear and shape.rotary_percent == 1.0:
        plain = not shape.add_qkv_bias and not shape.qk_layernorm
        if shape.num_experts is not None:
            kinds = {"mixtral": plain}
        else:
            kinds = {
                "llama": plain,
                "qwen2": shape.add_qkv_bias and not shape.qk_layernorm,
                "qwen3": shape.qk_layernorm and not shape.add_qkv_bias,
            }
        for kind, fits in kinds.items():
            if fits:
                return kind
    gpt = not shape.swiglu and shape.normalization == "LayerNorm" and shape.add_bias_linear and not shape.qk_layernorm
    learned = shape.position_embedding_type == "learned_absolute" and shape.num_experts is None
    usual = shape.num_query_groups == shape.num_attention_heads
    if gpt and learned and usual and shape.kv_channels * shape.num_attention_heads == shape.hidden_size:
        return "gpt2"
    raise ConfigError(
        f"a model with {shape.normalization}, {'SwiGLU' if shape.swiglu else 'GELU'}, "
        f"{shape.position_embedding_type} positions, {'biases' if shape.add_bias_linear else 'no biases'} and "
        f"{shape.num_experts or 'no'} experts has no equivalent among transformers' {', '.join(ARCHITECTURES)}"
    )


def config_of_shape(shape: ModelShape, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a model, with the names of the rotary embedding for old and new versions of transformers."""
    word = str(dtype).removeprefix("torch.")
    common = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "torch_dtype": word, "use_cache": True}
    vocabulary = shape.vocab_size or shape.padded_vocab_size
    common |= {"vocab_size": vocabulary, "tie_word_embeddings": not shape.untie_embeddings_and_output_weights}
    if kind == "gpt2":
        return common | {
            "n_layer": shape.num_layers,
            "n_embd": shape.hidden_size,
            "n_head": shape.num_attention_heads,
            "n_inner": shape.ffn_hidden_size,
            "n_positions": shape.max_position_embeddings,
            "layer_norm_epsilon": shape.norm_epsilon,
            "activation_function": "gelu_new" if shape.bias_gelu_fusion else "gelu",
            "attn_pdrop": shape.attention_dropout,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), shape.hidden_dropout),
            "bos_token_id": None,
            "eos_token_id": None,
        }
    found = common | {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": shape.attention_dropout,
        "rope_theta": float(shape.rotary_base),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    scaling = _scaling(shape)
    if scaling:
        found["rope_scaling"] = scaling
    found["rope_parameters"] = {"rope_theta": float(shape.rotary_base), **(scaling or {"rope_type": "default"})}
    if kind == "mixtral":
        found |= {
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.moe_router_topk,
            "router_aux_loss_coef": shape.moe_aux_loss_coeff,
            "sliding_window": None,
        }
    return found


def _scaling(shape: ModelShape) -> dict[str, Any]:
    if shape.use_rope_scaling:
        return {"rope_type": "llama3", "factor": shape.rope_scaling_factor, **LLAMA3_SCALING}
    if shape.rotary_seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": float(shape.rotary_seq_len_interpolation_factor)}
    return {}


def same_model(one: ModelShape, other: ModelShape) -> bool:
    """Whether two shapes differ at most in the padding of the vocabulary, dropout and the auxiliary loss."""
    free = {"padded_vocab_size": 0, "moe_aux_loss_coeff": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return dataclasses.replace(one, **free) == dataclasses.replace(other, **free)
