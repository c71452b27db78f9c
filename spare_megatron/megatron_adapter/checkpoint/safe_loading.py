"""Opens the files of checkpoints and caches so that nothing in them is run.

torch's ``FileSystemReader.read_metadata`` unpickles ``.metadata``, its ``DefaultLoadPlanner`` unpickles the objects
beside the tensors, megatron-core up to 0.18 unpickles ``common.pt`` (0.17 whatever it names), and its data sets
unpickle cached index maps. :func:`install` changes these four places for the whole process, whoever calls them; other
callers' own ``torch.load`` and ``numpy.load`` are left as they are. Our own code uses :class:`SafeReader` and
:func:`load_weights` by name.

May assume: nothing about the files. Promises: an object in a file is of a class on a list, or the file is refused with
a sentence that names the file and what it named; :func:`install` may be called again.
"""

from __future__ import annotations

import functools
import io
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import (
    ForbiddenPickleError,
    Inert,
    RestrictedUnpickler,
)

_ENUMS = ("AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope")
"""Of megatron-core's transformer settings; all but the first came after 0.16."""


def harmless_classes() -> list[Any]:
    """Classes for ``torch.serialization.safe_globals``: enums, flags, and those of which numpy's random states
    consist."""
    import argparse
    import codecs
    import signal

    import numpy as np
    from megatron.core.enums import ModelType
    from megatron.core.transformer import enums
    from numpy._core.multiarray import _reconstruct

    named = [getattr(enums, name) for name in _ENUMS if hasattr(enums, name)]
    of_numpy = [np.ndarray, np.dtype, _reconstruct, type(np.dtype(np.uint32))]
    older = (_reconstruct, "numpy.core.multiarray._reconstruct")  # its name in files of numpy 1
    return [argparse.Namespace, signal.Signals, ModelType, *named, *of_numpy, older, codecs.encode]


_OF_METADATA = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_OF_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""megatron-core since 0.17 may keep the plans of all ranks with the metadata."""
_RECIPES = (
    *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
    *("Format", "_FormatHelper", "MMParams", "QParams"),
)
_NAMED = re.compile(r"(?:GLOBAL|global:?) (?:GLOBAL )?([\w.]+)")
_MEGATRON = ("megatron.", "torch.distributed.checkpoint")
"""How the names of modules begin whose calls load files of checkpoints and caches."""


def _types_of_torch() -> dict[tuple[str, str], Any]:
    kinds = (torch.dtype, torch.layout)
    types = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, kinds)}
    layout = ("torch.serialization", "_get_layout")
    return {**types, ("torch", "Size"): torch.Size, layout: torch.serialization._get_layout}


@functools.cache
def metadata_classes() -> Mapping[tuple[str, str], Any]:
    """(module, name) -> class, of what the ``.metadata`` of megatron-core 0.16 to 0.19 consists of. The caller has
    called ``install_cpu_shims``."""
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    found = _types_of_torch()
    stored = (filesystem, ("_StorageInfo", "_StoragePrefix"))
    for module, names in ((of_torch, _OF_METADATA), (plans, _OF_PLANS), stored):
        found |= {(module.__name__, name): getattr(module, name) for name in names if hasattr(module, name)}
    found["torch.distributed.checkpoint.filesystem", "StorageMeta"] = StorageMeta
    found["torch.distributed.checkpoint.planner", "_MEM_FORMAT_ENCODING"] = of_torch._MEM_FORMAT_ENCODING
    for name in ("pathlib", "pathlib._local"):  # the latter since Python 3.13
        found |= {(name, "PosixPath"): pathlib.PurePosixPath, (name, "PurePosixPath"): pathlib.PurePosixPath}
    found["collections", "OrderedDict"] = dict
    for name in ("MCoreSavePlan", "MCoreMetadata"):
        if hasattr(strategy, name):
            found[strategy.__name__, name] = getattr(strategy, name)
    return found


def read_metadata(directory: Path) -> Metadata:
    """What ``.metadata`` of a checkpoint says; ForbiddenPickleError where it names another class or a file outside."""
    path = directory / ".metadata"
    with path.open("rb") as file:
        try:
            metadata = RestrictedUnpickler(file, metadata_classes()).load()
        except ForbiddenPickleError as error:
            raise ForbiddenPickleError(f"{path} is refused: {error}") from None
    if not all(hasattr(metadata, name) for name in ("state_dict_metadata", "storage_data")):
        raise ForbiddenPickleError(f"{path} is refused: it holds a {type(metadata).__name__}, and no metadata")
    for place in (metadata.storage_data or {}).values():
        name = PurePosixPath(str(place.relative_path))
        if name.is_absolute() or ".." in name.parts:
            raise ForbiddenPickleError(f"{path} is refused: it names {name}, a file outside of the checkpoint")
    return cast(Metadata, metadata)


def _read_metadata(self: FileSystemReader, *_args: Any, **options: Any) -> Metadata:
    """In the place of torch's ``FileSystemReader.read_metadata``."""
    if options.get("rank") is not None:
        raise ForbiddenPickleError(f"{self.path} has metadata of single ranks, which no Megatron checkpoint has")
    metadata = read_metadata(Path(self.path))
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    cast(StorageMeta, metadata.storage_meta).load_id = self.load_id
    return metadata


