"""Translates between :class:`~.model.ModelShape` and Megatron's ``args`` or flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from spare_megatron.checkpoint.convert.hf_values import DEFAULTS
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "squared_relu": (False, None),
    "moe_shared_expert_gate": (False, None),
    "attention_output_gate": (False, None),
    "is_hybrid_model": (False, None),
    "moe_latent_size": (None, 0),
    "softmax_type": ("vanilla", "learnable", None),
}
"""Name in Megatron's args -> the values that can be converted: others stand for tensors that are not known here."""
NOT_IN_TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    "layernorm_zero_centered_gamma": (False, None),
    "apply_layernorm_1p": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "rotary_interleaved": (False, None),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False, None),
    "moe_apply_probs_on_input": (False, None),
}
"""Name in Megatron's args -> the values that the converted kinds of transformers' models have."""
OF_EXPERTS = (
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_pre_softmax"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_scaling_factor"),
)
OF_YARN = ("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow")
OF_LATENTS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim"),
)


def shape_of_args(args: Mapping[str, Any], where: str) -> ModelShape:
    """The model that Megatron's ``args`` describe. ConfigError, which names ``where``, if it cannot be converted."""
    _refuse(args, UNSUPPORTED, where, f"models without it are: those of {', '.join(DEFAULTS)}")
    heads = _needed(args, "num_attention_heads", where)
    known = {field.name: args[field.name] for field in dataclasses.fields(ModelShape) if field.name in args}
    known["vocab_size"] = vocabulary_ids(args)
    known["num_query_groups"] = args["num_query_groups"] if args.get("group_query_attention") else heads
    known["kv_channels"] = args.get("kv_channels") or _needed(args, "hidden_size", where) // heads
    known["norm_epsilon"] = args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5))
    known["add_qkv_bias"] = bool(args.get("add_qkv_bias") or args.get("add_bias_linear", True))
    known["softmax_type"] = args.get("softmax_type") or "vanilla"
    known["window_size"] = tuple(args["window_size"]) if args.get("window_size") else None
    known["window_attn_skip_freq"] = _layers_with_window(args)
    known["mtp_num_layers"] = args.get("mtp_num_layers") or None
    known["moe_layer_freq"] = _layers_of_experts(args)
    if not known.get("num_experts"):
        known = {name: value for name, value in known.items() if not name.startswith("moe_")}
    elif known.get("moe_ffn_hidden_size") == known.get("ffn_hidden_size"):
        known["moe_ffn_hidden_size"] = None
    if not known.get("multi_latent_attention"):
        yarn = known.get("position_embedding_type") == "yarn"
        for name in (*OF_LATENTS, "multi_latent_attention"):
            if not yarn or name != "rotary_scaling_factor":
                known.pop(name, None)
    coefficient = known.get("moe_aux_loss_coeff")
    known["moe_aux_loss_coeff"] = coefficient if isinstance(coefficient, (int, float)) else 0.0
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings", "padded_vocab_size"):
        _needed(known, name, where)
    return ModelShape(**known)


def _layers_of_experts(args: Mapping[str, Any]) -> tuple[int, ...] | None:
    every = args.get("moe_layer_freq")
    if isinstance(every, list | tuple):
        return tuple(every)
    return None if every in (None, 1) else tuple(int(layer % every == 0) for layer in range(args["num_layers"]))


def _layers_with_window(args: Mapping[str, Any]) -> tuple[int, ...] | None:
    every = args.get("window_attn_skip_freq")
    if isinstance(every, list | tuple):
        return tuple(every)
    return None if not every else tuple(int((layer + 1) % every != 0) for layer in range(args["num_layers"]))


def refuse_unknown_to_transformers(args: Mapping[str, Any], where: str) -> None:
    """ConfigError where a model's ``args`` say that it computes something that no config of transformers says."""
    _refuse(args, NOT_IN_TRANSFORMERS, where, "transformers has no such model")


def _refuse(args: Mapping[str, Any], plain: Mapping[str, tuple[Any, ...]], where: str, why: str) -> None:
    for name, values in plain.items():
        if args.get(name, values[0]) not in values:
            raise ConfigError(f"{where} is of a model with {name} {args[name]}, which is not converted; {why}")


IDS = "spare_vocabulary_ids"
"""The name, in args, of the number of rows of the vocabulary that the job's tokenizer can ask for."""


def vocabulary_ids(args: Mapping[str, Any]) -> int | None:
    """Number of ids of the tokenizer with which a checkpoint was trained; None where its args do not say it.

    Megatron's own args have only ``vocab_size``, the flag, to which NullTokenizer adds an end token.
    """
    reported, padded = args.get(IDS), args.get("padded_vocab_size")
    if reported is None and args.get("vocab_size") is not None:
        reported = args["vocab_size"] + (args.get("tokenizer_type") == "NullTokenizer")
    return reported if reported is None or padded is None else min(reported, padded)


