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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from spare_megatron.checkpoint.convert.layout import Layout
from spare_megatron.checkpoint.convert.model import Entry, ModelShape, TensorSource, iteration_of
from spare_megatron.checkpoint.convert.model_args import shape_of_args
from spare_megatron.checkpoint.convert.mp_rank import LOCAL_NAMES
from spare_megatron.checkpoint.convert.stored_names import refuse_unread
from spare_megatron.checkpoint.convert.stored_parts import StoredTensors
from spare_megatron.checkpoint.convert.tensors import entries, is_linear
from spare_megatron.config.errors import ConfigError

CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_WEIGHT = re.compile(r"(decoder|embedding|output_layer|mtp|encoder)\.(?!.*_extra_state)")
"""Names of weights, not of an optimizer's state."""
METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def keys_of(entry: Entry, shape: ModelShape, apart: bool) -> tuple[str, ...]:
    """The stored names of a tensor, the usual one first; ``apart`` says whether each layer is stored by itself.

    Some norms are stored under two names, because transformer-engine's layers and megatron-core's own look for
    different ones.
    """
    key = entry.name
    if not apart:
        key = key.replace(f"decoder.layers.{entry.layer}.", "decoder.layers.")
    if entry.expert is not None:
        return (key.replace(f"mlp.experts.{entry.expert}.", "mlp.experts.experts."),)
    if shape.multi_latent_attention:
        return (key, *(key.replace(engine, local) for engine, local in LOCAL_NAMES.items() if engine in key))
    if ".pre_mlp_layernorm." in key:
        return (key, key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))
    return (key,)


def lead_of(entry: Entry, shape: ModelShape, apart: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(index on, lengths of) the leading axes of the stored tensor: layer, and expert. Empty for other tensors."""
    axes = [] if entry.layer is None or entry.predicts or apart else [(entry.layer, shape.num_layers)]
    if entry.expert is not None:
        axes.append((entry.expert, shape.num_experts or 1))
    return tuple(index for index, _ in axes), tuple(length for _, length in axes)


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
        self.iteration = iteration_of(common.get("iteration"))
        self._stored = StoredTensors(directory)
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        """Weights that no tensor of the model is read from would be lost without a message."""
        read = {
            name
            for entry in entries(self.shape)
            for apart in (self.shape.layers_apart, True)
            for name in keys_of(entry, self.shape, apart)
        }
        unread = [name for name in self._stored.tensors if _WEIGHT.match(name) and name not in read]
        refuse_unread(self.folder, unread, "args")

    def read(self, entry: Entry) -> torch.Tensor:
        key, place = self._find(entry)
        return self._stored.read(key, place)

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._stored.dtype(self._find(entry)[0])

    def _find(self, entry: Entry) -> tuple[str, tuple[int, ...]]:
        """The stored name of a tensor, and its index on the stored tensor's leading axes."""
        for apart in (self.shape.layers_apart, True):
            place, lead = lead_of(entry, self.shape, apart)
            for key in keys_of(entry, self.shape, apart):
                found = self._stored.tensors.get(key)
                if found is not None and tuple(found.size[: len(lead)]) == lead:
                    return key, place
        name = keys_of(entry, self.shape, self.shape.layers_apart)[0]
        raise ConfigError(f"{self.folder} has no tensor {name}, which a model of its args has")


def write(
    source: TensorSource, directory: Path, args: Mapping[str, Any], layout: Layout, announce: Callable[[Entry], None]
) -> None:
    """Write the weights of a source into ``directory``, in the parts that the ranks of ``layout`` will read.

    ``announce`` is called before each tensor of the source is written.
    """
    directory.mkdir(parents=True)
    planner = _Streamed(source, layout.tensor, announce)
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

    def __init__(self, source: TensorSource, ranks: int, announce: Callable[[Entry], None]) -> None:
        self._source, self._ranks, self._announce = source, ranks, announce
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
            self._announce(entry)
        tensor = self._last[1]
        data_of = write_item.tensor_data
        assert data_of is not None
        lead = len(data_of.chunk.offsets) - tensor.dim()
        for axis in range(tensor.dim()):
            tensor = tensor.narrow(axis, data_of.chunk.offsets[lead + axis], data_of.chunk.sizes[lead + axis])
        return tensor.reshape(data_of.chunk.sizes).contiguous()

    def _items(self, entry: Entry) -> Iterator[WriteItem]:
        shape = self._source.shape
        place, lead = lead_of(entry, shape, shape.layers_apart)
        properties = TensorProperties(dtype=self._source.dtype(entry))
        parts = self._ranks * (2 if entry.gated else 1) if entry.axis is not None else 1
        for key in keys_of(entry, shape, shape.layers_apart):
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
    for entry in filter(is_linear, entries(shape)):
        place, lead = lead_of(entry, shape, shape.layers_apart)
        shard = f"{'.'.join(map(str, place or (0,)))}_{'.'.join(map(str, lead or (1,)))}"
        module = keys_of(entry, shape, shape.layers_apart)[0].removesuffix(".weight")
        modules = [module]
        if module.endswith(".linear_proj"):  # transformer-engine's attention has one too
            modules.append(module.replace("linear_proj", "core_attention"))
        for one in modules:
            yield WriteItem(MetadataIndex(f"{one}._extra_state/shard_{shard}"), WriteItemType.BYTE_IO)
