"""pretrain_gpt.py whose group 2 has no room for state shard 0, not even for a moment; what passes through a group does
so in many parts."""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from spare_megatron.megatron_adapter.model.optimizer_shards import OptimizerShards
from spare_megatron.worker import shard_gather

unlimited = OptimizerShards.state


def state(self, shard, *, mine):
    if (os.environ["SPARE_GROUP"], shard, mine) == ("2", 0, False):
        raise torch.OutOfMemoryError("no room for state shard 0")
    return unlimited(self, shard, mine=mine)


if __name__ == "__main__":
    OptimizerShards.state, shard_gather.WINDOW = state, 1000
    runpy.run_path(str(Path(__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
