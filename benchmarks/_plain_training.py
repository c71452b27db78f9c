"""Trains pretrain_gpt.py's model on one rank with plain megatron-core: no groups, no coordinator, no votes.

megatron-core's own DistributedDataParallel, optimizer and pipeline schedule are used as they are; model, data and
forward step are pretrain_gpt.py's, and samples come in the order of Megatron's sampler.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pretrain_gpt
from spare_megatron.config.shape import JobShape
from spare_megatron.data.dataset_build import build_datasets, sample_counts
from spare_megatron.data.microbatch_loader import MicrobatchLoader, train_consumed
from spare_megatron.data.sampling import SampleOrder
from spare_megatron.trainer import user_state
from spare_megatron.trainer.job_arguments import JobArguments
from spare_megatron.trainer.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch

    from spare_megatron.megatron_adapter.model.world import GroupWorld


class PlainTraining:
    """Model, optimizer and data of one rank."""

    def __init__(
        self, job: JobArguments, args: Namespace, world: GroupWorld, shape: JobShape, data_rank: int | None = None
    ) -> None:
        """``shape`` is the shape of the whole job, whose samples are those of its ``data_rank`` here (default: this
        rank's number in ``world``); ``world`` may have fewer data-parallel ranks than the job."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from spare_megatron.megatron_adapter.model import rng

        tokenizer = build_tokenizer(args)
        user_state.begin(job, args, tokenizer)
        rng.seed_start(job.training.seed, world.pipeline_rank)
        self._module = pretrain_gpt.model_provider(world.pipeline_rank == 0, world.is_last_stage)
        config = self._module.config
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self._model = DistributedDataParallel(config, ddp, self._module)
        fields = {k: v for k, v in job.optimizer.items() if k in OptimizerConfig.__dataclass_fields__}
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(**fields), [self._model], use_gloo_process_groups=False
        )
        config.grad_scale_func = self._optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        counts = sample_counts(job.train_iters, args)
        provider = pretrain_gpt.train_valid_test_datasets_provider
        data = build_datasets(provider, counts, args, (), leads=world.position == 0)
        order = SampleOrder(shape, len(data.train) if data.train is not None else 1)
        consumed = train_consumed(0, shape.global_batch_size)
        inner = world.data_rank if data_rank is None else data_rank
        self._loader = MicrobatchLoader(data.train, order, inner=inner, hosted=None, consumed=consumed, threads=0)
        self._shape, self._seq_length = shape, job.seq_length

    def compute(self, step: int) -> None:
        """Compute the gradients of a step, summed over the data-parallel ranks of the world."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=pretrain_gpt.forward_step,
            data_iterator=self._loader(step, range(self._shape.microbatches)),
            model=[self._model],
            num_microbatches=self._shape.microbatches,
            seq_length=self._seq_length,
            micro_batch_size=self._shape.micro_batch_size,
            forward_only=False,
        )

    def update(self) -> None:
        """Apply the gradients."""
        self._optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        """megatron-core's buffers of gradients, each contiguous."""
        return [buffer.grad_data for buffer in self._model.buffers]

    def state(self) -> dict[str, Any]:
        """Weights and optimizer; not copied."""
        return {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self._module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
