"""Maps each tensor of megatron-core to tensors of a Hugging Face model and back.

A rule turns one of megatron-core's tensors into one or several of Hugging Face's and back, without arithmetic, so a
round trip is bit for bit the same. Rules work on meta tensors too, so shapes are known before values are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spare_megatron.checkpoint.convert.model import Entry, ModelShape

Split = Callable[[torch.Tensor, ModelShape], list[torch.Tensor]]
Join = Callable[[list[torch.Tensor], ModelShape], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """How a tensor is split into Hugging Face's tensors and joined from them."""

    split: Split
    join: Join


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
GATED = Rule(lambda tensor, _: list(tensor.chunk(2, 0)), lambda parts, _: torch.cat(parts))
QKV = Rule(_split_qkv, _join_qkv)
QKV_AS_ONE = Rule(
    lambda tensor, shape: [torch.cat(_split_qkv(tensor, shape)).t()],
    lambda parts, shape: _join_qkv(list(parts[0].t().chunk(3, 0)), shape),
)
"""GPT-2 stores query, key and value one after the other in one tensor (``t`` leaves a bias, with its one axis, as it
is)."""

_LLAMA: dict[str, tuple[Rule, tuple[str, ...]]] = {
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
    "mlp.router.weight": (PLAIN, ("block_sparse_moe.gate.weight",)),
    "mlp.experts.N.linear_fc1.weight": (
        GATED,
        ("block_sparse_moe.experts.N.w1.weight", "block_sparse_moe.experts.N.w3.weight"),
    ),
    "mlp.experts.N.linear_fc2.weight": (PLAIN, ("block_sparse_moe.experts.N.w2.weight",)),
}
_GPT2: dict[str, tuple[Rule, tuple[str, ...]]] = {
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
_EXPERT = re.compile(r"experts\.\d+\.")


def rule_of(entry: Entry, kind: str) -> tuple[Rule, tuple[str, ...]]:
    """The rule of a tensor for models of ``kind``, and Hugging Face's names of its parts."""
    table, rest = (_GPT2, _GPT2_REST) if kind == "gpt2" else (_LLAMA, _LLAMA_REST)
    if entry.layer is None:
        return PLAIN, (rest[entry.name],)
    inside = entry.name.removeprefix(f"decoder.layers.{entry.layer}.")
    rule, names = table[_EXPERT.sub("experts.N.", inside)]
    top = f"transformer.h.{entry.layer}." if kind == "gpt2" else f"model.layers.{entry.layer}."
    return rule, tuple(top + name.replace(".N.", f".{entry.expert}.") for name in names)
