"""Forecasts the memory of a group's return from a job's flags, for ``--spare-check``.

It counts the parameters of the largest rank by the shapes of matrices and tables, without biases and norms; megatron
is not loaded.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

from spare_megatron.config.byte_units import in_bytes
from spare_megatron.config.plural import counted
from spare_megatron.config.shape import JobShape
from spare_megatron.flags.hybrid_pattern import pattern_of
from spare_megatron.flags.optimizer_flags import splits
from spare_megatron.planning.cluster_figures import LLAMA3_MTBF_GPU_HOURS
from spare_megatron.planning.memory import MAIN_BYTES, WEIGHT_BYTES, RankParameters
from spare_megatron.planning.return_memory import return_memory
from spare_megatron.planning.state_copies import copying_s, seconds_to_wipe_out
from spare_megatron.worker.flops import feed_forward_products, layer_counts

GATHER_BYTES_PER_S = float(2**30)
"""Assumed of a GPU that gathers state from other groups."""


def attention_parameters(ns: Namespace) -> float:
    """Of one layer."""
    hidden, heads = ns.hidden_size, ns.num_attention_heads
    if ns.multi_latent_attention:
        key, value = ns.qk_head_dim + ns.qk_pos_emb_head_dim, ns.v_head_dim
        lora = ns.q_lora_rank
        query = hidden * heads * key if lora is None else lora * (hidden + heads * key)
        latent = hidden * (ns.kv_lora_rank + ns.qk_pos_emb_head_dim) + ns.kv_lora_rank * heads * (
            ns.qk_head_dim + value
        )
        return float(query + latent + heads * value * hidden)
    groups = ns.num_query_groups if ns.group_query_attention else heads
    gate = heads if ns.attention_output_gate else 0
    return float(hidden * ns.kv_channels * (2 * heads + gate + 2 * groups))


def mamba_parameters(ns: Namespace) -> float:
    """Of one Mamba layer: its two projections."""
    inner, state = 2 * ns.hidden_size, ns.mamba_num_groups * ns.mamba_state_dim
    heads = ns.mamba_num_heads or inner // ns.mamba_head_dim
    return float(ns.hidden_size * (3 * inner + 2 * state + heads))


def gated_parameters(ns: Namespace) -> float:
    """Of one gated delta net: its two projections."""
    keys = ns.linear_key_head_dim * ns.linear_num_key_heads
    heads = ns.linear_num_value_heads
    return float(ns.hidden_size * (2 * keys + 3 * heads * ns.linear_value_head_dim + 2 * heads))


def rank_parameters(ns: Namespace, shape: JobShape, vocabulary: int) -> tuple[RankParameters, RankParameters]:
    """(dense, of experts) of the rank with the most parameters. ``ns`` has resolved flags."""
    tensor, stages, hidden = shape.tensor, shape.pipeline, ns.hidden_size
    products = feed_forward_products(ns)
    table, counts = vocabulary * hidden, layer_counts(ns, predicting=False)
    sparse = counts.sparse
    first = table / tensor
    if ns.position_embedding_type == "learned_absolute":
        first += ns.max_position_embeddings * hidden
    last = table / tensor if stages > 1 or ns.untie_embeddings_and_output_weights else 0.0
    shared = hidden * (ns.moe_shared_expert_intermediate_size or 0) * products
    layers = counts.attention * attention_parameters(ns)
    layers += counts.mamba * mamba_parameters(ns) if counts.mamba else 0
    layers += counts.gated * gated_parameters(ns) if counts.gated else 0
    layers += counts.dense * hidden * ns.ffn_hidden_size * products + sparse * shared
    predicted = ns.mtp_num_layers or 0  # layers of the last stage, each about as large as the mean decoder layer
    last += (predicted * 2 * hidden**2 + (table if predicted and stages > 1 else 0)) / tensor
    here = share_of_largest_stage(ns, stages) + predicted / ns.num_layers
    dense = here * (layers / tensor + sparse * hidden * (ns.num_experts or 0))
    dense += max(first, last) if stages > 1 else first + last
    split = splits(ns, shape)
    of_dense = RankParameters(dense, shape.inner_data * shape.context if split else 1, split)
    ways = ns.expert_model_parallel_size * ns.expert_tensor_parallel_size
    inner = hidden if ns.moe_latent_size is None else ns.moe_latent_size
    experts = here * sparse * (ns.num_experts or 0) * inner * (ns.moe_ffn_hidden_size or 0) * products / ways
    same = max(1, tensor * shape.context * shape.inner_data // ways)
    return of_dense, RankParameters(experts, same if split else 1, split)


def share_of_largest_stage(ns: Namespace, stages: int) -> float:
    pattern = pattern_of(ns)
    if pattern is not None and len(pattern.stages) > 1:
        return max(sum(map(len, pattern.stages[rank::stages])) for rank in range(stages)) / float(ns.num_layers)
    ends = (ns.decoder_first_pipeline_num_layers, ns.decoder_last_pipeline_num_layers)
    given = [one for one in ends if one is not None]
    between = stages - len(given)
    even = math.ceil((ns.num_layers - sum(given)) / between) if between else 0
    return float(max([even, *given]) / ns.num_layers)


def optimizer_values(ns: Namespace, tensor: int) -> float:
    """fp32 values of the optimizer's state per parameter on one of ``tensor`` ranks. SOAP's are those of the matrices
    of one layer: two moments, and two squares for each side of a matrix."""
    if ns.optimizer != "soap":
        return {"ademamix": 3, "sgd": int(ns.sgd_momentum > 0)}.get(ns.optimizer, 2)  # of Muon and Lion at most 2
    hidden, inputs = ns.hidden_size, feed_forward_products(ns) - 1
    groups = ns.num_query_groups if ns.group_query_attention else ns.num_attention_heads
    heads = ns.num_attention_heads * ns.kv_channels / tensor
    inner = (ns.ffn_hidden_size if ns.num_experts is None else ns.moe_ffn_hidden_size) / tensor
    sides = [(heads + 2 * groups * ns.kv_channels / tensor, hidden), (hidden, heads)]
    sides += [(inputs * inner, hidden), (hidden, inner)]
    squares = sum(rows**2 + columns**2 for rows, columns in sides)
    return float(2 + 2 * squares / sum(rows * columns for rows, columns in sides))


def return_lines(ns: Namespace, shape: JobShape, vocabulary: int) -> Iterator[str]:
    """What ``--spare-check`` says of returns; nothing where no group can come back. Where groups keep only some state
    shards, a return takes no memory of others, and the copies of a shard are what counts; a checkpoint takes host
    memory for all shards."""
    copies, groups = ns.spare_state_redundancy, shape.num_groups
    if copies is not None and copies < groups:
        mtbf_s = LLAMA3_MTBF_GPU_HOURS * 3600 / shape.group_size
        parts = rank_parameters(ns, shape, vocabulary)
        half = bool(ns.bf16 or ns.fp16)
        weights = (WEIGHT_BYTES if half else MAIN_BYTES) * sum(part.parameters / part.sharing for part in parts)
        values = optimizer_values(ns, shape.tensor) + (1 if half else 0)
        optimizer = MAIN_BYTES * values * sum(part.parameters / part.sharing for part in parts)
        again_s = copying_s(weights, optimizer * copies / groups, GATHER_BYTES_PER_S)
        lasts = [
            f"{number} copies: {seconds_to_wipe_out(groups, number, mtbf_s, again_s) / 86400:.3g} days"
            for number in range(copies, min(copies + 2, groups))
        ]
        yield (
            f"mean time until the last copy of a part of the optimizer's state is lost, at one loss in "
            f"{LLAMA3_MTBF_GPU_HOURS:g} GPU hours, each made good in {again_s:.3g} s (at "
            f"{in_bytes(GATHER_BYTES_PER_S)} per second and GPU): {', '.join(lasts)}"
        )
        on_host = MAIN_BYTES * values * sum(part.parameters for part in parts)
        yield f"while a checkpoint is read or made: about {in_bytes(on_host)} of host memory on each rank"
        return
    if not ns.spare_max_group_restarts:
        return
    parts = rank_parameters(ns, shape, vocabulary)
    moments = optimizer_values(ns, shape.tensor)
    half = bool(ns.bf16 or ns.fp16)
    state = sum(part.state_bytes(half, moments) for part in parts)
    needed = return_memory(state, sum(part.result_bytes(ns.spare_reduce) for part in parts), shape.num_groups)
    if needed is None:
        return
    yield f"while a lost group comes back (about {sum(part.parameters for part in parts):.3g} parameters on a rank):"
    times = f", for each of at most {needed.learners} such groups at a time" if needed.learners > 1 else ""
    donors = counted(needed.donors, "group")
    yield (
        f"  {in_bytes(needed.state_part)} of host memory on each rank of {donors} for a copy of the state, and up to "
        f"{in_bytes(needed.results_part)} for results{times}"
    )
    yield f"  {in_bytes(needed.result)} of device memory more on each of its own ranks, for a result"
