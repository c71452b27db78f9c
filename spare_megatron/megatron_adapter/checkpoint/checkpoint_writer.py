"""Takes this rank's share of a checkpoint at a step, and writes it later, in megatron-core's torch_dist format.

megatron-core writes files from forked processes and collects results through a Manager process, also when it saves
synchronously. A rank has threads (control plane, communicators): forking it can hang, and a Manager would outlive a
killed rank. So megatron-core only plans here: :meth:`ShareWriter.take` runs its planning, a collective call of the
group on the training thread. :meth:`TorchDistShare.write` and :meth:`TorchDistShare.finish` call no collective, use
nothing that training changes and may run on any thread. In between the caller carries bytes from all ranks to rank 0.

May assume: every rank of the group takes the same steps in the same order. Promises: nothing is written to disk before
``write``, so a full or broken disk cannot interrupt a collective. The plan is gathered in the first two saves; later
saves of the same structure, which never changes within a job, need no collective.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle  # to write .metadata, which torch reads as a pickle
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from spare_megatron.kernels.host_memory import PinnedBlocks
from spare_megatron.megatron_adapter.shims import compute_device, install_cpu_shims

install_cpu_shims()

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from spare_megatron.megatron_adapter.checkpoint.distributed_state import with_other_names
from spare_megatron.megatron_adapter.core_differences import plan_save, writer_replaced

FileOpener = Callable[[str], AbstractContextManager[BinaryIO]]
"""Opens a file of the checkpoint, by name, for writing; the file is on the disk when its ``with`` block has ended."""

METADATA = ".metadata"
_BACKEND, _VERSION = "torch_dist", 1


class ShareWriter:
    """Takes this rank's shares of all checkpoints of a job. ``take`` must be called on the training thread."""

    def __init__(self) -> None:
        self._strategy = _PlanOnly(_BACKEND, _VERSION, thread_count=1, cached_metadata=True)
        self._validated = False
        self._host: dict[Any, torch.Tensor] = {}
        self._blocks = PinnedBlocks()

    def take(
        self, state: dict[str, Any], directory: str | Path, *, copied: bool, apart: Collection[int] = ()
    ) -> TorchDistShare:
        """Plan the save of ``state`` (megatron-core's sharded state dict); returns what this rank writes. Collective.

        Args:
            state: of the whole group; see megatron-core's ``dist_checkpointing``.
            directory: of the checkpoint; nothing is written to it yet.
            copied: copy tensors into host memory that this writer reuses for each save (pinned on CUDA): training may
                go on at once, but the previous share must have been written. Else the share refers to the tensors,
                which must not change until it is written.
            apart: the addresses of memory on the host that training does not use: what is there is not copied.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=not self._validated)
        self._validated = True
        planned = self._strategy.async_save(sharded, Path(directory))
        buckets = [
            (key, planned_bytes, [(item, self._held(item, tensor, copied, apart)) for item, tensor in tensors])
            for _, key, (planned_bytes, tensors) in planned.buckets
        ]
        if compute_device().type == "cuda":
            torch.cuda.synchronize()
        return TorchDistShare(buckets, copy.deepcopy(common), planned.writer, planned.metadata)

    def _held(self, item: Any, tensor: torch.Tensor, copied: bool, apart: Collection[int]) -> torch.Tensor:
        tensor = tensor.detach()
        on_cuda = tensor.device.type == "cuda"
        if not on_cuda and (not copied or tensor.untyped_storage().data_ptr() in apart):
            return tensor
        held = self._host.get(item.index)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            own = self._blocks.take(tensor.shape, tensor.dtype) if on_cuda else None
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if own is None else own
            self._host[item.index] = held
        held.copy_(tensor, non_blocking=on_cuda)
        return held


@dataclass
class TorchDistShare:
    """The part of a checkpoint that one rank writes. Its methods may run on any thread."""

    buckets: list[tuple[str, list[Any], list[Any]]] = field(repr=False)
    """(file name, [(item, bytes)], [(item, host tensor)]): at most one file for each rank."""
    common: dict[str, Any] = field(repr=False)
    _writer: FileSystemWriterAsync = field(repr=False)
    _metadata: Any = field(repr=False)

    def write(self, create: FileOpener) -> bytes:
        """Write this rank's files; returns the report that :meth:`finish` needs. OSError, or a RuntimeError of
        torch."""
        transforms, results = self._writer.transforms, []
        for key, byte_items, tensor_items in self.buckets:
            with create(key) as stream:
                for item, data in [*byte_items, *tensor_items]:
                    written = _write_item(
                        transforms,
                        stream,  # type: ignore[arg-type]
                        data,
                        item,
                        key,
                        SerializationFormat.TORCH_SAVE,
                    )
                    results.append(written)
        return json.dumps([_plain(one) for one in results]).encode()

    def finish(self, create: FileOpener, reports: Sequence[bytes]) -> None:
        """Write the common files on rank 0, given the reports of all ranks after they have written. ``metadata.json``,
        by which megatron-core recognizes a checkpoint, is written last."""
        with create(COMMON_STATE_FNAME) as stream:
            torch.save(self.common, stream)
        metadata = copy.copy(self._metadata)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {}
        for report in reports:
            metadata.storage_data.update(_written(one) for one in json.loads(report))
        metadata.storage_meta = self._writer.storage_meta()
        with create(METADATA) as stream:
            pickle.dump(with_other_names(metadata), stream)
        with create(CONFIG_FNAME) as stream:
            stream.write(json.dumps(dataclasses.asdict(CheckpointingConfig(_BACKEND, _VERSION))).encode())


def _plain(result: WriteResult) -> list[Any]:
    """Where a writer put one item, as JSON."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    transforms = place.transform_descriptors
    return [
        [index.fqn, offset, index.index],
        [place.relative_path, place.offset, place.length, None if transforms is None else list(transforms)],
    ]


def _written(plain: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """The inverse of :func:`_plain`."""
    (name, offset, number), (path, begins, length, transforms) = plain
    place = _StorageInfo(path, begins, length, transforms)
    return MetadataIndex(name, None if offset is None else torch.Size(offset), number), place


@dataclass(frozen=True)
class _Planned:
    buckets: list[Any]
    writer: FileSystemWriterAsync
    metadata: Any


class _PlanOnly(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist strategy, stopped where it would begin to write."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> _Planned:
        """Plan a save; collective in the first two saves of a structure."""
        with writer_replaced(_Unwritten):
            planned: _Planned = plan_save(super())(sharded_state_dict, checkpoint_dir)
            return planned

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *_strategy: Any) -> _Planned:
        return _Planned(writer.write_buckets or [], writer, save_state_dict_ret[1])


class _Unwritten(FileSystemWriterAsync):
    """megatron-core's writer, which only plans here."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan and do not make the directory, which the caller of ``write`` makes."""
        return plan
