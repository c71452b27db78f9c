"""Runs one rank of plain megatron-core data parallelism, with which step_overhead.py compares jobs of the same flags.

megatron-core's own DistributedDataParallel reduces the gradients over the data-parallel ranks of one world; there
are no groups, no coordinator and no votes. Model, data and forward step are pretrain_gpt.py's. Rank 0 writes a
line of JSON for each step, ``{"step_time_s": SECONDS}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from spare_megatron.trainer.job_arguments import parse_job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """``plain_ddp.py OUTPUT RANK WORLD PORT FLAGS...``; FLAGS ask for one group with inner data parallelism."""
    output, rank, world_size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": str(rank), "SPARE_NUM_GROUPS": "1"}
    job, args = parse_job(sys.argv[5:], environ)
    import torch.distributed as dist

    from spare_megatron.megatron_adapter.model.world import init_group_world

    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    world = init_group_world(job.shape, rank, store)
    with Path(output).open("a", buffering=1) if rank == 0 else contextlib.nullcontext() as record:
        _train(job, args, world, record)
    dist.barrier()
    os._exit(0)


def _train(job, args, world, record) -> None:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import pretrain_gpt
    from spare_megatron.data.dataset_build import build_datasets, sample_counts
    from spare_megatron.data.microbatch_loader import MicrobatchLoader, train_consumed
    from spare_megatron.data.sampling import SampleOrder
    from spare_megatron.megatron_adapter.model import rng
    from spare_megatron.trainer import user_state
    from spare_megatron.trainer.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(args)
    user_state.begin(job, args, tokenizer)
    rng.seed_start(job.training.seed, world.pipeline_rank)
    first, last = world.pipeline_rank == 0, world.is_last_stage
    module = pretrain_gpt.model_provider(first, last)
    config = module.config
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp, module)
    fields = {k: v for k, v in job.optimizer.items() if k in OptimizerConfig.__dataclass_fields__}
    optimizer = get_megatron_optimizer(OptimizerConfig(**fields), [model], use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    counts = sample_counts(job.train_iters, args)
    data = build_datasets(pretrain_gpt.train_valid_test_datasets_provider, counts, args, (), leads=world.position == 0)
    shape = job.shape
    order = SampleOrder(shape, len(data.train) if data.train is not None else 1)
    consumed = train_consumed(0, shape.global_batch_size)
    loader = MicrobatchLoader(data.train, order, inner=world.data_rank, hosted=None, consumed=consumed, threads=0)
    for step in range(1, job.train_iters + 1):
        started_s = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=pretrain_gpt.forward_step,
            data_iterator=loader(step, range(shape.microbatches)),
            model=[model],
            num_microbatches=shape.microbatches,
            seq_length=job.seq_length,
            micro_batch_size=shape.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        if record is not None:
            record.write(json.dumps({"step_time_s": time.perf_counter() - started_s}) + "\n")


if __name__ == "__main__":
    main()
