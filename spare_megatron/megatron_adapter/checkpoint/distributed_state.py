"""Reads and writes the forms in which checkpoints have the state of megatron-core's distributed optimizer.

There are three forms. *Plain*, in which this framework saves: a tensor for each parameter, fp32 copies under
``fp32_param``. *Fully reshardable*: the same, with the fp32 weights of every parameter under ``param``.
*DP-reshardable* (Megatron-LM's default): flat buckets of each model-parallel rank, in the order and with the padding of
the gradient buffers.

Checkpoints of this framework can be read in both of the first two forms: they differ in the names of the same bytes,
and :func:`with_other_names` adds the second names to the checkpoint's metadata. Nothing is stored twice.

May assume: the replica's optimizer is a plain one. Promises: buckets are read one tensor at a time.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import load as read
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import main_copies, moments
from spare_megatron.megatron_adapter.checkpoint.safe_loading import SafeReader, read_metadata
from spare_megatron.megatron_adapter.model.replica import Replica

RESHARDABLE = "fully_reshardable"
BUCKETS = "dp_reshardable"
FORM = "distrib_optim_sharding_type"
"""megatron-core's name for the form, in a checkpoint's ``content_metadata``."""
_MAIN, _PARAM, _SQUARES = "optimizer.state.fp32_param.", "optimizer.state.param.", "optimizer.state.exp_avg_sq."
_OF_RANK = "optimizer.distributed.dp_group_idx_"
_ALIGNMENT = 64
"""With the distributed optimizer a parameter starts in its buffer at a multiple of this many elements (megatron-core's
param_and_grad_buffer)."""


def form_of(directory: Path, keys: Mapping[str, Any]) -> str:
    """The form of a checkpoint's optimizer state, by the keys of its tensors; '' is the plain form. ConfigError for an
    older form."""
    if any(_OF_RANK in key and ".bucket_idx_" in key for key in keys):
        return BUCKETS
    if any(_OF_RANK in key for key in keys):
        raise ConfigError(
            f"{directory} has distributed-optimizer state in a form that megatron-core 0.16 cannot read either "
            "(neither dp_reshardable nor fully_reshardable); save it again with a newer Megatron-LM, or --no-load-optim"
        )
    renamed = any(key.startswith(_PARAM) for key in keys) and not any(key.startswith(_MAIN) for key in keys)
    return RESHARDABLE if renamed else ""


# --------------------------------------------------------------------------------------------------------- ours


def add_distributed(parts: list[dict[str, Any]]) -> None:
    """Add to each optimizer's state what the distributed optimizer looks for beside tensors: options and step."""
    for part in parts:
        inner = part.get("optimizer", part)
        groups = [dict(group) for group in inner["param_groups"]]
        step = inner.get("state", {}).get("common_step")
        for group in groups:
            group.setdefault("step", 0 if step is None else int(step))
        part["optimizer"] = {**inner, "param_groups": groups} if "optimizer" in part else {"param_groups": groups}
        part["param_state_sharding_type"] = RESHARDABLE


def with_other_names(metadata: Metadata) -> Metadata:
    """A copy of the metadata in which fp32 weights also have the names of the fully reshardable form."""
    tensors = metadata.state_dict_metadata
    names: dict[str, str] = {}
    for key in tensors:
        if key.startswith(_SQUARES):
            name = key.removeprefix(_SQUARES)
            names[_MAIN + name if _MAIN + name in tensors else name] = _PARAM + name
    doubled = copy.copy(metadata)
    doubled.state_dict_metadata = {**tensors, **{new: tensors[old] for old, new in names.items() if old in tensors}}
    stored = {
        MetadataIndex(names[index.fqn], index.offset, index.index): where
        for index, where in metadata.storage_data.items()
        if index.fqn in names
    }
    doubled.storage_data = {**metadata.storage_data, **stored}
    return doubled


# ------------------------------------------------------------------------------------------------------- theirs


def rename_requests(state: Any) -> None:
    """Change the keys of requested fp32 weights in ``state`` to those of the fully reshardable form."""
    for wanted in nested_values(state):
        key = getattr(wanted, "key", "")
        if key.startswith(_MAIN):
            wanted.key = _PARAM + key.removeprefix(_MAIN)


