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
from spare_megatron.megatron_adapter.model import Replica


def take(replica: Replica) -> dict[str, Any]:
    """Copies of model, optimizer and schedule of this rank; what ``torch.save`` can write."""
    return {
        "chunks": [copy.deepcopy(chunk.module.state_dict()) for chunk in replica.chunks],
        "optimizer": copy.deepcopy(replica.optimizer.state_dict()),
        "scheduler": replica.scheduler.state_dict(),
    }


def put_back(replica: Replica, snapshot: dict[str, Any]) -> None:
    """Make this rank's state that of a snapshot of the same rank position."""
    for chunk, state in zip(replica.chunks, snapshot["chunks"], strict=True):
        chunk.module.load_state_dict(state)
    replica.optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))
    scheduler = replica.scheduler
    scheduler.num_steps = 0
    scheduler.load_state_dict(snapshot["scheduler"])


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
