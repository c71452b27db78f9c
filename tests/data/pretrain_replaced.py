"""pretrain_gpt.py whose first rank, once it has read a checkpoint, gives its name to the one in ``$OTHER``."""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

undisturbed = group_checkpoint.dist_checkpointing.load


def load(state, directory, *args, **words):
    found = undisturbed(state, directory, *args, **words)
    other = os.environ.pop("OTHER", "")
    if other and os.environ["SPARE_POSITION"] == "0":
        os.rename(directory, f"{other}.before")
        os.rename(other, directory)
    return found


if __name__ == "__main__":
    group_checkpoint.dist_checkpointing.load = load
    runpy.run_path(str(Path(__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
