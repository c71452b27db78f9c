"""Runs one rank of plain megatron-core data parallelism, with which step_overhead.py compares jobs of the same flags.

megatron-core's own DistributedDataParallel reduces the gradients over the data-parallel ranks of one world; there
are no groups, no coordinator and no votes. Model, data and forward step are pretrain_gpt.py's. Each process group has a
gloo device of its own, as torch makes them, or all have one, as with us. Rank 0 writes a line of JSON for each step,
``{"step_time_s": SECONDS}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from spare_megatron.worker.job_arguments import parse_job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """``plain_ddp.py OUTPUT RANK WORLD PORT {own,one} FLAGS...``: the gloo devices; FLAGS ask for one group with inner
    data parallelism."""
    output, rank, world_size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    one_device = {"own": False, "one": True}[sys.argv[5]]
    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": str(rank), "SPARE_NUM_GROUPS": "1"}
    job, args = parse_job(sys.argv[6:], environ)
    import torch.distributed as dist

    from benchmarks._plain_training import PlainTraining
    from spare_megatron.megatron_adapter.model.world import init_group_world

    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    world = init_group_world(job.shape, rank, store, one_gloo_device=one_device)
    training = PlainTraining(job, args, world, job.shape)
    with Path(output).open("a", buffering=1) if rank == 0 else contextlib.nullcontext() as record:
        for step in range(1, job.train_iters + 1):
            started_s = time.perf_counter()
            training.compute(step)
            training.update()
            if record is not None:
                record.write(json.dumps({"step_time_s": time.perf_counter() - started_s}) + "\n")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
