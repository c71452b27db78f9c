"""A training script without Megatron: a torch module, a torch optimizer and the engine beside this file.

    spare-launch --num-groups 4 --group-size 1 --inject sigkill:group=2,step=20,at=reduce examples/torch_only/train.py

Group 2 is killed while it sums its gradients in step 20; the others compute its pieces and commit the step.
spare-launch starts it again, and it joins while they train.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch_engine import TorchEngine

from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import place_of, world_hint
from spare_megatron.placement import build_placement
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.worker.fault_injection import Injector
from spare_megatron.worker.worker import RankJob, train_rank

PIECES, SAMPLES, WIDTH, SEED = 4, 16, 64, 1
"""Pieces of a shard, samples of a piece, width of the model, and the seed of weights and data."""


def build(groups: int) -> tuple[torch.nn.Module, Callable[[int, int], torch.Tensor]]:
    """The model, and its loss summed over the samples of a piece of a step."""
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    teacher = torch.randn(8)

    def loss_of(step: int, piece: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED + step * groups * PIECES + piece)
        inputs = torch.randn(SAMPLES, 8, generator=generator)
        return (model(inputs).squeeze(1) - torch.sin(inputs @ teacher)).square().sum()

    return model, loss_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=1e-3)
    options, _ = parser.parse_known_args()  # --spare-... flags are for the launcher
    groups = world_hint(os.environ).num_groups
    if groups is None:
        parser.error("start this script by spare-launch --num-groups N --group-size 1")
    place = place_of(os.environ, groups, group_size=1, run_dir=None)

    torch.set_num_threads(1)
    model, loss_of = build(groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    batch = groups * PIECES * SAMPLES
    description = JobDescription(
        identity={"script": "torch_only", "steps": options.steps, "lr": options.lr},
        train_iters=options.steps,
        log_interval=10,
        global_batch_size=batch,
        world_size=groups,
    )
    spec = JobSpec(
        num_groups=groups,
        pieces_per_shard=PIECES,
        offsets=build_placement(groups, min(2, groups)).offsets,
        granularity="microbatch",
        first_step=0,
        last_step=options.steps,
        min_groups=1,
        fingerprint=description.fingerprint,
        heartbeat_timeout_s=description.timeouts.heartbeat_timeout_s,
        adoption=True,
    )
    job = RankJob(place, spec, description, backend="gloo", device=torch.device("cpu"))
    injector = Injector.from_environment(os.environ, place)
    return int(train_rank(job, TorchEngine(optimizer, loss_of, batch), None, injector))


if __name__ == "__main__":
    raise SystemExit(main())
