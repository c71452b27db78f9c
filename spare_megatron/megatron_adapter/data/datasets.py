"""megatron-core's data sets, with cached indices that many groups can build at the same time.

megatron-core lets rank 0 of *its* world write the cached sample indices while the others wait. Here each group is such
a world, so N ranks may write the same files at the same time; the contents are the same, but a reader may find a partly
written file. :func:`whole_files_only` makes each index file appear only when it is complete.

Promises: importing this module imports megatron-core (with the CPU shims where there is no CUDA).
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

from megatron.core.datasets import blended_dataset, gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

__all__ = [
    "BlendedMegatronDatasetBuilder",
    "DType",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MockGPTDataset",
    "Split",
    "only_what_is_drawn",
    "whole_files_only",
]

_lock = threading.RLock()


def save_whole(path: str, array: Any, **options: Any) -> None:
    """``numpy.save`` to a file that appears complete: written beside it, then renamed."""
    final = Path(path)
    part = final.with_name(f".{final.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            numpy.save(file, array, **options)
            file.flush()
            os.fsync(file.fileno())
        part.replace(final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_files_only() -> Iterator[None]:
    """Inside, megatron-core's data sets write their index files with :func:`save_whole`.

    Their modules see a copy of numpy with that ``save``; numpy itself is not changed.
    """
    stand_in = types.ModuleType("numpy")
    stand_in.__dict__.update(numpy.__dict__)
    stand_in.save = save_whole  # type: ignore[attr-defined]
    with _lock:
        gpt_dataset.numpy = blended_dataset.numpy = stand_in
        try:
            yield
        finally:
            gpt_dataset.numpy = blended_dataset.numpy = numpy


@contextlib.contextmanager
def only_what_is_drawn() -> Iterator[None]:
    """Inside, megatron-core builds no mock data of which no sample is wanted (a start is 0.2 s shorter for each such
    split), as it builds none of real data for a split of 0."""

    def wanted(self: Any, path: str | None, split: list[Any], sizes: list[int], *more: Any, **options: Any) -> Any:
        if self.config.mock:
            split = [part if size != 0 else None for part, size in zip(split, sizes, strict=True)]
        return build(self, path, split, sizes, *more, **options)

    with _lock:
        build = BlendedMegatronDatasetBuilder._build_megatron_dataset_splits
        BlendedMegatronDatasetBuilder._build_megatron_dataset_splits = wanted  # type: ignore[method-assign]
        try:
            yield
        finally:
            BlendedMegatronDatasetBuilder._build_megatron_dataset_splits = build  # type: ignore[method-assign]
