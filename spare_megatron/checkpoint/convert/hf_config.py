"""Translates between ``config.json`` of Hugging Face models and :class:`~.model.ModelShape`, in both directions.

Kinds: ``gpt2``, ``llama``, ``mistral`` (a Llama without a sliding window), ``mixtral``, ``qwen2``, ``qwen3``. A config
with a setting that has no equivalent in megatron-core is refused, with the setting's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spare_megatron.checkpoint.convert.hf_values import ConfigValues, number, shown
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
        raise ConfigError(f"config.json has model_type {shown(kind)}, which is not converted; {', '.join(KINDS)} are")
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ConfigError(
            f"config.json has a quantization_config ({shown(method)}), but only whole weights are converted; "
            "fetch the model in bf16, fp16 or fp32"
        )
    values = ConfigValues(config, str(kind))
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
    config.refuse(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
    config.refuse(partial_rotary_factor=1.0)
    kind, limit = config.kind, config.needed("max_position_embeddings")
    window = config.whole("sliding_window")
    if kind in ("mistral", "mixtral") and window is not None and window < limit:
        raise ConfigError(f"config.json has sliding_window {window}, which is not converted; full attention is")
    layers = config.needed("num_hidden_layers")
    types = config.get("layer_types")
    full = isinstance(types, list) and len(types) == layers and all(one == "full_attention" for one in types)
    if types is not None and not full:
        raise ConfigError(
            f"config.json has layer_types {shown(types)}, which is not converted; full attention in each of the "
            f"{layers} layers is"
        )
    hidden, heads = config.needed("hidden_size"), config.needed("num_attention_heads")
    groups = config.whole("num_key_value_heads", heads) or heads
    _divided("num_attention_heads", heads, "num_key_value_heads", groups)
    channels = config.whole("head_dim") or _divided("hidden_size", hidden, "num_attention_heads", heads)
    if channels % 2:
        raise ConfigError(f"config.json gives heads of {channels} channels, but rotary embeddings need an even number")
    experts = config.whole("num_local_experts") if kind == "mixtral" else None
    chosen = (config.whole("num_experts_per_tok") or 2) if experts else 2
    if experts and chosen > experts:
        raise ConfigError(f"config.json has num_experts_per_tok {chosen}, but only {experts} experts; correct it")
    vocabulary = config.needed("vocab_size")
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        ffn_hidden_size=config.needed("intermediate_size"),
        max_position_embeddings=limit,
        padded_vocab_size=vocabulary,
        vocab_size=vocabulary,
        normalization="RMSNorm",
        norm_epsilon=config.number("rms_norm_eps"),
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings"),
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind == "qwen3",
        swiglu=True,
        bias_gelu_fusion=False,
        num_experts=experts,
        moe_router_topk=chosen,
        moe_aux_loss_coeff=config.number("router_aux_loss_coef") if experts else 0.0,
        attention_dropout=_probability(config, "attention_dropout", 0.0),
        hidden_dropout=0.0,
        **_rotary(config),
    )


def _divided(name: str, value: int, by: str, parts: int) -> int:
    if value % parts:
        raise ConfigError(f"config.json has {name} {value}, which is not divisible by its {by} {parts}; correct it")
    return value // parts


def _probability(config: ConfigValues, name: str, default: float) -> float:
    value = config.number(name, default)
    if value >= 1.0:
        raise ConfigError(f"config.json has {name} {value}, but a dropout must be below 1; correct it")
    return value


def _rotary(config: ConfigValues) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, from the names of old or new versions of transformers."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json has {name} {shown(value)}, but it must be an object or null; correct it")
    if new and old and any(_scaling_of(new).get(name) != _scaling_of(old).get(name) for name in (*new, *old)):
        raise ConfigError(
            f"config.json has rope_parameters {shown(new)} and rope_scaling {shown(old)}, which differ; keep one"
        )
    new, scaling = new or {}, new or old or {}
    base = number("rope_theta", new.get("rope_theta", scaling.get("rope_theta", config.get("rope_theta"))))
    if base != int(base) or base < 1:
        raise ConfigError(f"config.json has rope_theta {base}, but --rotary-base takes whole numbers from 1 on")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": int(base)}
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json has partial_rotary_factor {shown(scaling['partial_rotary_factor'])}, which is not converted; "
            "only 1.0 is"
        )
    if kind == "llama3":
        if config.get("original_max_position_embeddings") is not None:  # counts more than the one of the scaling
            scaling = {**scaling, "original_max_position_embeddings": config.get("original_max_position_embeddings")}
        for name, fixed in LLAMA3_SCALING.items():
            if name not in scaling or scaling[name] != fixed:
                raise ConfigError(
                    f"config.json has {name} {shown(scaling.get(name))}, but megatron-core's is always {fixed}"
                )
        found |= {"use_rope_scaling": True, "rope_scaling_factor": _factor(scaling)}
    elif kind == "linear":
        factor = _factor(scaling)
        if factor != int(factor):
            raise ConfigError(
                f"config.json has a linear rope factor of {factor}, but --rotary-seq-len-interpolation-factor takes "
                "whole numbers"
            )
        found["rotary_seq_len_interpolation_factor"] = factor
    elif kind != "default":
        raise ConfigError(
            f"config.json has rope_type {shown(kind)}, which is not converted; default, linear and llama3 are"
        )
    return found


def _scaling_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters without the base, which has another place in old files, and with the type's new name."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    rest = {name: value for name, value in parameters.items() if name not in ("rope_theta", "type")}
    return {**rest, "rope_type": kind}


def _factor(scaling: Mapping[str, Any]) -> float:
    if "factor" not in scaling:
        raise ConfigError("config.json has a rope scaling without its factor, which a conversion needs; add it")
    value = number("factor", scaling["factor"])
    if value < 1:
        raise ConfigError(f"config.json has a rope scaling with factor {value}, but it must be at least 1; correct it")
    return value


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
        }
    if kind in ("mistral", "mixtral"):
        found["sliding_window"] = None
    return found


def _scaling(shape: ModelShape) -> dict[str, Any]:
    if shape.use_rope_scaling:
        return {"rope_type": "llama3", "factor": shape.rope_scaling_factor, **LLAMA3_SCALING}
    if shape.rotary_seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": float(shape.rotary_seq_len_interpolation_factor)}
    return {}