class SafeReader(FileSystemReader):
    """torch's reader of checkpoints, with :func:`read_metadata`."""

    read_metadata = _read_metadata


def refusal(where: object, error: Exception) -> ForbiddenPickleError:
    """What is said of a file in place of torch's own advice, which is to load it without a check."""
    named = _NAMED.search(str(error))
    what = f"it names {named[1]}, which no checkpoint has there" if named else "it is damaged or no file of torch"
    return ForbiddenPickleError(f"{where} is refused: {what}; nothing of it was run")


def load_weights(path: Path, *, mmap: bool = False) -> Any:
    """``torch.load`` of a file, for tensors, plain values and the classes of :func:`allow_harmless`.

    ForbiddenPickleError for others.
    """
    try:
        return _torch_load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(path, error) from None


_torch_load: Callable[..., Any] = torch.load
_numpy_load: Callable[..., Any] = numpy.load


def _asked_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_MEGATRON)


def _load(file: Any, *args: Any, **options: Any) -> Any:
    """In the place of ``torch.load``: megatron-core and torch's checkpoints get weights only."""
    if not _asked_by_megatron():
        return _torch_load(file, *args, **options)
    try:
        return _torch_load(file, *args, **{**options, "weights_only": True})
    except pickle.UnpicklingError as error:
        where = "an object of the checkpoint" if isinstance(file, io.IOBase) else file
        raise refusal(where, error) from None


def _load_array(file: Any, *args: Any, **options: Any) -> Any:
    """In the place of ``numpy.load``: megatron-core's data sets get arrays of numbers only."""
    if not _asked_by_megatron():
        return _numpy_load(file, *args, **options)
    try:
        return _numpy_load(file, *args, **{**options, "allow_pickle": False})
    except (ValueError, EOFError) as error:  # the latter of an empty file
        raise ConfigError(
            f"{file} is no array of numbers ({' '.join(str(error).split())[:120]}); remove it, and the index is built "
            "again"
        ) from None


def install() -> None:
    """Change the four places of the module's description in this process."""
    if torch.load is _load:  # type: ignore[comparison-overlap]
        return
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]
    torch.load = _load
    numpy.load = _load_array
    allow_harmless()


def allow_harmless() -> None:
    """Let ``weights_only`` loads have the harmless classes of Megatron's files, beside those of megatron-core's own
    list."""

    there = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([one for one in harmless_classes() if one not in there])


def _tensor_of(data: bytes) -> Any:
    return _torch_load(io.BytesIO(data), map_location="cpu", weights_only=True)


def check_extra_states(state: Mapping[str, Any], where: Path) -> None:
    """ForbiddenPickleError where an ``_extra_state`` of transformer-engine, which unpickles its bytes itself, names
    what transformer-engine does not write."""
    import numpy._core.multiarray as multiarray

    allowed = _types_of_torch() | {
        ("collections", "OrderedDict"): dict,
        ("torch._utils", "_rebuild_tensor_v2"): Inert,
        ("torch._tensor", "_rebuild_from_type_v2"): Inert,
        ("torch.storage", "UntypedStorage"): Inert,
        ("torch.storage", "_load_from_bytes"): _tensor_of,
        ("megatron.core.safe_globals", "safe_load_from_bytes"): _tensor_of,
        ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
        ("numpy", "ndarray"): numpy.ndarray,
        ("numpy", "dtype"): numpy.dtype,
        ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): Inert,
        **{("transformer_engine.common.recipe", name): Inert for name in _RECIPES},
    }
    for name, value in state.items():
        if name.endswith("_extra_state") and torch.is_tensor(value) and value.numel():
            data = value.detach().cpu().numpy().tobytes()
            try:
                RestrictedUnpickler(io.BytesIO(data), allowed).load()
            except Exception as error:  # a damaged pickle may raise anything
                raise ForbiddenPickleError(f"{where}: {name} is refused: {error}") from None
