"""Builds the data sets of a rank while the ranks of other groups do the same on the same files.

The user's provider builds inside the group's world, as under Megatron: rank 0 writes cached indices, the other ranks
of the group wait and read them. Two rules hold between groups. Index files appear under their names only when complete
(:func:`~spare_megatron.megatron_adapter.data.datasets.whole_files_only`), so a race costs work and never a wrong
read. And one group builds first: the groups' rank 0 take turns in holding a lock in the cache directory, until a marker
file says that the indices of these arguments are there. On a file system without locks, or when the lock's holder
takes longer than WAIT_MAX_S, several groups build the same indices, which costs only work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.data_files import DataFile
from spare_megatron.data.stale_indices import drop_stale
from spare_megatron.flags.batch_flags import train_samples
from spare_megatron.flags.blends import blends

log = logging.getLogger(__name__)

DatasetsProvider = Callable[..., Any]
"""Megatron's provider: (numbers of training, validation and test samples[, vp_stage]) -> three data sets."""

POLL_S = 0.05
WAIT_MAX_S = 600.0


@dataclass(frozen=True)
class Datasets:
    """The data sets of this rank; None for one that it does not need."""

    train: Any = None
    valid: Any = None
    test: Any = None


def sample_counts(train_iters: int, args: Namespace) -> tuple[int, int, int]:
    """Numbers of samples that a job draws for training, validation and test, as Megatron counts them; training's along
    the job's plan of batches."""
    batch, rounds = args.global_batch_size, 1
    if args.eval_interval is not None:
        rounds += train_iters // args.eval_interval
    return train_samples(args), rounds * args.eval_iters * batch, args.eval_iters * batch


def build_datasets(
    provider: DatasetsProvider,
    counts: tuple[int, int, int],
    args: Namespace,
    files: Sequence[DataFile] = (),
    *,
    leads: bool,
    chunks: int | None = None,
    tensor_rank: int = 0,
) -> Datasets:
    """The data sets that the user's provider makes for this rank; a collective call of the group's ranks.

    ``leads`` is true on the rank of the group that writes indices (rank 0 of its world). With virtual stages the
    provider is called once for each of ``chunks`` model chunks, in order; a rank needs data for at most one of them.
    A provider without ``is_distributed`` is called on tensor-parallel rank 0 only, as under Megatron.
    """
    if not getattr(provider, "is_distributed", False) and tensor_rank != 0:
        return Datasets()
    built = Datasets()
    with built_by_one(cache_directory(args), fingerprint(args, counts, files)) if leads else contextlib.nullcontext():
        if leads:
            drop_stale(args.data_cache_path, files)
        for stage in [None] if chunks is None else range(chunks):
            given = call_provider(provider, counts, stage, args)
            if len(given) != 3:
                raise ConfigError(f"the data set provider returned {len(given)} data sets, but must return three")
            if built == Datasets():
                built = Datasets(*given)
    return built


def build_enough(
    build: Callable[[int], Datasets], counted: int, needed: int, any_rank: Callable[[bool], bool]
) -> Datasets:
    """The data sets that ``build`` makes of the training samples that Megatron counts, whose order depends on that
    number; of ``needed`` ones only where there are too few for them.

    A job needs more than Megatron counts if it goes on with smaller batches than those of its checkpoint, or if the
    last step of a schedule goes beyond --train-samples. ``any_rank`` says whether something holds on a rank of the
    group; collective, where more are needed than counted."""
    built = build(counted)
    if needed <= counted or not any_rank(built.train is not None and len(built.train) < needed):
        return built
    return build(needed)


def call_provider(provider: DatasetsProvider, counts: tuple[int, int, int], stage: int | None, args: Namespace) -> Any:
    """The provider's three data sets; an OSError while indices are written becomes a ConfigError of one sentence."""
    from spare_megatron.megatron_adapter.data.datasets import only_what_is_drawn, whole_files_only

    parameters = inspect.signature(provider).parameters
    takes = "vp_stage" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = {"vp_stage": stage} if takes and stage is not None else {}
    try:
        with whole_files_only(), only_what_is_drawn():
            return provider(list(counts), **options)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno is not None and cache_directory(args) is not None:
            raise ConfigError(
                f"the sample indices cannot be written to {cause.filename or cache_directory(args)}: {cause.strerror}; "
                "give a directory that can be written, with --data-cache-path"
            ) from error
        raise


def cache_directory(args: Namespace) -> Path | None:
    """Where megatron-core keeps indices: the directory of --data-cache-path, or ``cache`` below the first prefix.

    None without data files.
    """
    if args.data_cache_path is not None:
        return Path(args.data_cache_path)
    blend, per_split = blends(args)
    parts = [blend, *(per_split or [])]
    first = next((part[0][0] for part in parts if part), None)
    return None if first is None else Path(first) / "cache"


def fingerprint(args: Namespace, counts: tuple[int, int, int], files: Sequence[DataFile]) -> str:
    """Digest of the flags and files that the indices depend on, 16 hexadecimal digits.

    It may miss something that only a provider knows: it decides who waits for whom, never what is read.
    """
    names = (
        "seq_length",
        "seed",
        "split",
        "tokenizer_type",
        "tokenizer_model",
        "vocab_size",
        "mid_level_dataset_surplus",
    )
    facts = {name: getattr(args, name) for name in names}
    facts |= {"blends": blends(args), "counts": counts}
    facts |= {"files": [(file.prefix, file.sequences, file.tokens, file.layout) for file in files]}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def built_by_one(directory: Path | None, name: str) -> Iterator[None]:
    """A context in which to build the indices of fingerprint ``name``.

    One process at a time is let in, until a first one has left it and so marked the indices as built; then all are,
    without waiting.
    """
    if directory is None:
        yield
        return
    marker = directory / f"spare-indices-{name}"
    if marker.exists():
        yield
        return
    with locked(directory / "spare-indices.lock", marker):
        yield
    with contextlib.suppress(OSError):
        marker.touch()


@contextlib.contextmanager
def locked(path: Path, marker: Path) -> Iterator[None]:
    """Hold the file lock ``path``; go on without it as soon as ``marker`` exists, after WAIT_MAX_S seconds, and where
    the file system has no locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield  # megatron-core says what cannot be written, if it has to write at all
        return
    try:
        wait_for_lock(handle, path, marker)
        yield
    finally:
        os.close(handle)


def wait_for_lock(handle: int, path: Path, marker: Path) -> None:
    """Wait until this process has the lock of the open file ``handle``, or :func:`locked` is to go on without it."""
    deadline = time.monotonic() + WAIT_MAX_S
    while not marker.exists():
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                log.warning("%s has been held for %.0f s; this group builds its indices as well", path, WAIT_MAX_S)
                return
            time.sleep(POLL_S)
        except OSError as error:
            log.info("%s cannot be locked (%s); each group builds its indices", path, error.strerror)
            return
