"""Runs one rank of a plain megatron-core job, with which functional_configs.py compares jobs of the same flags.

Beside what ``_plain_training.py`` does, learning rate and weight decay follow megatron-core's own scheduler, and a
distributed optimizer may have several instances, each of which splits its state over its own data-parallel ranks.
Rank 0 writes a line of JSON for each step: ``loss``, ``grad_norm``, ``lr`` and ``skipped``, as in metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spare_megatron.worker.job_arguments import JobArguments, parse_job

if TYPE_CHECKING:
    from spare_megatron.megatron_adapter.model.world import GroupWorld

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """``plain_losses.py OUTPUT RANK WORLD INSTANCES FLAGS...``; FLAGS ask for one group with inner data parallelism."""
    output, (rank, world_size, instances) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": str(rank), "SPARE_NUM_GROUPS": "1"}
    job, args = parse_job(sys.argv[5:], environ)
    import torch.distributed as dist

    from benchmarks._plain_training import PlainTraining

    if not job.optimizer["use_distributed_optimizer"]:  # there is none for Muon
        instances = 1
    world = _world(job, rank, dist.FileStore(str(output.with_suffix(".store")), world_size), instances)
    training = PlainTraining(job, args, world, job.shape, instances=instances)
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

    schedule = OptimizerParamScheduler(training.optimizer, **job.scheduler)
    with output.open("a", buffering=1) if rank == 0 else contextlib.nullcontext() as record:
        for step in range(1, job.train_iters + 1):
            reports = training.compute(step)
            updated, grad_norm = training.update()
            if updated:
                schedule.step(increment=training.batch_size(step))
            line = {
                "loss": _loss(reports if world.tensor_rank == 0 else []),
                "grad_norm": grad_norm,
                "lr": get_canonical_lr_for_logging(training.optimizer.param_groups),
                "skipped": int(not updated),
            }
            if record is not None:
                record.write(json.dumps(line) + "\n")
    dist.barrier()
    os._exit(0)


def _world(job: JobArguments, rank: int, store: Any, instances: int) -> GroupWorld:
    """megatron-core's parallel state over all ranks, with so many instances of a distributed optimizer."""
    import torch.distributed as dist

    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core import parallel_state as state

    from spare_megatron.megatron_adapter.model.world import world_here

    if not getattr(state, "HAVE_EINOPS", True):
        state.HAVE_EINOPS, state.einops = True, SimpleNamespace(rearrange=_rearranged)
    shape, settings, timeout_s = job.shape, job.settings(0), 600.0
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=shape.world_size, timeout=timedelta(seconds=timeout_s)
    )
    state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=settings.virtual_pipeline,
        expert_model_parallel_size=settings.expert,
        expert_tensor_parallel_size=settings.expert_tensor,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
        order="tp-cp-ep-pp-dp" if job.training.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    return world_here(shape, rank, settings.virtual_pipeline, timeout_s)


def _rearranged(ranks: Any, pattern: str, **sizes: int) -> Any:
    """What megatron-core asks of the package einops where the optimizer has instances, which this package does not
    need."""
    assert pattern == "(l s u) -> (l u) s", pattern
    return ranks.reshape(sizes["l"], sizes["s"], sizes["u"]).swapaxes(1, 2).reshape(-1, sizes["s"])


def _loss(reports: list[dict[str, Any]]) -> float:
    """The loss as Megatron logs it: the sum over the tokens of the batch over their number."""
    import torch
    import torch.distributed as dist

    total = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        total += report["lm loss"].double()
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
