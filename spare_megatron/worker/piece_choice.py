"""Chooses the microbatches of a piece where --spare-piece-microbatches is 'auto'.

The choice follows from the flags and the kind of GPU alone, never from what was measured: a later job attempt must
sum the same microbatches in fp32 as the first one did.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path

from spare_megatron.config.batches import BatchSchedule
from spare_megatron.config.piece_sizes import CHOSEN_FOR
from spare_megatron.config.shape import JobShape
from spare_megatron.planning.reduction_cost import device_of, exact_share, shard_s
from spare_megatron.worker.flops import flops_per_step
from spare_megatron.worker.saved_choice import first_redundancy

DRIVER = Path("/proc/driver/nvidia/gpus")
USUAL_VOCABULARY = 128_000
"""For a model whose tokenizer is not read yet."""


def with_pieces(ns: Namespace, shape: JobShape, batches: BatchSchedule) -> tuple[JobShape, str]:
    """``shape`` with the chosen piece, which is noted in the namespace too, and the reason; '' where nothing was left
    to choose."""
    if ns.spare_piece_microbatches is not None:
        return shape, ""
    size, reason = 1, ""
    if ns.spare_reduce in CHOSEN_FOR and shape.microbatches_per_shard > 1:
        from spare_megatron.planning.piece_size import for_job  # needs numpy, which a bad flag should not wait for

        device = device_of(gpu_name())
        tokens = shape.micro_batch_size * ns.seq_length / shape.context
        choice = for_job(
            num_groups=shape.num_groups,
            group_size=shape.group_size,
            redundancy=first_redundancy(ns.spare_redundancy, shape.num_groups, ns.spare_data),
            shards=[batch // (shape.num_groups * shape.microbatch_samples) for _, _, batch in batches.phases],
            share=lambda microbatches: exact_share(device, "exact", microbatches, tokens),
            steps=ns.train_iters,
            shard_s=None if device == "cpu" else _shard_s(ns, shape, device),
            mtbf_gpu_hours=ns.spare_mtbf_gpu_hours,
            granularity=ns.spare_granularity,
        )
        size, reason = choice.microbatches, f"--spare-piece-microbatches auto: {choice.reason}"
    ns.spare_piece_microbatches = size
    return dataclasses.replace(shape, piece_microbatches=size), reason


def _shard_s(ns: Namespace, shape: JobShape, device: str) -> float | None:
    flops = flops_per_step(Namespace(**{**vars(ns), "padded_vocab_size": likely_vocabulary(ns)}))
    return shard_s(device, flops, shape.num_groups, shape.group_size)


def likely_vocabulary(ns: Namespace) -> int:
    """The size of the vocabulary, or a usual one where only the tokenizer knows it."""
    return int(ns.padded_vocab_size or ns.vocab_size or USUAL_VOCABULARY)


def gpu_name() -> str | None:
    """The model of this machine's first GPU, as the driver tells it, because flags are read before torch is there; None
    without one."""
    for path in sorted(DRIVER.glob("*/information")):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                return value.strip()
    return None
