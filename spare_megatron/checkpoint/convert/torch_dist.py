"""Reads and writes megatron-core's distributed checkpoints (torch_dist), one tensor at a time in one process.

A tensor of all layers is stored as one tensor whose first axis is the layer (of experts: layer, then expert). Both
directions use the planners of torch.distributed.checkpoint: reading asks for the part of one layer, writing passes each
part when the planner asks for it. Only weights are converted, no optimizer state.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from spare_megatron.checkpoint.convert.layout import Layout
from spare_megatron.checkpoint.convert.model import Entry, ModelShape, TensorSource, entries, shape_of_args
from spare_megatron.checkpoint.convert.stored_names import refuse_unread
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import SafeReader
from spare_megatron.megatron_adapter.shims import install_cpu_shims

CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
ENGINE_MODULES = ("self_attention.core_attention", "self_attention.linear_qkv", "self_attention.linear_proj")
_WEIGHT = re.compile(r"(decoder|embedding|output_layer|mtp|encoder)\.(?!.*_extra_state)")
"""Names of weights, not of an optimizer's state."""
METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def keys_of(entry: Entry) -> tuple[str, ...]:
    """The stored names of a tensor, the usual one first. The norm before experts is stored under two names, because
    transformer-engine's layers and megatron-core's own look for different ones."""
    if entry.layer is None:
        return (entry.name,)
    key = entry.name.replace(f"decoder.layers.{entry.layer}.", "decoder.layers.")
    if entry.expert is not None:
        return (key.replace(f"mlp.experts.{entry.expert}.", "mlp.experts.experts."),)
    if ".pre_mlp_layernorm." in key:
        return (key, key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))
    return (key,)


