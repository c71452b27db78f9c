"""Translates between ``config.json`` of Hugging Face models and :class:`~.model.ModelShape`, in both directions.

Kinds: those of ``ARCHITECTURES``; a ``mistral`` is a Llama without a sliding window. A config with a setting that has
no equivalent in megatron-core is refused, with the setting's value. Experts, latents and rotary embeddings have modules
of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from spare_megatron.checkpoint.convert.hf_experts import BIASED, expert_fields, expert_kind, experts
from spare_megatron.checkpoint.convert.hf_gpt_oss import is_special, special, special_fields
from spare_megatron.checkpoint.convert.hf_latents import latent_fields, latents
from spare_megatron.checkpoint.convert.hf_rotary import LATENT, SHARES, rotary, rotary_fields
from spare_megatron.checkpoint.convert.hf_values import ConfigValues, shown
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
_GEMMA = (
    "megatron-core's layers have no norm after attention or after the feed-forward part, one rope_theta for all layers "
    "and not rope_local_base_freq beside it, and no embeddings multiplied by the root of hidden_size"
)
NOT_IN_CORE = {
    "gemma3_text": _GEMMA,
    "gemma3": f"of the text_config, {_GEMMA}",
    "qwen3_next": "norms that multiply by 1 + weight are transformer-engine's alone, and linear_attention in its "
    "layer_types needs the package flash-linear-attention",
}
"""Kind of model -> what megatron-core's own torch layers lack for it."""
TANH_GELU, EXACT_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), ("gelu",)


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The model that a ``config.json`` describes; ConfigError where megatron-core has no such model."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in NOT_IN_CORE:
        raise ConfigError(f"config.json has model_type {shown(kind)}, which is not converted: {NOT_IN_CORE[kind]}")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(
            f"config.json has model_type {shown(kind)}, which is not converted; {', '.join(ARCHITECTURES)} are"
        )
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ConfigError(
            f"config.json has a quantization_config ({shown(method)}), but only whole weights are converted; "
            "fetch the model in bf16, fp16 or fp32"
        )
    values = ConfigValues(config, kind)
    values.check_tokens()
    return _gpt2(values) if kind == "gpt2" else _llama(values)


