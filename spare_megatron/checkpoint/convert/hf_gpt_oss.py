"""Models of kind gpt_oss: learned places of no token in attention's softmax, windows in some layers, biases everywhere,
and a clamped activation of experts. What differs from a Llama, from ``config.json`` and for it."""

from __future__ import annotations

from typing import Any

from spare_megatron.checkpoint.convert.hf_values import ConfigValues, shown
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

ALPHA, OFFSET = 1.702, 1.0
"""Of the gate x * sigmoid(ALPHA * x) * (input + OFFSET) that megatron-core's --quick-geglu computes."""
FULL, WINDOW = "full_attention", "sliding_attention"


def special(config: ConfigValues, layers: int) -> dict[str, Any]:
    """A shape's fields that differ from a Llama's."""
    config.refuse(swiglu_alpha=ALPHA, attention_bias=True)
    limit = config.number("swiglu_limit")
    if not limit:
        raise ConfigError("config.json has swiglu_limit 0, with which experts do nothing; correct it")
    types = config.get("layer_types") or [FULL if layer % 2 else WINDOW for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(one not in (FULL, WINDOW) for one in types):
        raise ConfigError(
            f"config.json has layer_types {shown(types)}, which is not converted; {FULL} or {WINDOW} for each of the "
            f"{layers} layers is"
        )
    found: dict[str, Any] = {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": OFFSET,
        "activation_func_clamp_value": limit,
        "softmax_type": "learnable",
    }
    if WINDOW in types:
        found["window_size"] = (config.size("sliding_window") - 1, 0)
        found["window_attn_skip_freq"] = tuple(int(one == WINDOW) for one in types)
    return found


def special_fields(shape: ModelShape) -> dict[str, Any]:
    """The fields of ``config.json``."""
    found: dict[str, Any] = {
        "attention_bias": True,
        "swiglu_limit": shape.activation_func_clamp_value,
        "layer_types": [FULL if window is None else WINDOW for window in shape.windows],
    }
    return found | ({"sliding_window": shape.window_size[0] + 1} if shape.window_size else {})


def is_special(shape: ModelShape) -> bool:
    """Whether a shape is one of this kind."""
    activation = shape.quick_geglu and shape.glu_linear_offset == OFFSET and shape.activation_func_clamp_value
    usual_experts = shape.num_experts is not None and shape.moe_layer_freq is None and not shape.moe_router_pre_softmax
    plain = shape.moe_router_score_function == "softmax" and not shape.moe_shared_expert_intermediate_size
    biased = shape.add_bias_linear and not shape.qk_layernorm and not shape.multi_latent_attention
    return bool(
        activation and usual_experts and plain and biased
        and shape.softmax_type == "learnable" and shape.normalization == "RMSNorm" and not shape.mtp_num_layers
        and shape.position_embedding_type in ("rope", "yarn") and shape.rotary_percent == 1.0
        and (shape.window_size is None or shape.window_size[1] == 0)
    )  # fmt: skip
