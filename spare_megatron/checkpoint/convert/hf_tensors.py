"""Maps each tensor of megatron-core to tensors of a Hugging Face model and back.

A rule turns one of megatron-core's tensors into one or several of Hugging Face's and back, without arithmetic, so a
round trip is bit for bit the same. Rules work on meta tensors too, so shapes are known before values are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spare_megatron.checkpoint.convert.model import OUTPUT, WORDS, Entry, ModelShape

Split = Callable[[torch.Tensor, ModelShape], list[torch.Tensor]]
Join = Callable[[list[torch.Tensor], ModelShape], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """How a tensor is split into Hugging Face's tensors and joined from them."""

    split: Split
    join: Join
    copied: bool = False
    """Whether transformers' tensors are equal, so that one of them is enough."""
    stacked: bool = False
    """Whether transformers has one tensor of all experts, in which this one's has its place on the first axis."""


def _split_qkv(fused: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """Split (query groups x (queries + key + value) x channels, ...) into query, key and value of all groups."""
    rest, channels = fused.shape[1:], shape.kv_channels
    grouped = fused.reshape(shape.num_query_groups, shape.group_width, *rest)
    queries = shape.group_width - 2 * channels
    return [part.reshape(-1, *rest) for part in grouped.split([queries, channels, channels], 1)]


def _join_qkv(parts: list[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    rest = parts[0].shape[1:]
    grouped = [part.reshape(shape.num_query_groups, -1, *rest) for part in parts]
    return torch.cat(grouped, 1).reshape(-1, *rest)


PLAIN = Rule(lambda tensor, _: [tensor], lambda parts, _: parts[0])
TURNED = Rule(lambda tensor, _: [tensor.t()], lambda parts, _: parts[0].t())
"""GPT-2 stores weights transposed (Conv1D)."""
TURNED_STACK = Rule(TURNED.split, TURNED.join, stacked=True)
STACK = Rule(PLAIN.split, PLAIN.join, stacked=True)
GATED = Rule(lambda tensor, _: list(tensor.chunk(2, 0)), lambda parts, _: torch.cat(parts))
MIXED_STACK = Rule(
    lambda tensor, _: [torch.stack(tensor.chunk(2, 0), 1).flatten(0, 1).t()],
    lambda parts, _: torch.cat([parts[0].t()[0::2], parts[0].t()[1::2]]),
    stacked=True,
)
"""gpt_oss has channels of the gate and of the input in turn, and its weights transposed."""
QKV = Rule(_split_qkv, _join_qkv)
QKV_AS_ONE = Rule(
    lambda tensor, shape: [torch.cat(_split_qkv(tensor, shape)).t()],
    lambda parts, shape: _join_qkv(list(parts[0].t().chunk(3, 0)), shape),
)
"""GPT-2 stores query, key and value one after the other in one tensor (``t`` leaves a bias, with its one axis, as it
is)."""

TensorTable = dict[str, tuple[Rule, tuple[str, ...]]]
"""Name of a tensor inside megatron-core's layer -> its rule, and the names inside transformers' layer."""
_LLAMA: TensorTable = {
    "self_attention.linear_qkv.layer_norm_weight": (PLAIN, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (QKV, tuple(f"self_attn.{one}_proj.weight" for one in "qkv")),
    "self_attention.linear_qkv.bias": (QKV, tuple(f"self_attn.{one}_proj.bias" for one in "qkv")),
    "self_attention.q_layernorm.weight": (PLAIN, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": (PLAIN, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": (PLAIN, ("self_attn.o_proj.weight",)),
    "mlp.linear_fc1.layer_norm_weight": (PLAIN, ("post_attention_layernorm.weight",)),
    "pre_mlp_layernorm.weight": (PLAIN, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": (GATED, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (PLAIN, ("mlp.down_proj.weight",)),
}
_MIXTRAL: TensorTable = {
    "mlp.router.weight": (PLAIN, ("block_sparse_moe.gate.weight",)),
    "mlp.experts.N.linear_fc1.weight": (
        GATED,
        ("block_sparse_moe.experts.N.w1.weight", "block_sparse_moe.experts.N.w3.weight"),
    ),
    "mlp.experts.N.linear_fc2.weight": (PLAIN, ("block_sparse_moe.experts.N.w2.weight",)),
}
_EXPERTS: TensorTable = {
    "mlp.router.weight": (PLAIN, ("mlp.gate.weight",)),
    "mlp.router.expert_bias": (PLAIN, ("mlp.gate.e_score_correction_bias",)),
    "mlp.experts.N.linear_fc1.weight": (GATED, ("mlp.experts.N.gate_proj.weight", "mlp.experts.N.up_proj.weight")),
    "mlp.experts.N.linear_fc2.weight": (PLAIN, ("mlp.experts.N.down_proj.weight",)),
    "mlp.shared_experts.linear_fc1.weight": (
        GATED,
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    "mlp.shared_experts.linear_fc2.weight": (PLAIN, ("mlp.shared_experts.down_proj.weight",)),
}
_PREDICTORS: TensorTable = {
    "enorm.weight": (PLAIN, ("enorm.weight",)),
    "hnorm.weight": (PLAIN, ("hnorm.weight",)),
    "eh_proj.weight": (PLAIN, ("eh_proj.weight",)),
    "final_layernorm.weight": (PLAIN, ("shared_head.norm.weight",)),
}
_GPT_OSS: TensorTable = {
    "self_attention.core_attention.softmax_offset": (PLAIN, ("self_attn.sinks",)),
    "self_attention.linear_proj.bias": (PLAIN, ("self_attn.o_proj.bias",)),
    "mlp.router.weight": (PLAIN, ("mlp.router.weight",)),
    "mlp.router.bias": (PLAIN, ("mlp.router.bias",)),
    "mlp.experts.N.linear_fc1.weight": (MIXED_STACK, ("mlp.experts.gate_up_proj",)),
    "mlp.experts.N.linear_fc1.bias": (MIXED_STACK, ("mlp.experts.gate_up_proj_bias",)),
    "mlp.experts.N.linear_fc2.weight": (TURNED_STACK, ("mlp.experts.down_proj",)),
    "mlp.experts.N.linear_fc2.bias": (STACK, ("mlp.experts.down_proj_bias",)),
}
_LATENTS: TensorTable = {
    "input_layernorm.weight": (PLAIN, ("input_layernorm.weight",)),
    "self_attention.linear_q_proj.weight": (PLAIN, ("self_attn.q_proj.weight",)),
    "self_attention.linear_q_down_proj.weight": (PLAIN, ("self_attn.q_a_proj.weight",)),
    "self_attention.linear_q_up_proj.layer_norm_weight": (PLAIN, ("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": (PLAIN, ("self_attn.q_b_proj.weight",)),
    "self_attention.linear_kv_down_proj.weight": (PLAIN, ("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (PLAIN, ("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": (PLAIN, ("self_attn.kv_b_proj.weight",)),
}
_GPT2: TensorTable = {
    "self_attention.linear_qkv.layer_norm_weight": (PLAIN, ("ln_1.weight",)),
    "self_attention.linear_qkv.layer_norm_bias": (PLAIN, ("ln_1.bias",)),
    "self_attention.linear_qkv.weight": (QKV_AS_ONE, ("attn.c_attn.weight",)),
    "self_attention.linear_qkv.bias": (QKV_AS_ONE, ("attn.c_attn.bias",)),
    "self_attention.linear_proj.weight": (TURNED, ("attn.c_proj.weight",)),
    "self_attention.linear_proj.bias": (PLAIN, ("attn.c_proj.bias",)),
    "mlp.linear_fc1.layer_norm_weight": (PLAIN, ("ln_2.weight",)),
    "mlp.linear_fc1.layer_norm_bias": (PLAIN, ("ln_2.bias",)),
    "mlp.linear_fc1.weight": (TURNED, ("mlp.c_fc.weight",)),
    "mlp.linear_fc1.bias": (PLAIN, ("mlp.c_fc.bias",)),
    "mlp.linear_fc2.weight": (TURNED, ("mlp.c_proj.weight",)),
    "mlp.linear_fc2.bias": (PLAIN, ("mlp.c_proj.bias",)),
}
_LLAMA_REST = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_GPT2_REST = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
TABLES: dict[str, TensorTable] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "mixtral": _LLAMA | _MIXTRAL,
    "qwen3_moe": _LLAMA | _EXPERTS,
    "gpt_oss": _LLAMA | _GPT_OSS,
    "glm4_moe": _LLAMA | _EXPERTS | _PREDICTORS,
    "deepseek_v2": _LLAMA | _EXPERTS | _LATENTS,
    "deepseek_v3": _LLAMA | _EXPERTS | _LATENTS | _PREDICTORS,
}
"""Kind of model -> its layers' tensors."""
_EXPERT = re.compile(r"experts\.\d+\.")
_PREDICTOR = re.compile(r"mtp\.layers\.\d+\.(transformer_layer\.)?")


def _copies(name: str, shape: ModelShape) -> list[str]:
    """Where layers that predict more tokens have the embeddings or the output layer again."""
    tied = not shape.untie_embeddings_and_output_weights
    inside = [*(["embed_tokens.weight"] if name == WORDS else [])]
    inside += ["shared_head.head.weight"] if name == (WORDS if tied else OUTPUT) else []
    layers = range(shape.num_layers, shape.num_layers + (shape.mtp_num_layers or 0))
    return [f"model.layers.{layer}.{one}" for layer in layers for one in inside]


def rule_of(entry: Entry, kind: str, shape: ModelShape) -> tuple[Rule, tuple[str, ...]]:
    """The rule of a tensor for models of ``kind``, and Hugging Face's names of its parts."""
    if entry.layer is None:
        names = ((_GPT2_REST if kind == "gpt2" else _LLAMA_REST)[entry.name], *_copies(entry.name, shape))
        return Rule(lambda tensor, _: [tensor] * len(names), PLAIN.join, copied=len(names) > 1), names
    inside = _PREDICTOR.sub("", entry.name.removeprefix(f"decoder.layers.{entry.layer}."))
    rule, names = TABLES[kind][_EXPERT.sub("experts.N.", inside)]
    top = f"transformer.h.{entry.layer}." if kind == "gpt2" else f"model.layers.{entry.layer}."
    return rule, tuple(top + name.replace(".N.", f".{entry.expert}.") for name in names)
