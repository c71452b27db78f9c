"""Experts: the fields of ``config.json`` that say which layers have them and how tokens are routed, and those of a
shape. A routing that megatron-core does not have is refused by its field."""

from __future__ import annotations

from typing import Any

from spare_megatron.checkpoint.convert.hf_values import ConfigValues, shown
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

COUNTS = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), "num_local_experts"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), "n_routed_experts"),
}
"""Kind of model with experts -> name of their number."""
BIASED = ("deepseek_v3", "glm4_moe")
"""The kinds that route by sigmoids with a bias for each expert, which no gradient changes."""
SHARED = ("deepseek_v2", *BIASED)
"""The kinds with experts for all tokens, and with dense layers first."""


def experts(config: ConfigValues, layers: int) -> dict[str, Any]:
    """A shape's fields of experts; none for a model without them."""
    kind = config.kind
    pattern = _pattern(config, layers) if kind in COUNTS else ()
    if not any(pattern):
        return {}
    count, chosen = config.size(COUNTS[kind]), config.size("num_experts_per_tok")
    if chosen > count:
        raise ConfigError(f"config.json has num_experts_per_tok {chosen}, but only {count} experts; correct it")
    found: dict[str, Any] = {
        "num_experts": count,
        "moe_router_topk": chosen,
        "moe_layer_freq": None if all(pattern) else pattern,
    }
    normal = kind in ("mixtral", "gpt_oss") or (kind == "qwen3_moe" and config.switch("norm_topk_prob"))
    if normal and chosen == 1:
        raise ConfigError(
            "config.json has num_experts_per_tok 1 with weights that add up to 1, so every expert has the weight 1 and "
            "the router learns nothing; megatron-core has no such router"
        )
    if kind in ("mixtral", "qwen3_moe", "gpt_oss"):
        found["moe_aux_loss_coeff"] = config.number("router_aux_loss_coef")
        found["moe_router_pre_softmax"] = not normal
    if kind in ("mixtral", "gpt_oss"):
        return found
    wide = config.size("moe_intermediate_size")
    found["moe_ffn_hidden_size"] = None if wide == config.needed("intermediate_size") else wide
    if kind == "qwen3_moe":
        return found
    found["moe_shared_expert_intermediate_size"] = wide * config.size("n_shared_experts")
    scale = config.number("routed_scaling_factor")
    if not scale:
        raise ConfigError("config.json has routed_scaling_factor 0.0, with which experts do nothing; correct it")
    found["moe_router_topk_scaling_factor"] = None if scale == 1.0 else scale
    return {**found, **(_sigmoids(config, count, chosen) if kind in BIASED else _softmax(config, count, chosen))}


def _pattern(config: ConfigValues, layers: int) -> tuple[int, ...]:
    """For each layer 1 if it has experts."""
    if config.kind in SHARED:
        dense = config.size("first_k_dense_replace", 0)
        return tuple(int(layer >= dense) for layer in range(layers))
    if config.kind != "qwen3_moe":
        return (1,) * layers
    every, without = config.whole("decoder_sparse_step", 1) or 1, config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(one) is int for one in without):
        raise ConfigError(
            f"config.json has mlp_only_layers {shown(without)}, but it must be a list of numbers of layers; correct it"
        )
    return tuple(int(layer not in without and (layer + 1) % every == 0) for layer in range(layers))


def _sigmoids(config: ConfigValues, count: int, chosen: int) -> dict[str, Any]:
    config.refuse(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    normal = config.switch("norm_topk_prob")
    if normal != (chosen > 1):
        raise ConfigError(
            f"config.json has norm_topk_prob {normal} and num_experts_per_tok {chosen}, which is not converted; "
            "megatron-core divides by the sum of the chosen scores if there are several"
        )
    groups = _groups(config, count, chosen)
    if groups and chosen // groups["moe_router_group_topk"] != 2:
        raise ConfigError(
            f"config.json has topk_group {config.get('topk_group')} and num_experts_per_tok {chosen}, which is not "
            "converted; megatron-core ranks groups by as many experts as each chosen group gives, transformers by two"
        )
    return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, **groups}


