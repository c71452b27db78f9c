"""Reads values of a Hugging Face ``config.json`` with their types and ranges checked.

A value that is missing gets the default of the model's class in transformers, where that is not the same as in the
file's other models: a config that leaves a value out means this one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError

LARGEST = 1 << 31
"""No size of a model comes near it; larger ones are refused before anything is computed from them."""
_LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v2": {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 1536,
        **_LATENTS,
    },
    "deepseek_v3": {
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        **_LATENTS,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "glm4_moe": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        "norm_topk_prob": True,
    },
}
"""Kind -> what transformers' class of this kind has where the file has nothing, if it differs from Llama's."""
SECOND_NAMES: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "glm4_moe": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
"""Kind -> (second name of a field -> the one that is read here)."""
_LLAMA: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "num_experts_per_tok": 2,
}


class ConfigValues:
    """The values of one ``config.json``; ConfigError, with name and value, for one that cannot be right."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self.config, self.kind = dict(config), kind
        for second, name in SECOND_NAMES.get(kind, {}).items():
            if second in config and config.get(name, config[second]) != config[second]:
                raise ConfigError(
                    f"config.json has {name} {shown(config[name])} and {second} {shown(config[second])}, which are one "
                    "field with two names; keep one"
                )
            if second in config:
                self.config[name] = config[second]
        self._defaults = {} if kind == "gpt2" else {**_LLAMA, **DEFAULTS[kind]}

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is in the file, or its default."""
        return self.config.get(name, self._defaults.get(name, default))

    def needed(self, name: str) -> int:
        """A whole number of at least 1 that has no default here."""
        if self.config.get(name) is None:
            raise ConfigError(f"config.json has no {name}, which a conversion needs; add it")
        return _whole(name, self.config[name])

    def whole(self, name: str, instead: int | None = None) -> int | None:
        """A whole number of at least 1; ``instead`` where the value is null."""
        value = self.get(name)
        return instead if value is None else _whole(name, value)

    def size(self, name: str, least: int = 1) -> int:
        """A whole number of at least ``least`` that has a default here."""
        return _whole(name, self.get(name), least)

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number of at least 0."""
        return number(name, self.get(name, default))

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json has {name} {value!r}, but it must be true or false; correct it")
        return value

    def check_tokens(self) -> None:
        """ConfigError for a special token id that cannot be one; ``eos_token_id`` may be a list of them."""
        rows = self.needed("vocab_size")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = self.config.get(name)
            ids = value if name == "eos_token_id" and isinstance(value, list) else [value]
            if not all(one is None or type(one) is int for one in ids):
                raise ConfigError(f"config.json has {name} {shown(value)}, which is not a token id; correct it")
        padding = self.config.get("pad_token_id")
        if padding is not None and not -rows <= padding < rows:
            raise ConfigError(
                f"config.json has pad_token_id {shown(padding)}, but the vocabulary has {rows} ids; correct it"
            )

    def refuse(self, **plain: Any) -> None:
        """ConfigError where a setting is there and has another value than the given one, its only convertible one."""
        for name, value in plain.items():
            if self.config.get(name, value) != value:
                raise ConfigError(
                    f"config.json has {name} {self.config[name]!r}, which is not converted; only {value!r} is"
                )


def _whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LARGEST:
        raise ConfigError(
            f"config.json has {name} {shown(value)}, but it must be a whole number from {least} to {LARGEST - 1}; "
            "correct it"
        )
    return value


def number(name: str, value: Any) -> float:
    """``value`` as a float; ConfigError, with its name, where it is not a finite number of at least 0."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    if not fine or math.isnan(value) or value < 0:
        raise ConfigError(f"config.json has {name} {shown(value)}, but it must be a number of at least 0; correct it")
    return float(value)


def shown(value: Any) -> str:
    """A value as a message shows it: on one line and not too long."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "of more than 40 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError where there is none."""
    try:
        found = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
        raise ConfigError(f"{path} cannot be read ({reason}); give a model's directory") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {shown(found)}, not an object of names and values; fetch the model again")
    return found
