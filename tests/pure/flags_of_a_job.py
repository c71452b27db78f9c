"""A small job's flags, for tests that change one thing of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from spare_megatron.worker.job_arguments import JobArguments, parse_job

SMALL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --train-iters 20 "
    "--lr 1e-3"
)


def without(words: list[str], *names: str) -> list[str]:
    """The words without these flags and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word in names
        if not dropping:
            kept.append(word)
    return kept


def job_of(
    extra: str = "", environ: Mapping[str, str] | None = None, drop: tuple[str, ...] = ()
) -> tuple[JobArguments, Namespace]:
    """The small job with ``extra`` flags behind its own and without the flags ``drop``."""
    return parse_job([*without(SMALL.split(), *drop), *extra.split()], environ)


def launched(groups: int, group: int = 0, position: int = 0) -> dict[str, str]:
    """The environment that spare-launch gives a rank."""
    return {
        "SPARE_NUM_GROUPS": str(groups),
        "SPARE_GROUP": str(group),
        "SPARE_POSITION": str(position),
        "SPARE_INCARNATION": "0",
        "SPARE_RUN_DIR": "run",
    }
