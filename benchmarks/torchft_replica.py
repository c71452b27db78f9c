"""Runs one replica of torchft: pretrain_gpt.py's model with megatron-core's optimizer, gradients averaged by a Manager.

    torchft_replica.py REPLICA LIGHTHOUSE FOLDER TIMEOUT_S

goodput.py starts it, with a Python that has torchft. A replica is one rank with a world of its own; its samples are
those of data-parallel rank REPLICA of plain megatron-core in the step that the Manager names. Weights begin alike by
their seed, the quorum is asynchronous (torchft's default) and a replica that was started again is healed over HTTP.
After each committed step it writes a line of JSON to FOLDER/replica-REPLICA.jsonl.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._goodput_model import BATCH, GROUPS, plain_job

MANAGER_S = 10.0
"""The Manager's time-out, for votes and for healing; gloo's own is TIMEOUT_S."""


def main() -> None:
    """Train until killed."""
    replica, lighthouse, folder, timeout_s = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
    job, args = plain_job(0)
    import torch.distributed as dist

    from benchmarks._plain_training import PlainTraining
    from spare_megatron.megatron_adapter.model.world import init_group_world

    alone = replace(job.shape, inner_data=1, global_batch_size=BATCH // GROUPS)
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = init_group_world(alone, 0, own, one_gloo_device=False)  # as torch makes them
    training = PlainTraining(job, args, world, job.shape, replica)

    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Made last: once its heartbeats come, a quorum that has lost a member waits for this replica too.
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout_s)),
        load_state_dict=training.load,
        state_dict=training.state,
        min_replica_size=1,
        timeout=timedelta(seconds=MANAGER_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    with (folder / f"replica-{replica}.jsonl").open("a", buffering=1) as record:
        while manager.current_step() < job.train_iters:
            manager.start_quorum()
            training.compute(manager.current_step() + 1)
            for work in [manager.allreduce(buffer) for buffer in training.gradients()]:
                work.wait()
            if manager.should_commit():
                training.update()
                record.write(json.dumps({"step": manager.current_step(), "groups": manager.num_participants()}) + "\n")


if __name__ == "__main__":
    main()
