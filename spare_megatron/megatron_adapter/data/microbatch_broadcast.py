"""Gives a microbatch to the ranks of a pipeline stage: tensor-parallel rank 0 reads it and broadcasts it to the others.

The first stage needs tokens and positions, the last labels and the loss mask, both the attention mask; a pipeline of
one stage, and a last stage that predicts more tokens than the next, need all. The names and the order of the values are
Megatron's.

May assume: model parallel state is initialised; every tensor-parallel rank of the stage calls with the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.core_differences import context_cut
from spare_megatron.megatron_adapter.shims import compute_device, install_cpu_shims

install_cpu_shims()

from megatron.core import parallel_state

KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
FIRST_STAGE = ("tokens", "attention_mask", "position_ids")
LAST_STAGE = ("labels", "loss_mask", "attention_mask")


def needed_keys(predicts: bool) -> tuple[str, ...]:
    """The values of a microbatch that this rank's pipeline stage needs; ``predicts``: it has layers of multi-token
    prediction."""
    if predicts or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return KEYS
    if parallel_state.is_pipeline_first_stage():
        return FIRST_STAGE
    return LAST_STAGE if parallel_state.is_pipeline_last_stage() else ()


def is_first_or_last_stage(vp_stage: int | None = None) -> bool:
    """Whether this rank, or the model chunk ``vp_stage`` of it, reads samples."""
    virtual = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return bool(parallel_state.is_pipeline_first_stage(**virtual) or parallel_state.is_pipeline_last_stage(**virtual))


def is_last_stage() -> bool:
    """Whether this rank has the last pipeline stage."""
    return bool(parallel_state.is_pipeline_last_stage())


def tensor_rank() -> int:
    """This rank's place in its tensor-parallel group."""
    return parallel_state.get_tensor_model_parallel_rank()


def data_rank() -> int:
    """This rank's place among the group's inner data ranks."""
    return parallel_state.get_data_parallel_rank()


def max_over_model(value: float) -> float:
    """The largest value of the ranks of this pipeline; collective in the model-parallel group."""
    largest = torch.tensor([value], dtype=torch.float64, device=compute_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
    return float(largest)


def empty_value(key: str, micro_batch_size: int, seq_length: int) -> torch.Tensor:
    """An empty tensor for a value that tensor-parallel rank 0 will broadcast."""
    dtype = {"loss_mask": torch.float32, "attention_mask": torch.bool}.get(key, torch.int64)
    size = [micro_batch_size, seq_length]
    if key == "attention_mask":
        size = [micro_batch_size, 1, seq_length, seq_length]
    return torch.empty(size, dtype=dtype, device=compute_device())


def batch_on_this_tensor_rank(
    data: Iterator[Mapping[str, Any]] | None,
    micro_batch_size: int,
    seq_length: int,
    with_attention_mask: bool,
    predicts: bool = False,
) -> dict[str, torch.Tensor | None]:
    """The next microbatch; values that this stage does not need are None. Collective in the tensor-parallel group."""
    batch: dict[str, torch.Tensor | None] = dict.fromkeys(KEYS)
    keys = [key for key in needed_keys(predicts) if with_attention_mask or key != "attention_mask"]
    reads = tensor_rank() == 0
    sample: Mapping[str, Any] = {}
    if reads:
        if data is None:
            raise RuntimeError("tensor-parallel rank 0 of the first and the last stage needs a data iterator")
        sample = next(data)
    alone = parallel_state.get_tensor_model_parallel_world_size() == 1
    for key in keys:
        if reads:
            value = sample[key].to(compute_device(), non_blocking=True)
        else:
            value = empty_value(key, micro_batch_size, seq_length)
        if not alone:
            source = parallel_state.get_tensor_model_parallel_src_rank()
            dist.broadcast(value, source, group=parallel_state.get_tensor_model_parallel_group())
        batch[key] = value
    return batch


def batch_on_this_context_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """The slices of each sequence that this context-parallel rank computes (megatron-core's balanced cut)."""
    return context_cut()(batch)
