"""The ``config.json`` of a model that goes back to Hugging Face: the one that it came with, with what training changed.

What training changed is what differs between the configs that are made of both shapes. So everything that the shapes
do not know (special token ids, initializer range, fields of later versions) stays as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spare_megatron.checkpoint.convert.hf_config import config_of_shape, kind_of, shape_of_config
from spare_megatron.checkpoint.convert.hf_values import read_json
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

STRUCTURE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("normalization", "position_embedding_type", "untie_embeddings_and_output_weights", "add_bias_linear"),
    *("add_qkv_bias", "qk_layernorm", "swiglu", "num_experts", "expert_layers", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias", "multi_latent_attention", "q_lora_rank"),
    *("quick_geglu", "activation_func_clamp_value", "glu_linear_offset", "softmax_type", "windows"),
    *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
"""What training cannot change: a config that differs here is another model's."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_DTYPES = ("torch_dtype", "dtype")


def travelled_config(folder: Path) -> tuple[dict[str, Any], ModelShape] | None:
    """The ``config.json`` in a directory and the shape that it describes; None where there is none that can be read."""
    if not (folder / "config.json").is_file():
        return None
    try:
        config = read_json(folder / "config.json")
        return config, shape_of_config(config)
    except ConfigError:
        return None


def differs(came: ModelShape, shape: ModelShape) -> str:
    """What shows that two shapes are not those of one model before and after training; empty if nothing does."""
    for name in STRUCTURE:
        if getattr(came, name) != getattr(shape, name):
            return f"it has {name} {getattr(came, name)}, the weights have {getattr(shape, name)}"
    return ""


def returned_config(
    folder: Path, shape: ModelShape, kind: str | None, dtype: torch.dtype
) -> tuple[dict[str, Any], list[str]]:
    """The config to write, and sentences for the user; ``folder`` has what the model came with. ``kind`` None keeps
    the model's own kind. ConfigError where the weights fit no kind, or not the one that was asked for."""
    found = travelled_config(folder)
    reason = differs(found[1], shape) if found else ""
    if found is None or reason:
        made = config_of_shape(shape, _fitting(shape, kind), dtype)
        if not reason:
            return made, []
        return made, [f"config.json is new, for the one in {folder} is of another model: {reason}"]
    config, came = found
    own = str(config["model_type"])
    if kind is not None and kind != own:
        made = config_of_shape(shape, _fitting(shape, kind), dtype)
        return made | {name: config[name] for name in _TOKENS if name in config}, []
    if shape.position_embedding_type != "learned_absolute":  # a length that training used; the model was made for more
        longest = max(shape.max_position_embeddings, came.max_position_embeddings)
        shape = dataclasses.replace(shape, max_position_embeddings=longest)
    if not shape.moe_aux_loss_coeff:  # not a part of the model: a job that was not given the flag has 0
        shape = dataclasses.replace(shape, moe_aux_loss_coeff=came.moe_aux_loss_coeff)
    return _changed(config, came, shape, own, dtype), []


def _fitting(shape: ModelShape, kind: str | None) -> str:
    fits = kind_of(shape)
    if kind in (None, fits) or (kind, fits) == ("mistral", "llama"):
        return kind or fits
    raise ConfigError(
        f"--hf-model {kind} does not fit these weights, which are of a {fits}; give {fits} or leave it out"
    )


def _changed(
    config: Mapping[str, Any], came: ModelShape, shape: ModelShape, kind: str, dtype: torch.dtype
) -> dict[str, Any]:
    """``config`` with the values that differ between the two shapes."""
    before, after = (config_of_shape(one, kind, dtype) for one in (came, shape))
    result = dict(config)
    names = [name for name in after if after[name] != before.get(name)]
    if any(name in _ROPE for name in names):
        names = [*names, *(name for name in _ROPE if name in after)]
        for name in _ROPE:
            result.pop(name, None)
    result |= {name: after[name] for name in names}
    word = str(dtype).removeprefix("torch.")
    known = [name for name in _DTYPES if config.get(name) is not None]
    if any(config[name] != word for name in known):
        result |= dict.fromkeys(known, word)
    window = config.get("sliding_window")
    if kind in ("mistral", "mixtral") and window is not None and window < result["max_position_embeddings"]:
        result["sliding_window"] = None  # it was trained with full attention
    return result
