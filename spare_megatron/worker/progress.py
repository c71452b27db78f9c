"""``--log-progress`` writes Megatron's progress.txt into ``--save``: a line for each start and for each checkpoint.

Tokens and floating-point operations are those of committed steps, so a step that was patched counts once.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from spare_megatron.runtime.disk import words
from spare_megatron.worker.job_arguments import JobArguments

log = logging.getLogger(__name__)


def append_progress(job: JobArguments, text: str) -> None:
    """Append a line to progress.txt: the time, the Slurm job, the number of ranks, and ``text``."""
    if job.checkpoint.save is None or not job.logging.log_progress:
        return
    path = Path(job.checkpoint.save) / "progress.txt"
    stamp, slurm_job = time.strftime("%Y-%m-%d %H:%M:%S"), os.environ.get("SLURM_JOB_ID", "")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{stamp}\tJob ID: {slurm_job}\t# GPUs: {job.shape.world_size}\t{text}\n")
    except OSError as error:
        log.warning("%s cannot be written: %s; this line is lost: %s", path, words(error), text)


def saved_text(job: JobArguments, step: int, consumed_samples: int, flops: float) -> str:
    """The text for a saved checkpoint; ``flops`` are the operations of one step of the full batch."""
    steps = consumed_samples / job.shape.global_batch_size
    return (
        f"Saved checkpoint\tIteration: {step}\tFloating-point operations: {flops * steps:.2e}\t"
        f"Tokens (in billions): {consumed_samples * job.seq_length / 1e9:.2f}"
    )