def _softmax(config: ConfigValues, count: int, chosen: int) -> dict[str, Any]:
    config.refuse(scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    method = config.get("topk_method", "greedy")
    if method == "greedy":
        return {"moe_router_pre_softmax": True}
    if method != "group_limited_greedy":
        raise ConfigError(
            f"config.json has topk_method {shown(method)}, which is not converted; greedy and group_limited_greedy are"
        )
    groups = _groups(config, count, chosen)
    if groups and chosen // groups["moe_router_group_topk"] != 1:
        raise ConfigError(
            f"config.json has topk_method {method} with topk_group {config.get('topk_group')} and num_experts_per_tok "
            f"{chosen}, which is not converted; megatron-core ranks groups by as many experts as each chosen group "
            "gives, transformers by one"
        )
    return {"moe_router_pre_softmax": True, **groups}


def _groups(config: ConfigValues, count: int, chosen: int) -> dict[str, int]:
    """The groups of which a token's experts come; none where that excludes no expert."""
    groups, kept = config.size("n_group"), config.size("topk_group")
    if count % groups or kept > groups or (groups > 1 and count // groups < 2):
        raise ConfigError(
            f"config.json has {count} experts, n_group {groups} and topk_group {kept}, which do not fit; correct it"
        )
    if kept == groups:
        return {}
    if chosen > kept * (count // groups):
        raise ConfigError(
            f"config.json has num_experts_per_tok {chosen}, but topk_group {kept} leaves only "
            f"{kept * (count // groups)} experts; correct it"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


def expert_fields(shape: ModelShape, kind: str) -> dict[str, Any]:
    """The fields of ``config.json``."""
    if kind not in COUNTS:
        return {}
    name = "num_experts" if kind == "qwen3_moe" else COUNTS[kind]
    found: dict[str, Any] = {name: shape.num_experts, "num_experts_per_tok": shape.moe_router_topk}
    if kind in ("mixtral", "qwen3_moe", "gpt_oss"):
        found["router_aux_loss_coef"] = shape.moe_aux_loss_coeff
    if kind in ("mixtral", "gpt_oss"):
        return found
    wide = shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    found["moe_intermediate_size"] = wide
    if kind == "qwen3_moe":
        dense = [layer for layer in range(shape.num_layers) if not shape.has_experts(layer)]
        normal = not shape.moe_router_pre_softmax
        return {**found, "norm_topk_prob": normal, "mlp_only_layers": dense, "decoder_sparse_step": 1}
    found |= {
        "n_shared_experts": (shape.moe_shared_expert_intermediate_size or 0) // wide,
        "first_k_dense_replace": dense_first(shape),
        "routed_scaling_factor": shape.moe_router_topk_scaling_factor or 1.0,
        "n_group": shape.moe_router_num_groups or 1,
        "topk_group": shape.moe_router_group_topk or 1,
        "norm_topk_prob": kind in BIASED and shape.moe_router_topk > 1,
    }
    if kind == "deepseek_v2":
        found["topk_method"] = "group_limited_greedy" if shape.moe_router_num_groups else "greedy"
    return found


def dense_first(shape: ModelShape) -> int:
    """The number of layers before the first one with experts."""
    return next((layer for layer in range(shape.num_layers) if shape.has_experts(layer)), shape.num_layers)


def expert_kind(shape: ModelShape) -> str | None:
    """The kind of Hugging Face model whose feed-forward parts have this shape; None where there is none."""
    sigmoid, shared = shape.moe_router_score_function == "sigmoid", bool(shape.moe_shared_expert_intermediate_size)
    if not shared:
        usual = shape.moe_ffn_hidden_size is None and not shape.moe_router_pre_softmax and shape.moe_layer_freq is None
        plain = not sigmoid and shape.moe_router_num_groups is None and shape.moe_router_topk_scaling_factor is None
        if not plain or shape.moe_router_enable_expert_bias or shape.multi_latent_attention:
            return None
        return "qwen3_moe" if shape.qk_layernorm else "mixtral" if usual else None
    first = all(shape.has_experts(layer) for layer in range(dense_first(shape), shape.num_layers))
    if not first or sigmoid != shape.moe_router_enable_expert_bias:
        return None
    if (shape.moe_shared_expert_intermediate_size or 0) % (shape.moe_ffn_hidden_size or shape.ffn_hidden_size):
        return None
    if not shape.multi_latent_attention:
        return "glm4_moe" if sigmoid else None
    return "deepseek_v3" if sigmoid else "deepseek_v2" if shape.moe_router_pre_softmax else None
