"""Counts the floating-point operations of a step, for the throughput in the log.

They are counted as in Megatron-LM, so that the figures can be compared: matrix products only, two operations for a
multiply-add, causal attention at half its square, and three times the forward pass (Narayanan et al. 2021,
arXiv:2104.04473, appendix; without its term for recomputation, which is no useful work).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from spare_megatron.flags.hybrid_pattern import ATTENTION, DENSE, EXPERTS, GATED, LATENT, MAMBA, pattern_of

MULTIPLY_ADD = 2
FORWARD_AND_BACKWARD = 3
"""Each product of the forward pass has two of its size in the backward pass, for the gradients of inputs and
weights."""


def attention_size(args: Namespace) -> float:
    """Multiply-adds of one token in one attention layer."""
    hidden, heads, length = args.hidden_size, args.num_attention_heads, args.seq_length
    if args.multi_latent_attention:
        key, value = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
        if args.q_lora_rank is None:
            query = hidden * heads * key
        else:
            query = args.q_lora_rank * (hidden + heads * key + 1)
        latent = args.kv_lora_rank * (hidden + heads * (args.qk_head_dim + value) + 1)
        projections = query + latent + hidden * args.qk_pos_emb_head_dim + hidden * heads * value
        return float(projections + length * heads * (key + value) / 2)
    groups = args.num_query_groups if args.group_query_attention else heads
    query = args.kv_channels * heads
    gate = query if args.attention_output_gate else 0
    return float(hidden * (query + 2 * args.kv_channels * groups + gate + query) + length * query)


def mamba_size(args: Namespace) -> float:
    """Multiply-adds of one token in one Mamba layer; the scan's are Megatron's estimate."""
    hidden, inner, state = args.hidden_size, 2 * args.hidden_size, args.mamba_state_dim
    heads = args.mamba_num_heads or inner // args.mamba_head_dim
    projected = 2 * inner + 2 * args.mamba_num_groups * state + heads
    return float(hidden * (projected + inner) + 3.5 * inner * state)


def gated_size(args: Namespace) -> float:
    """Multiply-adds of one token in one gated delta net."""
    keys = args.linear_key_head_dim * args.linear_num_key_heads
    heads = args.linear_num_value_heads
    values = args.linear_value_head_dim * heads
    projected = args.hidden_size * (2 * keys + 3 * values + 2 * heads)
    convolved = args.linear_conv_kernel_dim * (2 * keys + values)
    return float(projected + convolved + 4 * heads * args.linear_value_head_dim**2)


@dataclass(frozen=True)
class LayerCounts:
    """How many parts of each kind a model's layers have. A layer of a GPT has ``attention``, and ``dense`` or
    ``sparse``."""

    attention: int
    dense: int
    sparse: int
    """Feed-forward parts with experts."""
    mamba: int = 0
    gated: int = 0


def layer_counts(args: Namespace, predicting: bool = True) -> LayerCounts:
    """The parts of all layers. With ``predicting`` also those of multi-token prediction: in a GPT each of its modules
    contains one layer like the last decoder layer."""
    pattern = pattern_of(args)
    if pattern is not None:
        kinds = (ATTENTION + LATENT, DENSE, EXPERTS, MAMBA, GATED)
        return LayerCounts(*(pattern.count(symbols, predicting) for symbols in kinds))
    freq = args.moe_layer_freq
    if args.num_experts is None:
        experts = [0] * args.num_layers
    else:
        experts = freq if isinstance(freq, list) else [int(i % freq == 0) for i in range(args.num_layers)]
    experts = experts + experts[-1:] * (args.mtp_num_layers or 0 if predicting else 0)
    return LayerCounts(len(experts), len(experts) - sum(experts), sum(experts))


def feed_forward_products(args: Namespace) -> int:
    """Matrix products of a feed-forward part; a gated activation has two inputs."""
    return 3 if args.swiglu or args.quick_geglu else 2


def feed_forward_size(args: Namespace) -> float:
    """Multiply-adds of one token in the feed-forward parts of all layers."""
    products = feed_forward_products(args)
    counts = layer_counts(args)
    sparse = counts.sparse
    dense = float(counts.dense * args.hidden_size * args.ffn_hidden_size * products)
    if not sparse:
        return dense
    routed = args.moe_ffn_hidden_size * args.moe_router_topk * products
    if args.moe_latent_size is None:
        each = args.hidden_size * routed
    else:
        each = args.moe_latent_size * routed + 2 * args.hidden_size * args.moe_latent_size
    each += args.hidden_size * (args.moe_shared_expert_intermediate_size or 0) * products
    return dense + float(sparse * each)


def flops_per_step(args: Namespace) -> float:
    """Operations of one optimizer step over the whole job, forward and backward. ``args`` are resolved flags."""
    tokens = args.global_batch_size * args.seq_length
    counts = layer_counts(args)
    layers = counts.attention * attention_size(args) + feed_forward_size(args)
    layers += counts.mamba * mamba_size(args) if counts.mamba else 0
    layers += counts.gated * gated_size(args) if counts.gated else 0
    predicted = (
        args.mtp_num_layers or 0
    )  # each has three norms, a projection of two hidden states to one, and an output
    layers += predicted * args.hidden_size * (3 + 2 * args.hidden_size)
    output = args.hidden_size * args.padded_vocab_size * (1 + predicted)
    return float(FORWARD_AND_BACKWARD * MULTIPLY_ADD * tokens * (layers + output))
