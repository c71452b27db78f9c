"""The job that all systems of goodput.py train, and how their ranks of plain megatron-core begin."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from spare_megatron.worker.job_arguments import JobArguments, parse_job

ROOT = Path(__file__).resolve().parents[1]
GROUPS = 4
"""Groups of one rank; for plain megatron-core, data-parallel ranks; for torchft, replicas."""
BATCH = 24
"""Samples of a step."""
FLAGS = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "256"),
    *("--max-position-embeddings", "256", "--micro-batch-size", "1", "--global-batch-size", str(BATCH)),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0", "--train-iters", "20000", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--split", "100,0,0", "--eval-iters", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-workers", "0", "--log-interval", "1000"),
)


def environment(scratch: Path) -> dict[str, str]:
    """That of every process of a system, whose temporary files go to ``scratch``."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TMPDIR": str(scratch)}
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}


def plain_job(rank: int, flags: Sequence[str] = FLAGS) -> tuple[JobArguments, Namespace]:
    """The job as one world of ``GROUPS`` data-parallel ranks."""
    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": str(rank), "SPARE_NUM_GROUPS": "1"}
    return parse_job([*flags, "--spare-inner-data-parallel", str(GROUPS)], environ)
