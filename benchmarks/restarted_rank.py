"""Runs one rank of plain megatron-core data parallelism under torchrun, which goes on from its newest checkpoint.

    torchrun ... restarted_rank.py FOLDER MEAN_GAP_S INTERVAL_S

goodput.py starts it. Rank 0 alone saves, as data-parallel ranks hold the same state: synchronously, with torch.save of
weights and optimizer (there is no dropout, so no random state is needed), into a file that replaces the one before,
without fsync. It does so when INTERVAL_S have passed since the last save; with INTERVAL_S 0, when sqrt(2 x seconds of a
save x MEAN_GAP_S) have, Young's and Daly's optimum, of the median save so far. While FOLDER/calm exists it does not
save. It writes a line of JSON for each step and each save to FOLDER/steps.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._goodput_model import GROUPS, plain_job

if TYPE_CHECKING:
    from benchmarks._plain_training import PlainTraining

SAVES_KEPT = 25
"""How many saves the median is taken over."""


class Saver:
    """Saves when it is time, and knows what saves cost in earlier job attempts."""

    def __init__(self, folder: Path, mean_gap_s: float, interval_s: float) -> None:
        self._path, self._failure_free = folder / "newest.pt", folder / "calm"
        self._mean_gap_s, self._fixed_s = mean_gap_s, interval_s
        self._costs_s: list[float] = []
        self._saved_s = -math.inf

    def load(self, training: PlainTraining) -> int:
        """Load the newest checkpoint, if there is one; returns its step, or 0."""
        import torch

        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=False)
        training.load(state)
        self._costs_s, self._saved_s = state["costs_s"], time.monotonic()
        return int(state["step"])

    def maybe_save(self, training: PlainTraining, step: int) -> dict[str, Any] | None:
        """Save if it is time; returns what is to be recorded of it."""
        import torch

        if time.monotonic() - self._saved_s < self._interval_s() or (self._failure_free.exists() and self._costs_s):
            return None
        began_s = time.monotonic()
        unfinished = self._path.with_suffix(".unfinished")
        torch.save({**training.state(), "step": step, "costs_s": self._costs_s}, unfinished)
        unfinished.replace(self._path)
        self._saved_s = time.monotonic()
        self._costs_s = [*self._costs_s[1 - SAVES_KEPT :], self._saved_s - began_s]
        return {"saved": step, "save_s": self._costs_s[-1], "interval_s": self._interval_s()}

    def _interval_s(self) -> float:
        if self._fixed_s or not self._costs_s:
            return self._fixed_s
        return math.sqrt(2 * statistics.median(self._costs_s) * self._mean_gap_s)


def main() -> None:
    """Train until killed."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job, args = plain_job(rank)
    import torch.distributed as dist

    from benchmarks._plain_training import PlainTraining
    from spare_megatron.megatron_adapter.model.world import init_group_world

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store = dist.PrefixStore(f"job attempt {restarts}", dist.TCPStore(address, port, is_master=False))
    world = init_group_world(job.shape, rank, store, one_gloo_device=False)  # as torch makes them
    training = PlainTraining(job, args, world, job.shape)
    saver = Saver(folder, float(sys.argv[2]), float(sys.argv[3]))
    first = saver.load(training) + 1
    with (folder / "steps.jsonl").open("a", buffering=1) as record:
        for step in range(first, job.train_iters + 1):
            training.compute(step)
            training.update()
            if rank == 0:
                record.write(json.dumps({"step": step, "groups": GROUPS, "restarts": restarts}) + "\n")
                saved = saver.maybe_save(training, step)
                if saved is not None:
                    record.write(json.dumps(saved) + "\n")


if __name__ == "__main__":
    main()
