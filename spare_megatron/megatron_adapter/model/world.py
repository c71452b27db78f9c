"""One group's own torch.distributed world, and megatron-core's parallel state inside it.

The world has the M ranks of one group only, so the death of another group does not break it, and every collective of
megatron-core over "the world" is one over the group. Ranks meet in a store that the caller gives (a PrefixStore of the
job's store), so no port is chosen here.

May assume: a process is in one group at a time. Promises: ``destroy`` undoes ``init_group_world``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from spare_megatron.config.shape import JobShape
from spare_megatron.megatron_adapter.model.gloo_device import shared_gloo_device
from spare_megatron.megatron_adapter.shims import cuda_available, install_cpu_shims


@dataclass(frozen=True)
class GroupWorld:
    """This rank's place in its group."""

    shape: JobShape
    position: int
    """m, 0..M-1: this rank's number in the group's world."""
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    """d: this rank's number among the group's inner data ranks."""
    expert_rank: int
    expert_tensor_rank: int
    virtual_pipeline: int | None
    timeout_s: float

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return self.pipeline_rank == self.shape.pipeline - 1

    @property
    def last_stage_position(self) -> int:
        """Position of a rank of the last pipeline stage: the last rank, which is last in every dimension."""
        return self.shape.group_size - 1


@dataclass(frozen=True)
class EmbeddingRanks:
    """The user's functions that choose the pipeline ranks with embeddings; None takes megatron-core's, which choose the
    first and the last rank."""

    word: Callable[..., list[int]] | None = None
    position: Callable[..., list[int]] | None = None


def init_group_world(
    shape: JobShape,
    position: int,
    store: dist.Store,
    *,
    virtual_pipeline: int | None = None,
    expert: int = 1,
    expert_tensor: int | None = None,
    backend: str | None = None,
    device: int | None = None,
    timeout_s: float = 600.0,
    pipeline_before_data: bool = False,
    hierarchical_context: Sequence[int] | None = None,
    embeddings: EmbeddingRanks | None = None,
    one_gloo_device: bool = True,
    gloo_host: str = "",
) -> GroupWorld:
    """Join this group's world at ``position`` and initialise megatron-core's parallel state in it.

    Collective over the group. ``backend`` is nccl with CUDA and gloo without, unless given.
    ``device`` is the CUDA device this rank computes on, where there is CUDA; None leaves the choice as it is.
    ``pipeline_before_data`` orders a group's ranks tensor, context, pipeline, inner data (``--use-tp-pp-dp-mapping``),
    else the pipeline comes last. ``hierarchical_context`` are the sizes of nested context-parallel groups. Without
    ``one_gloo_device`` each process group has one of its own, as torch makes them. The shared one listens on
    ``gloo_host``; empty: where torch's would.
    """
    install_cpu_shims()
    if device is not None and cuda_available():
        torch.cuda.set_device(device)
    from megatron.core import parallel_state

    embeddings = embeddings or EmbeddingRanks()
    timeout = timedelta(seconds=timeout_s)
    with shared_gloo_device(gloo_host) if one_gloo_device else contextlib.nullcontext():
        dist.init_process_group(
            backend or ("nccl" if cuda_available() else "gloo"),
            store=store,
            rank=position,
            world_size=shape.group_size,
            timeout=timeout,
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=shape.tensor,
            pipeline_model_parallel_size=shape.pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline,
            context_parallel_size=shape.context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
            order="tp-cp-ep-pp-dp" if pipeline_before_data else "tp-cp-ep-dp-pp",
            hierarchical_context_parallel_sizes=list(hierarchical_context) if hierarchical_context else None,
            get_embedding_ranks=embeddings.word,
            get_position_embedding_ranks=embeddings.position,
        )
    return world_here(shape, position, virtual_pipeline, timeout_s)


def world_here(shape: JobShape, position: int, virtual_pipeline: int | None, timeout_s: float) -> GroupWorld:
    """This rank's place in megatron-core's parallel state, which is initialised."""
    from megatron.core import parallel_state

    return GroupWorld(
        shape=shape,
        position=position,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        virtual_pipeline=virtual_pipeline,
        timeout_s=timeout_s,
    )


def destroy() -> None:
    """Leave the group's world; not collective, so it also works when another rank of the group is dead."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for every rank of the group."""
    device_ids = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
    dist.barrier(device_ids=device_ids)