def read_buckets(directory: Path, replica: Replica) -> list[dict[str, Any]]:
    """Fill the moments and fp32 weights of ``replica``'s plain optimizer from DP-reshardable buckets. Collective.

    The moments must be allocated. Returns what the distributed optimizer stored beside tensors, for each chained
    optimizer. ConfigError when the buckets are of another layout.
    """
    found: list[dict[str, Any]] = []
    optimizers = replica.optimizer.chained_optimizers
    stored = read_metadata(directory).state_dict_metadata
    for number, plain in enumerate(optimizers):
        experts = any(group["is_expert_parallel"] for group in plain.param_groups)
        rank, size = _model_parallel_rank(experts)
        prefix = f"chained_{number}." if len(optimizers) > 1 else ""
        _check_layout(directory, stored, prefix, size)
        root = f"{prefix}{_OF_RANK}{rank}"
        sizes, options = _objects(directory, root, stored, ("per_bucket_numel_unpadded", "optimizer", "grad_scaler"))
        found.append(options)
        mains = main_copies(plain)
        buffers = [one for chunk in replica.chunks for one in _buffers(chunk, experts)]
        for index, (buffer, in_buckets) in enumerate(zip(buffers, sizes, strict=True)):
            ((dtype, numels),) = in_buckets.items()
            where = _places(directory, [one for one in buffer.param_index_map if one in mains], numels)
            for bucket, numel in enumerate(numels):
                key = f"{root}.gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{bucket}"
                inside = [(mains[one], start) for one, (number_of, start) in where.items() if number_of == bucket]
                _fill(directory, key, numel, plain, inside)
    return found


def _buffers(chunk: Any, experts: bool) -> Iterator[Any]:
    yield from chunk.expert_parallel_buffers if experts else chunk.buffers


def _model_parallel_rank(experts: bool) -> tuple[int, int]:
    """This rank's number among the ranks that together hold one model, by which megatron-core names its buckets, and
    the number of these ranks."""
    if experts:
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    else:
        group = parallel_state.get_model_parallel_group()
    return group.rank(), group.size()


def _check_layout(directory: Path, stored: Mapping[str, Any], prefix: str, size: int) -> None:
    start = f"{prefix}{_OF_RANK}"
    ranks = {int(key.removeprefix(start).split(".")[0]) for key in stored if key.startswith(start)}
    if len(ranks) != size:
        raise ConfigError(
            f"{directory} has distributed-optimizer state in the buckets of {len(ranks)} model-parallel ranks, but "
            f"this layout has {size}; give the tensor, pipeline and expert parallel sizes of the save, save it "
            "with Megatron-LM's --dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        )


def _objects(directory: Path, root: str, stored: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, Any]:
    """Sizes of the buckets, and the optimizer's options."""
    wanted = {name: ShardedObject(f"{root}.{name}", None, (1,), (0,)) for name in names}
    there = {name: one for name, one in wanted.items() if one.unique_key in stored}
    found = dist_checkpointing.load(dict(there), str(directory), validate_access_integrity=False)
    return found["per_bucket_numel_unpadded"], {name: found[name] for name in names[1:] if name in there}


def _places(
    directory: Path, parameters: list[torch.nn.Parameter], numels: list[int]
) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """Parameter -> (bucket, first element inside it). ``numels`` has the sizes of the buckets without end padding."""
    places, bucket, end = {}, 0, 0
    for parameter in parameters:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if start >= numels[bucket] and bucket + 1 < len(numels):
            bucket, start = bucket + 1, 0
        end = start + parameter.numel()
        if end > numels[bucket]:
            raise ConfigError(
                f"{directory} has a bucket of {numels[bucket]} values where this model's parameters need {end}; give "
                "the flags of the model and the parallel sizes that it was saved with"
            )
        places[parameter] = (bucket, start)
    return places


def _fill(directory: Path, key: str, numel: int, plain: Any, inside: list[tuple[torch.Tensor, int]]) -> None:
    for name in ("param", *moments(plain)):
        values = torch.empty(numel, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            read({f"{key}.{name}": values}, storage_reader=SafeReader(str(directory)), no_dist=True)
        for main, start in inside:
            target = main.data if name == "param" else plain.optimizer.state[main][name]
            target.copy_(values[start : start + main.numel()].view(main.shape))
