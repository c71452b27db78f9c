"""Splits logical tensors over tensor-parallel ranks and pipeline stages, and pads the vocabulary.

Tensors are split as in megatron-core: in equal parts along one axis, a gated weight in each of its two halves.
"""

from __future__ import annotations

import dataclasses

import torch

from spare_megatron.checkpoint.convert.model import Entry, ModelShape
from spare_megatron.config.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layout:
    """Parallel degrees of a checkpoint."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


def check(shape: ModelShape, layout: Layout) -> None:
    """ConfigError where a model cannot be split over these parallel degrees."""
    latents = (shape.kv_lora_rank or 0) + (shape.qk_pos_emb_head_dim or 0) if shape.multi_latent_attention else 0
    for value, degree, flag in (
        (shape.num_attention_heads, layout.tensor, "--target-tensor-parallel-size"),
        (shape.num_query_groups, layout.tensor, "--target-tensor-parallel-size"),
        (shape.ffn_hidden_size, layout.tensor, "--target-tensor-parallel-size"),
        (shape.moe_ffn_hidden_size or 0, layout.tensor, "--target-tensor-parallel-size"),
        (shape.moe_shared_expert_intermediate_size or 0, layout.tensor, "--target-tensor-parallel-size"),
        (shape.q_lora_rank or 0, layout.tensor, "--target-tensor-parallel-size"),
        (latents, layout.tensor, "--target-tensor-parallel-size"),
        (shape.padded_vocab_size, layout.tensor, "--target-tensor-parallel-size"),
        (shape.num_layers, layout.pipeline, "--target-pipeline-parallel-size"),
        (shape.num_experts or layout.expert, layout.expert, "--target-expert-parallel-size"),
    ):
        if degree < 1 or value % degree:
            names = {
                shape.moe_ffn_hidden_size: "channels of an expert",
                shape.moe_shared_expert_intermediate_size: "channels of the shared expert",
                shape.q_lora_rank: "channels of the queries' latent",
                latents: "channels of the keys' and values' latent",
                shape.num_attention_heads: "attention heads",
                shape.num_query_groups: "query groups",
                shape.ffn_hidden_size: "feed-forward channels",
                shape.padded_vocab_size: "rows of the vocabulary",
                shape.num_layers: "layers",
                shape.num_experts or layout.expert: "experts",
            }
            raise ConfigError(f"{value} {names[value]} are not divisible by {flag} {degree}; use a divisor of {value}")


def cut(tensor: torch.Tensor, entry: Entry, ranks: int) -> list[torch.Tensor]:
    """The part of ``tensor`` for each of ``ranks`` tensor-parallel ranks; views where that is possible."""
    if entry.axis is None or ranks == 1:
        return [tensor] * ranks
    if not entry.gated:
        return list(tensor.chunk(ranks, entry.axis))
    gate, rest = (half.chunk(ranks, 0) for half in tensor.chunk(2, 0))
    return [torch.cat(pair) for pair in zip(gate, rest, strict=True)]


def joined(parts: list[torch.Tensor], entry: Entry) -> torch.Tensor:
    """The whole tensor of the parts of all tensor-parallel ranks, each of which may have it whole."""
    if entry.axis is None or len(parts) == 1 or tuple(parts[0].shape) == entry.shape:
        return parts[0]
    if not entry.gated:
        return torch.cat(parts, entry.axis)
    halves = [part.chunk(2, 0) for part in parts]
    return torch.cat([*(gate for gate, _ in halves), *(rest for _, rest in halves)])


def stage_of(entry: Entry, shape: ModelShape, layout: Layout) -> int:
    """The pipeline stage that holds a tensor."""
    if entry.layer is not None and not entry.predicts:
        return entry.layer // (shape.num_layers // layout.pipeline)
    return 0 if entry.name.startswith("embedding.") else layout.pipeline - 1


def with_vocabulary(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor`` cut to ``rows`` rows, or padded with copies of its last row, as Megatron's tool does it."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor[:rows]
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])


def padded(vocab_size: int, divisible_by: int, tensor: int) -> int:
    """Number of rows of a vocabulary as Megatron pads it: a multiple of ``divisible_by`` x ``tensor``."""
    unit = divisible_by * tensor
    return -(-vocab_size // unit) * unit
