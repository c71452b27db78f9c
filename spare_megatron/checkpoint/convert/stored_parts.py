"""Reads single tensors, or a part of one, from a checkpoint of torch.distributed.checkpoint in one process.

Its files are checked before anything is read: those of Megatron-LM have no manifest that says how long they are. Each
read opens them anew, and a job may replace the checkpoint meanwhile, which is refused.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.manifest_version import refuse_replaced, version_of
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import SafeReader
from spare_megatron.megatron_adapter.shims import install_cpu_shims


class StoredTensors:
    """The tensors of one checkpoint."""

    tensors: dict[str, TensorStorageMetadata]
    """Name -> size and type."""

    def __init__(self, directory: Path) -> None:
        """ConfigError where the checkpoint is damaged."""
        self._directory = directory
        self._version = version_of(directory)
        install_cpu_shims()
        self._reader = SafeReader(str(directory))
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, True)
        except ForbiddenPickleError as error:
            raise ConfigError(f"{error}; do not use this checkpoint") from None
        except Exception as error:  # a damaged pickle may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(f"{directory}/.metadata cannot be read ({reason}); use another checkpoint") from error
        self._check_sizes(metadata)
        self.tensors = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def _check_sizes(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            path = self._directory / name
            if not path.is_file():
                raise ConfigError(f"{path} is missing; copy all files of the checkpoint")
            if path.stat().st_size < end:
                raise ConfigError(
                    f"{path} has {path.stat().st_size} bytes, but .metadata says {end}: it is cut; copy it again"
                )

    def read(self, name: str, place: tuple[int, ...] = ()) -> torch.Tensor:
        """A tensor, or its part at the index ``place`` of its leading axes; ConfigError where it cannot be read."""
        stored = self.tensors[name]
        sizes = (*(1,) * len(place), *stored.size[len(place) :])
        chunk = ChunkStorageMetadata(torch.Size((*place, *(0,) * (len(sizes) - len(place)))), torch.Size(sizes))
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        planner = _Region(create_read_items_for_chunk_list(name, stored, [chunk]), target)
        try:
            self._reader.read_data(LoadPlan(planner.items), planner).wait()
        except Exception as error:  # torch raises many kinds for damaged files
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            refuse_replaced(self._directory, self._version)
            raise ConfigError(f"{self._directory}: {name} cannot be read ({reason}); use another checkpoint") from error
        refuse_replaced(self._directory, self._version)
        return target.reshape(sizes[len(place) :])

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        return self.tensors[name].properties.dtype


class _Region(LoadPlanner):
    """A load planner that reads stored parts into ``target``, a region of the stored tensor."""

    def __init__(self, items: list[ReadItem], target: torch.Tensor) -> None:
        self.items, self._target = items, target

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor got the items."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are asked for")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the part was read in place."""