def _needed(args: Mapping[str, Any], name: str, where: str) -> Any:
    if args.get(name) is None:
        raise ConfigError(f"the args of {where} have no {name}; convert a checkpoint that was saved with all its args")
    return args[name]


def args_of_shape(shape: ModelShape, dtype: torch.dtype, tensor: int, pipeline: int, expert: int) -> dict[str, Any]:
    """Megatron's ``args`` of a model and its parallel degrees, as Megatron's tools and ``--use-checkpoint-args`` read
    them."""
    values = dataclasses.asdict(shape)
    values.update(
        group_query_attention=shape.num_query_groups != shape.num_attention_heads,
        layernorm_epsilon=shape.norm_epsilon,
        moe_ffn_hidden_size=(shape.moe_ffn_hidden_size or shape.ffn_hidden_size) if shape.num_experts else None,
        window_attn_skip_freq=list(shape.window_attn_skip_freq) if shape.window_attn_skip_freq else None,
        use_rotary_position_embeddings=shape.position_embedding_type == "rope",
        add_position_embedding=shape.position_embedding_type != "rope",
        moe_layer_freq=list(shape.moe_layer_freq) if shape.moe_layer_freq else 1,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        encoder_num_layers=shape.num_layers,
        seq_length=shape.max_position_embeddings,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
    return values


def _given(shape: ModelShape, names: tuple[str, ...]) -> list[str]:
    """The flags of those fields that have a value."""
    words = []
    for name in names:
        value = getattr(shape, name)
        if value is True:
            words.append(flag_name(name))
        elif value not in (None, False):
            words += [flag_name(name), str(value)]
    return words


def flags_of_shape(shape: ModelShape, dtype: torch.dtype) -> list[str]:
    """The flags of ``pretrain_gpt.py`` that describe this model."""
    words = [
        *("--num-layers", str(shape.num_layers), "--hidden-size", str(shape.hidden_size)),
        *("--num-attention-heads", str(shape.num_attention_heads), "--kv-channels", str(shape.kv_channels)),
        *("--ffn-hidden-size", str(shape.ffn_hidden_size)),
        *("--max-position-embeddings", str(shape.max_position_embeddings)),
        *("--normalization", shape.normalization, "--norm-epsilon", repr(shape.norm_epsilon)),
        *("--position-embedding-type", shape.position_embedding_type),
        *("--attention-dropout", repr(shape.attention_dropout), "--hidden-dropout", repr(shape.hidden_dropout)),
    ]
    if shape.num_query_groups != shape.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(shape.num_query_groups)]
    if shape.position_embedding_type in ("rope", "yarn"):
        words += ["--rotary-base", str(shape.rotary_base), "--rotary-percent", repr(shape.rotary_percent)]
        if shape.rotary_seq_len_interpolation_factor:
            words += ["--rotary-seq-len-interpolation-factor", f"{shape.rotary_seq_len_interpolation_factor:g}"]
        if shape.use_rope_scaling:
            words += ["--use-rope-scaling", "--rope-scaling-factor", repr(shape.rope_scaling_factor)]
    if shape.num_experts is not None:
        words += ["--num-experts", str(shape.num_experts), "--moe-router-topk", str(shape.moe_router_topk)]
        words += ["--moe-aux-loss-coeff", repr(shape.moe_aux_loss_coeff), "--moe-token-dispatcher-type", "alltoall"]
        words += _given(shape, OF_EXPERTS)
        if shape.moe_layer_freq:
            words += ["--moe-layer-freq", str(list(shape.moe_layer_freq)).replace(" ", "")]
    if shape.multi_latent_attention:
        words += ["--multi-latent-attention", *_given(shape, OF_LATENTS)]
    if shape.position_embedding_type == "yarn":
        words += _given(shape, OF_YARN)
        words += [] if shape.yarn_correction_range_round_to_int else ["--no-yarn-correction-range-round-to-int"]
    if shape.window_size:
        words += ["--window-size", "{},{}".format(*shape.window_size)]
        if shape.window_attn_skip_freq:
            words += ["--window-attn-skip-freq", str(list(shape.window_attn_skip_freq)).replace(" ", "")]
    words += _given(shape, ("mtp_num_layers", "glu_linear_offset", "activation_func_clamp_value"))
    words += ["--softmax-type", shape.softmax_type] if shape.softmax_type != "vanilla" else []
    switches = {
        "--untie-embeddings-and-output-weights": shape.untie_embeddings_and_output_weights,
        "--disable-bias-linear": not shape.add_bias_linear,
        "--add-qkv-bias": shape.add_qkv_bias and not shape.add_bias_linear,
        "--qk-layernorm": shape.qk_layernorm,
        "--swiglu": shape.swiglu,
        "--quick-geglu": shape.quick_geglu,
        "--no-bias-gelu-fusion": not shape.bias_gelu_fusion and not shape.swiglu,
        "--bf16": dtype == torch.bfloat16,
        "--fp16": dtype == torch.float16,
    }
    return words + [name for name, given in switches.items() if given]
