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
from spare_megatron.data.microbatch_loader import MicrobatchLoader
from spare_megatron.data.sampling import SampleOrder
from spare_megatron.worker import user_state
from spare_megatron.worker.job_arguments import JobArguments
from spare_megatron.worker.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch

    from spare_megatron.megatron_adapter.model.world import GroupWorld


class PlainTraining:
    """Model, optimizer and data of one rank."""

    def __init__(
        self,
        job: JobArguments,
        args: Namespace,
        world: GroupWorld,
        shape: JobShape,
        data_rank: int | None = None,
        instances: int = 1,
    ) -> None:
        """``shape`` is the shape of the whole job, whose samples are those of its ``data_rank`` here (default: this
        rank's number in ``world``); ``world`` may have fewer data-parallel ranks than the job. ``instances``: those of
        a distributed optimizer, as ``world`` has them."""
        from megatron.core.distributed import finalize_model_grads

        from spare_megatron.megatron_adapter.model import rng

        tokenizer = build_tokenizer(args)
        user_state.begin(job, args, tokenizer)
        rng.seed_start(job.training.seed, world.pipeline_rank)
        self._modules = _modules(job, world.virtual_pipeline)
        options = {
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": False,
            "use_distributed_optimizer": job.optimizer["use_distributed_optimizer"],
            "num_distributed_optimizer_instances": instances,
        }
        self._chunks = [_distributed(module, index, options) for index, module in enumerate(self._modules)]
        self.optimizer = _optimizer(job, self._chunks)
        for module in self._modules:
            module.config.grad_scale_func = self.optimizer.scale_loss
            module.config.finalize_model_grads_func = finalize_model_grads
            if world.virtual_pipeline is not None:
                run = args.microbatch_group_size_per_vp_stage or shape.pipeline
                module.config.microbatch_group_size_per_vp_stage = run
        counts = sample_counts(job.train_iters, args)
        provider = pretrain_gpt.train_valid_test_datasets_provider
        data = build_datasets(provider, counts, args, (), leads=world.position == 0, chunks=world.virtual_pipeline)
        order = SampleOrder(shape, len(data.train) if data.train is not None else 1)
        self._batches = job.batches.schedule()
        inner = world.data_rank if data_rank is None else data_rank
        consumed = self._batches.consumed_before
        self._loader = MicrobatchLoader(data.train, order, inner=inner, hosted=None, consumed=consumed, threads=0)
        self._shape, self._seq_length = shape, job.seq_length

    def batch_size(self, step: int) -> int:
        """Samples of a step, over all data-parallel ranks of the job."""
        return self._batches.size(step)

    def compute(self, step: int) -> list[dict[str, Any]]:
        """Compute the gradients of a step, summed over the data-parallel ranks of the world; returns what the loss
        function reported for each microbatch, on the last pipeline stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        size = self._batches.size(step)
        numbers = [n for piece in range(self._shape.pieces) for n in self._shape.microbatches_of(piece, size)]
        return get_forward_backward_func()(  # type: ignore[no-any-return]
            forward_step_func=pretrain_gpt.forward_step,
            data_iterator=[self._loader(step, numbers) for _ in self._chunks],
            model=list(self._chunks),
            num_microbatches=len(numbers),
            seq_length=self._seq_length,
            micro_batch_size=self._shape.micro_batch_size,
            forward_only=False,
        )

    def update(self) -> tuple[bool, float | None]:
        """Apply the gradients; returns whether they were (a loss scale may be too large) and their norm."""
        updated, grad_norm, _ = self.optimizer.step()
        return bool(updated), None if grad_norm is None else float(grad_norm)

    def gradients(self) -> list[torch.Tensor]:
        """megatron-core's buffers of gradients, each contiguous."""
        return [buffer.grad_data for chunk in self._chunks for buffer in chunk.buffers]

    def state(self) -> dict[str, Any]:
        """Weights and optimizer; not copied."""
        return {"model": [module.state_dict() for module in self._modules], "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        for module, weights in zip(self._modules, state["model"], strict=True):
            module.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])


def _modules(job: JobArguments, virtual_pipeline: int | None) -> list[torch.nn.Module]:
    """This rank's part of the model: one module, or one for each virtual stage."""
    from megatron.core import parallel_state

    from spare_megatron.megatron_adapter.model.hybrid_layers import hybrid_provider

    provider: Any = pretrain_gpt.model_provider
    if job.model.hybrid_layer_pattern is not None:
        settings = job.settings(user_state.get_args().padded_vocab_size)
        provider = hybrid_provider(settings, user_state.core_transformer_config_from_args())
    made = []
    for stage in [None] if virtual_pipeline is None else range(virtual_pipeline):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        made.append(provider(first, last, vp_stage=stage))
    return made


def _distributed(module: Any, index: int, options: dict[str, Any]) -> Any:
    """Chunk ``index`` of the model as Megatron's ``get_model`` wraps it, with these options of its DDP.

    But for experts' tokens, which Megatron counts in the model's precision: bf16 loses some of them above 256."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from spare_megatron.megatron_adapter.model.replica import count_tokens_in_fp32

    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = module.config
    wrapped = Float16Module(config, module) if config.fp16 or config.bf16 else module
    count_tokens_in_fp32(wrapped)
    ddp = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(config, ddp, wrapped, disable_bucketing=index > 0)


def _optimizer(job: JobArguments, chunks: list[Any]) -> Any:
    from megatron.core import optimizer as core_optimizer
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fields = {k: v for k, v in job.optimizer.items() if k in OptimizerConfig.__dataclass_fields__}
    config = chunks[0].config
    fields |= {"fp16": config.fp16, "bf16": config.bf16, "params_dtype": config.params_dtype}
    reported, kinds = OptimizerConfig(**fields), None
    if getattr(config, "use_mup", False):  # as Megatron-LM's setup_model_and_optimizer
        by_width = core_optimizer.get_mup_config_overrides(reported, config.mup_width_mult, reported.optimizer)
        kinds = {**core_optimizer.get_standard_config_overrides(reported), **by_width}
    return get_megatron_optimizer(reported, chunks, kinds, use_gloo_process_groups=False)
