"""Rotary embeddings: the fields of ``config.json``, from old or new versions of transformers, and those of a shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spare_megatron.checkpoint.convert.hf_values import LARGEST, ConfigValues, number, shown
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's --use-rope-scaling."""
YARN = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": None,
    "truncate": True,
}
"""What megatron-core's yarn in multi-latent attention has, and no flag changes."""
LATENT = ("deepseek_v2", "deepseek_v3")
"""The kinds with multi-latent attention."""
TYPES = {"llama": ("default", "linear", "llama3"), **dict.fromkeys((*LATENT, "gpt_oss"), ("default", "yarn"))}
"""Kind of model, or Llama's for all others -> values of rope_type that are converted."""
GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What a config of gpt_oss means that says nothing."""
SHARES = {"glm4_moe": 0.5}
"""The kinds that may rotate a part of a head's channels, with the share that a config means which does not say it."""


def rotary(config: ConfigValues) -> dict[str, Any]:
    """A shape's fields of base and scaling of the rotary embedding."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json has {name} {shown(value)}, but it must be an object or null; correct it")
    if new and old and any(_scaling_of(new).get(name) != _scaling_of(old).get(name) for name in (*new, *old)):
        raise ConfigError(
            f"config.json has rope_parameters {shown(new)} and rope_scaling {shown(old)}, which differ; keep one"
        )
    new, scaling = new or {}, new or old or (GPT_OSS if config.kind == "gpt_oss" else {})
    base = number("rope_theta", new.get("rope_theta", scaling.get("rope_theta", config.get("rope_theta"))))
    if base != int(base) or base < 1:
        raise ConfigError(f"config.json has rope_theta {base}, but --rotary-base takes whole numbers from 1 on")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": int(base)}
    allowed = TYPES.get(config.kind, TYPES["llama"])
    if kind not in allowed:
        raise ConfigError(
            f"config.json has rope_type {shown(kind)}, which is not converted; {' and '.join(allowed)} are"
        )
    if config.get("original_max_position_embeddings") is not None:  # counts more than the one of the scaling
        scaling = {**scaling, "original_max_position_embeddings": config.get("original_max_position_embeddings")}
    found["rotary_percent"] = _share(config, scaling)
    if kind == "llama3":
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
    elif kind == "yarn":
        found |= _yarn(scaling) if config.kind in LATENT else _usual_yarn(scaling)
    return found


def _share(config: ConfigValues, scaling: Mapping[str, Any]) -> float:
    """The share of a head's channels that is rotated."""
    usual = SHARES.get(config.kind, 1.0)
    reported = [one["partial_rotary_factor"] for one in (scaling, config.config) if "partial_rotary_factor" in one]
    if any(one != reported[0] for one in reported):
        raise ConfigError(
            f"config.json has partial_rotary_factor {shown(reported[0])} and {shown(reported[1])}, which differ; keep "
            f"one"
        )
    share = number("partial_rotary_factor", reported[0] if reported else usual)
    if share != 1.0 and (config.kind not in SHARES or share > 1.0):
        raise ConfigError(f"config.json has partial_rotary_factor {share}, which is not converted; only {usual} is")
    return share


def _yarn(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Of multi-latent attention, the only one whose yarn Megatron's flags describe."""
    for name, fixed in YARN.items():
        if scaling.get(name, fixed) != fixed:
            raise ConfigError(f"config.json has {name} {shown(scaling[name])}, but Megatron's flags have only {fixed}")
    if scaling.get("original_max_position_embeddings") != YARN["original_max_position_embeddings"]:
        raise ConfigError("config.json has a yarn scaling without original_max_position_embeddings; add it")
    scale, over_all = (number(name, scaling.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if over_all and not scale:
        raise ConfigError(
            f"config.json has mscale_all_dim {over_all} without mscale, which is not converted; give both"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": _factor(scaling),
        "mscale": scale if over_all else 1.0,
        "mscale_all_dim": over_all,
    }


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


def _usual_yarn(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Of usual attention."""
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if scaling.get(name) is not None:
            raise ConfigError(f"config.json has {name} {shown(scaling[name])}, which is not converted; leave it out")
    known, truncate = scaling.get("original_max_position_embeddings"), scaling.get("truncate", True)
    if type(known) is not int or not 1 <= known < LARGEST or not isinstance(truncate, bool):
        raise ConfigError(
            f"config.json has a yarn scaling with original_max_position_embeddings {shown(known)} and truncate "
            f"{shown(truncate)}, but the one must be a whole number and the other true or false; correct it"
        )
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": _factor(scaling),
        "yarn_original_max_position_embeddings": known,
        "yarn_beta_fast": number("beta_fast", scaling.get("beta_fast") or YARN["beta_fast"]),
        "yarn_beta_slow": number("beta_slow", scaling.get("beta_slow") or YARN["beta_slow"]),
        "yarn_correction_range_round_to_int": truncate,
    }


def rotary_fields(shape: ModelShape) -> dict[str, Any]:
    """The fields of ``config.json`` for old and new versions of transformers."""
    base, scaling = float(shape.rotary_base), _scaling(shape)
    found: dict[str, Any] = {"rope_theta": base}
    if scaling:
        found["rope_scaling"] = scaling
    found["rope_parameters"] = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    if shape.rotary_percent != 1.0:
        found["partial_rotary_factor"] = found["rope_parameters"]["partial_rotary_factor"] = shape.rotary_percent
    return found


def _scaling(shape: ModelShape) -> dict[str, Any]:
    if shape.use_rope_scaling:
        return {"rope_type": "llama3", "factor": shape.rope_scaling_factor, **LLAMA3_SCALING}
    if shape.rotary_seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": float(shape.rotary_seq_len_interpolation_factor)}
    if shape.position_embedding_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": shape.rotary_scaling_factor,
            "original_max_position_embeddings": shape.yarn_original_max_position_embeddings,
            "beta_fast": shape.yarn_beta_fast,
            "beta_slow": shape.yarn_beta_slow,
            "truncate": shape.yarn_correction_range_round_to_int,
        }
    if shape.rope_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": shape.rotary_scaling_factor,
            "original_max_position_embeddings": YARN["original_max_position_embeddings"],
            "mscale": shape.mscale,
            "mscale_all_dim": shape.mscale_all_dim,
        }
    return {}
