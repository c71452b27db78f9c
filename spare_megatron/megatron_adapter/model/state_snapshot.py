"""Copies a rank's training state, restores it from a copy, and computes digests of its weights.

The same rank position of another group has the same state after the same step, so a snapshot of it can be put back
here without resharding. The digest of the weights is cheap enough for every step.

May assume: both sides were built from the same settings and shape. Promises: ``take`` copies, so training may go on
while a snapshot is sent; ``put_back`` restores the state bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from spare_megatron import kernels
from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import is_split
from spare_megatron.megatron_adapter.core_differences import load_optimizer
from spare_megatron.megatron_adapter.model.global_names import global_names
from spare_megatron.megatron_adapter.model.replica import Replica


def take(replica: Replica) -> dict[str, Any]:
    """A copy of this rank's model, optimizer and schedule state, which ``torch.save`` can write."""
    return {
        "chunks": [copy.deepcopy(chunk.module.state_dict()) for chunk in replica.chunks],
        "optimizer": _take_parts(replica) if is_split(replica) else copy.deepcopy(replica.optimizer.state_dict()),
        "scheduler": replica.scheduler.state_dict(),
    }


def put_back(replica: Replica, snapshot: dict[str, Any]) -> None:
    """Make this rank's state that of a snapshot of the same rank position."""
    for chunk, state in zip(replica.chunks, snapshot["chunks"], strict=True):
        chunk.module.load_state_dict(state)
    if is_split(replica):
        _put_back_parts(replica, snapshot["optimizer"])
    else:
        load_optimizer(replica.optimizer, copy.deepcopy(snapshot["optimizer"]))
    scheduler = replica.scheduler
    scheduler.num_steps = 0
    scheduler.load_state_dict(snapshot["scheduler"])


def _take_parts(replica: Replica) -> list[dict[str, Any]]:
    """A copy of this rank's parts of a distributed optimizer, whose own ``state_dict`` lacks the tensors."""
    return [
        {
            "inner": copy.deepcopy(part.optimizer.state_dict()),
            "mains": [[one.detach().clone() for one in group["params"]] for group in part.optimizer.param_groups],
            "scaler": part.grad_scaler.state_dict() if part.grad_scaler else None,
        }
        for part in replica.optimizer.chained_optimizers
    ]


def _put_back_parts(replica: Replica, parts: list[dict[str, Any]]) -> None:
    for part, taken in zip(replica.optimizer.chained_optimizers, parts, strict=True):
        part.optimizer.load_state_dict(copy.deepcopy(taken["inner"]))
        for group, mains in zip(part.optimizer.param_groups, taken["mains"], strict=True):
            for one, main in zip(group["params"], mains, strict=True):
                one.data.copy_(main)
        if taken["scaler"] is not None:
            part.grad_scaler.load_state_dict(taken["scaler"])


def model_tensors(replica: Replica) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the whole model and data of each parameter and persistent buffer of this rank, in a fixed order."""
    for chunk, names in zip(replica.chunks, global_names(replica.chunks), strict=True):
        for name, tensor in sorted(chunk.module.state_dict().items()):
            if torch.is_tensor(tensor):
                yield names.get(name, name), tensor


def weights_digest(replica: Replica, beside: Sequence[kernels.Digestible] = ()) -> str:
    """A digest of this rank's weights and what is ``beside`` them, 16 hex digits: equal weights have equal digests on
    every machine, and one changed bit always changes it. It is computed on the device of the tensors, at memory
    speed."""
    tensors = [tensor.detach().contiguous() for _, tensor in model_tensors(replica)]
    return f"{kernels.digest([*tensors, *beside]):016x}"


def weights_checksums(replica: Replica, **beside: Sequence[kernels.Digestible]) -> dict[str, int]:
    """Name -> signed 64-bit digest of each tensor of :func:`model_tensors` and of what is ``beside`` them, to find
    where weights differ."""
    found = {name: kernels.digest([tensor.detach().contiguous()]) for name, tensor in model_tensors(replica)}
    found |= {name: kernels.digest(parts) for name, parts in beside.items()}
    return {name: (checksum ^ 1 << 63) - (1 << 63) for name, checksum in found.items()}
