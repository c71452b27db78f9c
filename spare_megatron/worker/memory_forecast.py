"""Forecasts the memory of the fullest rank's GPU from a job's flags, item by item, for ``--spare-check``.

Parameters are counted as in :mod:`return_forecast`. Activations are those of Korthikanti et al. 2022 (arXiv
2205.05198, section 4) for bf16 and attention that keeps no scores: for each token of a layer 11 h bytes in attention,
19 h in a feed-forward part of 4 h, 4 h in two norms; here with the sizes that heads, gated activations and experts
have. Tensor parallelism divides all but the 10 h of norms, inputs and dropout masks, and these too with
``--sequence-parallel``. The first stage holds as many microbatches as there are stages. It is a forecast: allocators,
kernels' workspaces and NCCL's buffers are not in it.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator

from spare_megatron.config.byte_units import in_bytes
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.config.rows import shape_of
from spare_megatron.config.shape import JobShape
from spare_megatron.flags.stage_layout import row_cut_of
from spare_megatron.planning.memory import MAIN_BYTES, WEIGHT_BYTES, rank_bytes
from spare_megatron.worker.flops import feed_forward_products, layer_counts
from spare_megatron.worker.return_forecast import optimizer_values, rank_parameters, share_of_largest_stage

log = logging.getLogger(__name__)
GPUS = {"A100, H100": 80e9, "H200": 141e9, "B200": 180e9}
"""GPU -> bytes of its memory, by NVIDIA's data sheets."""
LOGIT_BYTES = 6.0
"""A logit, and its fp32 copy in the loss."""


def memory_items(ns: Namespace, shape: JobShape, vocabulary: int) -> dict[str, float]:
    """Item -> bytes on the GPU of the rank with the most parameters. ``ns`` has resolved flags."""
    half = bool(ns.bf16 or ns.fp16)
    values = optimizer_values(ns, shape.tensor) + (1 if half else 0)  # where the model's weights are fp32, no others
    on_host = ns.optimizer_offload_fraction if ns.optimizer_cpu_offload else 0.0
    found = rank_bytes(
        rank_parameters(ns, shape, vocabulary),
        ns.spare_reduce,
        shape.piece_microbatches,
        weight=WEIGHT_BYTES if half else MAIN_BYTES,
        optimizer=MAIN_BYTES * values * (1 - on_host),
        state_copies=ns.spare_state_redundancy or shape.num_groups,
        groups=shape.num_groups,
    )
    items = {
        "weights": found["weights"],
        "sums of gradients": found["accumulator"] + found["group_sum"],
        "reduced gradients": found["reduced_result"],
        "optimizer": found["optimizer"],
    }
    if "gathered_weights" in found:
        items["a copy of a lost group's optimizer"] = found["copy_taken_over"]
        items["gathered weights"] = found["gathered_weights"]
    return {**items, "activations": activation_bytes(ns, shape, vocabulary)}


def activation_bytes(ns: Namespace, shape: JobShape, vocabulary: int) -> float:
    """Bytes of activations on the first stage, which holds the most microbatches."""
    tokens = ns.seq_length * shape.micro_batch_size / shape.context
    layers = share_of_largest_stage(ns, shape.pipeline) * ns.num_layers
    virtual = ns.virtual_pipeline_model_parallel_size or 1
    interleaved = 1 + (shape.pipeline - 1) / (shape.pipeline * virtual) if virtual > 1 else 1.0
    in_flight = min(shape.pipeline, shape.pieces * shape.piece_microbatches) * interleaved
    layer, kept = _of_layer(ns, shape.tensor), 0.0
    if ns.recompute_granularity == "full":  # inputs, and the one layer that is computed again
        kept, layer = layer, 2.0 * ns.hidden_size / (shape.tensor if ns.sequence_parallel else 1)
    kept = tokens * (kept + layers * in_flight * layer)
    if shape.pipeline == 1:
        kept += tokens * vocabulary * LOGIT_BYTES / shape.tensor
    return float(kept)