def lead_of(entry: Entry, shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(index on, lengths of) the leading axes of the stored tensor: layer, and expert. Empty for other tensors."""
    if entry.layer is None:
        return (), ()
    if entry.expert is None:
        return (entry.layer,), (shape.num_layers,)
    return (entry.layer, entry.expert), (shape.num_layers, shape.num_experts or 1)


class TorchDistSource:
    """A source that reads one checkpoint in torch_dist format; ``common`` is the content of its ``common.pt``."""

    def __init__(self, directory: Path, common: Mapping[str, Any]) -> None:
        self.folder = directory
        if not isinstance(common.get("args"), Namespace):
            raise ConfigError(
                f"{directory} was saved without args, so its model is not known; convert one that was saved with args"
            )
        self.args = vars(common["args"])
        self.shape = shape_of_args(self.args, str(directory))
        self.iteration = int(common.get("iteration", 1))
        install_cpu_shims()
        self._reader = SafeReader(str(directory))
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
        except ForbiddenPickleError as error:
            raise ConfigError(f"{error}; do not use this checkpoint") from None
        except Exception as error:  # a damaged pickle may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(f"{directory}/.metadata cannot be read ({reason}); use another checkpoint") from error
        self._check_sizes()
        self._refuse_unread()

    def _check_sizes(self) -> None:
        """Files that are cut are found before anything is read; those of Megatron-LM have no manifest that says it."""
        ends: dict[str, int] = {}
        for place in (self._metadata.storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise ConfigError(f"{path} is missing; copy all files of the checkpoint")
            if path.stat().st_size < end:
                raise ConfigError(
                    f"{path} has {path.stat().st_size} bytes, but .metadata says {end}: it is cut; copy it again"
                )

    def _refuse_unread(self) -> None:
        """Weights that no tensor of the model is read from would be lost without a word."""
        read = {name for entry in entries(self.shape) for name in (*keys_of(entry), entry.name)}
        unread = [
            name
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and _WEIGHT.match(name) and name not in read
        ]
        refuse_unread(self.folder, unread, "args")

    def read(self, entry: Entry) -> torch.Tensor:
        key, stored, place = self._find(entry)
        sizes = (*(1,) * len(place), *stored.size[len(place) :])
        chunk = ChunkStorageMetadata(torch.Size((*place, *(0,) * (len(sizes) - len(place)))), torch.Size(sizes))
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        planner = _Region(create_read_items_for_chunk_list(key, stored, [chunk]), target)
        try:
            self._reader.read_data(LoadPlan(planner.items), planner).wait()
        except Exception as error:  # torch raises many kinds for damaged files
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(f"{self.folder}: {key} cannot be read ({reason}); use another checkpoint") from error
        return target.reshape(sizes[len(place) :])

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._find(entry)[1].properties.dtype

    def _find(self, entry: Entry) -> tuple[str, TensorStorageMetadata, tuple[int, ...]]:
        """The stored name and metadata of a tensor, and its index on the stored tensor's leading axes."""
        place, lead = lead_of(entry, self.shape)
        for key in keys_of(entry):
            found = self._metadata.state_dict_metadata.get(key)
            if isinstance(found, TensorStorageMetadata) and tuple(found.size[: len(lead)]) == lead:
                return key, found, place
        found = self._metadata.state_dict_metadata.get(entry.name)
        if isinstance(found, TensorStorageMetadata):  # layers of several kinds are stored one by one
            return entry.name, found, ()
        raise ConfigError(f"{self.folder} has no tensor {keys_of(entry)[0]}, which a model of its args has")


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


def write(
    source: TensorSource, directory: Path, args: Mapping[str, Any], layout: Layout, say: Callable[[Entry], None]
) -> None:
    """Write the weights of a source into ``directory``, in the parts that the ranks of ``layout`` will read.

    ``say`` is called before each tensor of the source is written.
    """
    directory.mkdir(parents=True)
    planner = _Streamed(source, layout.tensor, say)
    writer = FileSystemWriter(str(directory), single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's wrapping of what happened, which is no Exception
            raise next(iter(error.failures.values()))[0] from None
    common = {
        "args": Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": source.iteration,
        "content_metadata": CONTENT,
    }
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(METADATA))


class _Streamed(SavePlanner):
    """A save planner that asks the source for a tensor when a part of it is to be written."""

    def __init__(self, source: TensorSource, ranks: int, say: Callable[[Entry], None]) -> None:
        self._source, self._ranks, self._say = source, ranks, say
        self._entries: dict[MetadataIndex, Entry] = {}
        self._last: tuple[Entry, torch.Tensor] | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor got the source."""

    def create_local_plan(self) -> SavePlan:
        items = [item for entry in entries(self._source.shape) for item in self._items(entry)]
        return SavePlan([*items, *_states(self._source.shape)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([None], data)
            return data
        entry = self._entries[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        if self._last is None or self._last[0] != entry:
            self._last = None  # frees the old tensor before the new one is read
            self._last = (entry, self._source.read(entry))
            self._say(entry)
        tensor = self._last[1]
        data_of = write_item.tensor_data
        assert data_of is not None
        lead = len(data_of.chunk.offsets) - tensor.dim()
        for axis in range(tensor.dim()):
            tensor = tensor.narrow(axis, data_of.chunk.offsets[lead + axis], data_of.chunk.sizes[lead + axis])
        return tensor.reshape(data_of.chunk.sizes).contiguous()

    def _items(self, entry: Entry) -> Iterator[WriteItem]:
        place, lead = lead_of(entry, self._source.shape)
        properties = TensorProperties(dtype=self._source.dtype(entry))
        parts = self._ranks * (2 if entry.gated else 1) if entry.axis is not None else 1
        for key in keys_of(entry):
            for part in range(parts):
                sizes, offsets = list(entry.shape), [0] * len(entry.shape)
                if entry.axis is not None:
                    sizes[entry.axis] //= parts
                    offsets[entry.axis] = part * sizes[entry.axis]
                chunk = ChunkStorageMetadata(torch.Size((*place, *offsets)), torch.Size((*(1,) * len(place), *sizes)))
                index = MetadataIndex(key, chunk.offsets)
                self._entries[index] = entry
                data = TensorWriteData(chunk, properties, torch.Size((*lead, *entry.shape)))
                yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _states(shape: ModelShape) -> Iterator[WriteItem]:
    """The empty ``_extra_state`` of every linear layer, which loading asks for by name."""
    modules, layers = list(ENGINE_MODULES), shape.num_layers
    if shape.num_experts is None:
        modules += ["mlp.linear_fc1", "mlp.linear_fc2"]
    for layer in range(layers):
        for module in modules:
            yield _state(f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}")
        for expert in range(shape.num_experts or 0):
            for module in ("linear_fc1", "linear_fc2"):
                place = f"shard_{layer}.{expert}_{layers}.{shape.num_experts}"
                yield _state(f"decoder.layers.mlp.experts.experts.{module}._extra_state/{place}")


def _state(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
