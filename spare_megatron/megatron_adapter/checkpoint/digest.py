"""Computes a checkpoint's digest: a sha256 over all model tensors by logical name, for any parallel layout.

May assume: the directory has one checkpoint in torch_dist format. Promises: no process group is needed, and no more
than ``TOGETHER_BYTES`` of tensors are in memory, or one tensor. Optimizer state is included on request, schedule and
flags never.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.manifest_version import read_whole
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import SafeReader, read_metadata
from spare_megatron.megatron_adapter.shims import install_cpu_shims

TOGETHER_BYTES = 1 << 28
"""Tensors are read so many bytes at a time, because each read goes through the metadata of all of them."""


def model_tensors(directory: str | Path, *, optimizer: bool = False) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of a checkpoint's model tensors (with ``optimizer`` also its moments), sorted by name.

    ConfigError when it cannot be read.
    """
    install_cpu_shims()
    try:
        metadata = read_metadata(Path(directory))
    except ForbiddenPickleError as error:
        raise ConfigError(f"{error}; do not use this checkpoint") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigError(
            f"{directory} has no readable checkpoint in torch_dist format ({type(error).__name__}); "
            "give the directory of one iteration, such as iter_0000010"
        ) from error
    return {
        name: entry
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata) and (optimizer or "optimizer.state." not in name)
    }


def digest(directory: str | Path, *, optimizer: bool = False) -> str:
    """sha256 (hex) over name, dtype, shape and bytes of every tensor that :func:`model_tensors` names.

    ConfigError where a job replaces or removes the checkpoint meanwhile.
    """
    with read_whole(Path(directory)):
        return _digest(directory, model_tensors(directory, optimizer=optimizer))


def _digest(directory: str | Path, wanted: Mapping[str, TensorStorageMetadata]) -> str:
    total = hashlib.sha256()
    for entries in _together(wanted):
        tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in entries.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(tensors, storage_reader=SafeReader(str(directory)), no_dist=True)
        for name, tensor in tensors.items():
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.contiguous().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()


def _together(entries: Mapping[str, TensorStorageMetadata]) -> Iterator[dict[str, TensorStorageMetadata]]:
    """The tensors in their order, in parts that are read at once."""
    part: dict[str, TensorStorageMetadata] = {}
    size = 0
    for name, entry in entries.items():
        more = entry.size.numel() * entry.properties.dtype.itemsize
        if part and size + more > TOGETHER_BYTES:
            yield part
            part, size = {}, 0
        part[name] = entry
        size += more
    if part:
        yield part
