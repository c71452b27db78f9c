"""Runs one rank of a plain megatron-core job, with which functional_configs.py compares jobs of the same flags.

Beside what ``_plain_training.py`` does, learning rate and weight decay follow megatron-core's own scheduler. Rank 0
writes a line of JSON for each step: ``loss``, ``grad_norm``, ``lr`` and ``skipped``, as metrics.jsonl names them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from spare_megatron.trainer.job_arguments import parse_job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """``plain_losses.py OUTPUT RANK WORLD FLAGS...``; FLAGS ask for one group with inner data parallelism."""
    output, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": str(rank), "SPARE_NUM_GROUPS": "1"}
    job, args = parse_job(sys.argv[4:], environ)
    import torch.distributed as dist

    from benchmarks._plain_training import PlainTraining
    from spare_megatron.megatron_adapter.model.world import init_group_world

    settings = job.settings(0)
    world = init_group_world(
        job.shape,
        rank,
        dist.FileStore(str(output.with_suffix(".store")), world_size),
        virtual_pipeline=settings.virtual_pipeline,
        expert=settings.expert,
        expert_tensor=settings.expert_tensor,
        pipeline_before_data=job.training.use_tp_pp_dp_mapping,
    )
    training = PlainTraining(job, args, world, job.shape)
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