def _gpt2(config: ConfigValues) -> ModelShape:
    config.refuse(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, heads = config.needed("n_embd"), config.needed("n_head")
    activation = config.get("activation_function", "gelu_new")
    if activation not in (*TANH_GELU, *EXACT_GELU):
        raise ConfigError(f"config.json has activation_function {shown(activation)}, which is not converted; GELU is")
    vocabulary = config.needed("vocab_size")
    return ModelShape(
        num_layers=config.needed("n_layer"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=_divided("n_embd", hidden, "n_head", heads),
        ffn_hidden_size=config.whole("n_inner", 4 * hidden) or 0,
        max_position_embeddings=config.needed("n_positions"),
        padded_vocab_size=vocabulary,
        vocab_size=vocabulary,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings", True),
        bias_gelu_fusion=activation in TANH_GELU,
        attention_dropout=_probability(config, "attn_pdrop", 0.1),
        hidden_dropout=_probability(config, "resid_pdrop", 0.1),
    )


def _llama(config: ConfigValues) -> ModelShape:
    """All kinds but GPT-2 are a Llama with something else here and there."""
    kind, limit = config.kind, config.needed("max_position_embeddings")
    config.refuse(hidden_act="silu", mlp_bias=False, use_sliding_window=False)
    if kind not in ("glm4_moe", "gpt_oss"):
        config.refuse(attention_bias=False)
    window = config.whole("sliding_window")
    if kind in ("mistral", "mixtral") and window is not None and window < limit:
        raise ConfigError(f"config.json has sliding_window {window}, which is not converted; full attention is")
    layers = config.needed("num_hidden_layers")
    types = config.get("layer_types")
    full = isinstance(types, list) and len(types) == layers and all(one == "full_attention" for one in types)
    if types is not None and not full and kind != "gpt_oss":
        raise ConfigError(
            f"config.json has layer_types {shown(types)}, which is not converted; full attention in each of the "
            f"{layers} layers is"
        )
    vocabulary = config.needed("vocab_size")
    shape = ModelShape(
        num_layers=layers,
        hidden_size=config.needed("hidden_size"),
        num_attention_heads=config.needed("num_attention_heads"),
        ffn_hidden_size=config.needed("intermediate_size"),
        max_position_embeddings=limit,
        padded_vocab_size=vocabulary,
        vocab_size=vocabulary,
        normalization="RMSNorm",
        norm_epsilon=config.number("rms_norm_eps"),
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings"),
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2" or (kind == "glm4_moe" and config.switch("attention_bias")),
        qk_layernorm=kind in ("qwen3", "qwen3_moe", *LATENT) or (kind == "glm4_moe" and config.switch("use_qk_norm")),
        swiglu=True,
        bias_gelu_fusion=False,
        attention_dropout=_probability(config, "attention_dropout", 0.0),
        hidden_dropout=0.0,
        mtp_num_layers=config.size("num_nextn_predict_layers", 0) or None if kind in BIASED else None,
        **{"position_embedding_type": "rope", **_heads(config)},
        **experts(config, layers),
    )
    return dataclasses.replace(shape, **special(config, layers)) if kind == "gpt_oss" else shape


def _heads(config: ConfigValues) -> dict[str, Any]:
    """A shape's fields of attention's heads and of their rotary embedding."""
    heads, turns = config.needed("num_attention_heads"), rotary(config)
    if config.kind in LATENT:
        found = latents(config, heads)
        return {"num_query_groups": heads, "kv_channels": found["v_head_dim"], **found, **turns}
    groups = config.whole("num_key_value_heads", heads) or heads
    _divided("num_attention_heads", heads, "num_key_value_heads", groups)
    hidden = config.needed("hidden_size")
    channels = config.whole("head_dim") or _divided("hidden_size", hidden, "num_attention_heads", heads)
    turned = int(channels * turns["rotary_percent"])
    if turned % 2 or not turned:
        raise ConfigError(
            f"config.json gives heads of {turned} channels to be rotated, but rotary embeddings need an even number"
        )
    return {"num_query_groups": groups, "kv_channels": channels, **turns}


def _divided(name: str, value: int, by: str, parts: int) -> int:
    if value % parts:
        raise ConfigError(f"config.json has {name} {value}, which is not divisible by its {by} {parts}; correct it")
    return value // parts


def _probability(config: ConfigValues, name: str, default: float) -> float:
    value = config.number(name, default)
    if value >= 1.0:
        raise ConfigError(f"config.json has {name} {value}, but a dropout must be below 1; correct it")
    return value


def kind_of(shape: ModelShape) -> str:
    """The kind of Hugging Face model that has this shape; ConfigError when there is none."""
    if is_special(shape):
        return "gpt_oss"
    plain = shape.softmax_type == "vanilla" and shape.window_size is None and not shape.quick_geglu
    plain = plain and shape.activation_func_clamp_value is None and not shape.glu_linear_offset
    llama = plain and shape.swiglu and shape.normalization == "RMSNorm" and shape.position_embedding_type == "rope"
    if llama and not shape.add_bias_linear:
        kind = expert_kind(shape) if shape.num_experts is not None else _dense_kind(shape)
        if shape.mtp_num_layers and kind not in BIASED:
            kind = None
        if kind is not None and (shape.rotary_percent == 1.0 or kind in SHARES) and _biases_fit(shape, kind):
            return kind
    gpt = plain and not shape.gated and shape.normalization == "LayerNorm"
    gpt = gpt and shape.add_bias_linear and not shape.qk_layernorm
    learned = shape.position_embedding_type == "learned_absolute" and shape.num_experts is None
    usual = shape.num_query_groups == shape.num_attention_heads
    if gpt and learned and usual and shape.kv_channels * shape.num_attention_heads == shape.hidden_size:
        return "gpt2"
    raise ConfigError(
        f"a model with {shape.normalization}, {'SwiGLU' if shape.swiglu else 'GELU'}, "
        f"{shape.position_embedding_type} positions, {'biases' if shape.add_bias_linear else 'no biases'} and "
        f"{shape.num_experts or 'no'} experts has no equivalent among transformers' {', '.join(ARCHITECTURES)}"
    )


def _dense_kind(shape: ModelShape) -> str | None:
    if shape.multi_latent_attention or (shape.add_qkv_bias and shape.qk_layernorm):
        return None
    return "qwen2" if shape.add_qkv_bias else "qwen3" if shape.qk_layernorm else "llama"


def _biases_fit(shape: ModelShape, kind: str) -> bool:
    """Whether this kind has the biases and norms of queries and keys that a shape has."""
    norms = kind == "glm4_moe" or shape.qk_layernorm == (kind in ("qwen3", "qwen3_moe", *LATENT))
    return norms and (kind == "glm4_moe" or shape.add_qkv_bias == (kind == "qwen2"))


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
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": shape.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        **rotary_fields(shape),
        **(latent_fields(shape) if kind in LATENT else {"head_dim": shape.kv_channels}),
        **expert_fields(shape, kind),
    }
    if kind == "gpt_oss":
        found |= special_fields(shape)
    if kind == "glm4_moe":
        found |= {"attention_bias": shape.add_qkv_bias, "use_qk_norm": shape.qk_layernorm}
    if shape.mtp_num_layers and kind in BIASED:
        found["num_nextn_predict_layers"] = shape.mtp_num_layers
    if kind in ("mistral", "mixtral"):
        found["sliding_window"] = None
    return found
