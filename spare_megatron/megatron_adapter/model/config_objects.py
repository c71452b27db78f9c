"""Replaces words in settings by the objects of torch and megatron-core that they name.

Settings have plain values, so that they can be hashed and stored. The few of them that name functions and enum members
are turned here into what megatron-core's dataclasses take.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from spare_megatron.megatron_adapter.shims import cuda_available


def with_objects(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TransformerConfig with objects in place of words; other values stay as they are."""
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
