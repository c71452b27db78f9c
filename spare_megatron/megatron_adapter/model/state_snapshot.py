"""A rank's training state in memory: taken, put back, fingerprinted.

The same rank position of another group holds the same state after the same step, so a snapshot taken there can be
put back here; nothing is resharded. Weights alone have a fingerprint that is cheap enough for every step.

May assume: both sides were built from the same settings and shape. Promises: ``take`` copies, so training may go on
while a snapshot is sent; ``put_back`` of it gives bit for bit the state it was taken from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from spare_megatron import kernels
from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import is_split
from spare_megatron.megatron_adapter.model.replica import Replica


def take(replica: Replica) -> dict[str, Any]:
    """Copies of model, optimizer and schedule of this rank; what ``torch.save`` can write."""
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
        replica.optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))
    scheduler = replica.scheduler
    scheduler.num_steps = 0
    scheduler.load_state_dict(snapshot["scheduler"])


def _take_parts(replica: Replica) -> list[dict[str, Any]]:
    """What this rank has of a distributed optimizer, whose own ``state_dict`` leaves the tensors out."""
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
    """Name and data of each parameter and lasting buffer of this rank, in a fixed order."""
    for index, chunk in enumerate(replica.chunks):
        for name, tensor in sorted(chunk.module.state_dict().items()):
            if torch.is_tensor(tensor):
                yield f"{index}.{name}", tensor


def weights_digest(replica: Replica) -> str:
    """16 hex digits that change when any bit of this rank's weights changes. Equal weights give equal digests on every
    machine; taken where the tensors lie, at memory speed."""
    return f"{kernels.digest([tensor.detach().contiguous() for _, tensor in model_tensors(replica)]):016x}"


def weights_checksums(replica: Replica) -> dict[str, int]:
    """Name -> 64 bits, signed, of each tensor of :func:`model_tensors`: says where weights differ."""
    found = {name: kernels.digest([tensor.detach().contiguous()]) for name, tensor in model_tensors(replica)}
    return {name: (checksum ^ 1 << 63) - (1 << 63) for name, checksum in found.items()}