def _of_layer(ns: Namespace, tensor: int) -> float:
    """Bytes of one token in the mean layer."""
    hidden, counts = ns.hidden_size, layer_counts(ns, predicting=False)
    masks = 2 * hidden if ns.hidden_dropout else 0
    whole = 8 * hidden + masks  # norms and the inputs of both parts
    groups = ns.num_query_groups if ns.group_query_attention else ns.num_attention_heads
    width = ns.kv_channels or hidden // ns.num_attention_heads
    divided = 2.0 * width * (2 * ns.num_attention_heads + 2 * groups)
    products = feed_forward_products(ns)
    dense = 2.0 * products * (ns.ffn_hidden_size or 0)
    experts = (ns.moe_ffn_hidden_size or 0) * (ns.moe_router_topk or 0) + (ns.moe_shared_expert_intermediate_size or 0)
    sparse = 2.0 * (products * experts + hidden * (ns.moe_router_topk or 0))
    parts = max(1, counts.dense + counts.sparse)
    divided += (counts.dense * dense + counts.sparse * sparse) / parts
    return float(whole / (tensor if ns.sequence_parallel else 1) + divided / tensor)


def savings(ns: Namespace, shape: JobShape, now: float, total_with: Callable[[str], float]) -> dict[str, float]:
    """Flags that are not given -> the bytes that each saves by itself.

    Args:
        ns: resolved flags.
        shape: the job's shape.
        now: the bytes of :func:`memory_items`.
        total_with: the same for the command line with more flags at its end; infinite where that would be refused.
    """
    beside = " --sequence-parallel" if ns.num_experts and not ns.sequence_parallel else ""  # experts need it
    changes = [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--spare-reduce exact32",
        "--optimizer-cpu-offload",
        f"--use-distributed-optimizer --spare-inner-data-parallel {2 * shape.inner_data}",
        f"--tensor-model-parallel-size {2 * shape.tensor}{beside}",
    ]
    if ns.spare_reduce != "exact":
        changes.remove("--spare-reduce exact32")
    found = {flags: now - total_with(flags) for flags in changes}
    return {flags: saved for flags, saved in found.items() if saved > 0.02 * now}


def smaller_shapes(ns: Namespace, shape: JobShape, vocabulary: int) -> dict[int, float]:
    """Pipeline stages of each shape of ``--spare-shapes`` -> bytes on the fullest GPU."""
    found, rows = {}, row_cut_of(ns)
    for stages in rows.shapes:
        cut = rows.home.with_stages(stages)
        ends = {"decoder_first_pipeline_num_layers": cut.first, "decoder_last_pipeline_num_layers": cut.last}
        there = Namespace(**{**vars(ns), **ends, "virtual_pipeline_model_parallel_size": cut.chunks})
        found[stages] = sum(memory_items(there, shape_of(shape, stages), vocabulary).values())
    return found


def shapes_that_fit(ns: Namespace, shape: JobShape, vocabulary: int, device_bytes: float) -> tuple[int, ...]:
    """The shapes of :func:`smaller_shapes` that fit into a device, the largest first. Raises ConfigError if the flag
    names one that does not fit."""
    needed = smaller_shapes(ns, shape, vocabulary)
    too_large = [
        f"with {counted(one, 'pipeline stage')} a GPU would need about {in_bytes(size)}, and this one has "
        f"{in_bytes(device_bytes)}"
        for one, size in needed.items()
        if size > device_bytes
    ]
    if too_large and ns.spare_shapes != "auto":
        raise ConfigError(f"--spare-shapes {ns.spare_shapes}: {too_large[0]}; use --spare-shapes auto")
    for sentence in too_large:
        log.warning("no lost group comes back so: %s", sentence)
    return tuple(one for one, size in needed.items() if size <= device_bytes)


def memory_lines(ns: Namespace, shape: JobShape, vocabulary: int, total_with: Callable[[str], float]) -> Iterator[str]:
    """What ``--spare-check`` states of the memory of a GPU; ``total_with``: as for :func:`savings`."""
    items = memory_items(ns, shape, vocabulary)
    total = sum(items.values())
    yield f"memory of the fullest GPU, without buffers of libraries: about {in_bytes(total)}"
    yield "  " + ", ".join(f"{name} {in_bytes(size)}" for name, size in items.items())
    for stages, needed in smaller_shapes(ns, shape, vocabulary).items():
        yield f"  in a group that comes back with {counted(stages, 'pipeline stage')}: about {in_bytes(needed)}"
    too_small = [f"{size / 1e9:g} GB ({name})" for name, size in GPUS.items() if total > size]
    if ns.recompute_granularity == "selective" and set(ns.recompute_modules or ()) - {"core_attn"}:
        yield "  what --recompute-modules saves of the activations is not taken off"
    if too_small:
        yield f"  more than a GPU of {' or '.join(too_small)} has; by itself"
        for flag, saved in sorted(savings(ns, shape, total, total_with).items(), key=lambda one: -one[1]):
            yield f"  {flag} saves {in_bytes(saved)}"
