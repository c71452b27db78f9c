"""Reads checkpoints in the formats of Megatron's FSDP modes: torch_dcp of torch's FSDP2, fsdp_dtensor of Megatron's.

Both are torch.distributed.checkpoint's own format: every parameter is stored by itself under its module's name, with
the layer's number, and ``args`` as an object beside them. Megatron's FSDP stores the halves of a gated weight as two
tensors, and an expert's index in the name of its weight where experts are multiplied together. Only weights are
converted; Megatron-LM itself converts only into fsdp_dtensor, not out of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spare_megatron.checkpoint.convert.model import Entry, iteration_of
from spare_megatron.checkpoint.convert.model_args import shape_of_args
from spare_megatron.checkpoint.convert.mp_rank import IMPLEMENTATIONS, inner_name
from spare_megatron.checkpoint.convert.stored_names import refuse_unread
from spare_megatron.checkpoint.convert.stored_parts import StoredTensors
from spare_megatron.checkpoint.convert.tensors import entries
from spare_megatron.checkpoint.folder import step_of
from spare_megatron.checkpoint.saved_args import read_args
from spare_megatron.config.errors import ConfigError

HALVES = ("_w", "_v")
"""What follows the name of a gated weight where its gate and its input are stored as two tensors."""
_TOP = re.compile(r"model\.(module\.)*")


class TorchOwnSource:
    """A source that reads one checkpoint of an FSDP mode."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory
        self.args: Mapping[str, Any] = read_args(directory)
        if not self.args:
            raise ConfigError(
                f"{directory} was saved without args, so its model is not known; convert one that was saved with args"
            )
        self.shape = shape_of_args(self.args, str(directory))
        self.iteration = iteration_of(step_of(directory) if directory.name.startswith("iter_") else None)
        self._stored = StoredTensors(directory)
        self._names = {_TOP.sub("", name, count=1): name for name in self._stored.tensors if _TOP.match(name)}
        ranks = self.args.get("tensor_model_parallel_size") or 1
        if ranks > 1 and not any(name.startswith("model.module.") for name in self._names.values()):
            raise ConfigError(
                f"{directory} is of torch's FSDP with tensor_model_parallel_size {ranks}, and torch_dcp keeps only one "
                "rank's part of a tensor; convert one that was saved without tensor parallelism"
            )
        read = {name for entry in entries(self.shape) for name in self._find(entry)}
        unread = [name for name in self._names if name not in read and not name.endswith("_extra_state")]
        refuse_unread(directory, unread, "args")

    def read(self, entry: Entry) -> torch.Tensor:
        parts = [self._stored.read(self._names[name]) for name in self._find(entry)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._stored.dtype(self._names[self._find(entry)[0]])

    def _find(self, entry: Entry) -> tuple[str, ...]:
        """The names of a tensor's parts, without the modules around the model."""
        names = [inner_name(entry, entry.layer, entry.expert, kind) for kind in IMPLEMENTATIONS]
        if entry.expert is not None:
            inside, _, kind = entry.name.rpartition(".")
            names.append(inside.replace(f"experts.{entry.expert}.", "experts.") + f".{kind}{entry.expert}")
        for name in names:
            for parts in ((name,), tuple(name + half for half in HALVES)):
                if all(part in self._names for part in parts):
                    return parts
        raise ConfigError(f"{self.folder} has no tensor {names[0]}, which a model of its args has")
