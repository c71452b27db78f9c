"""The state of a rank that is in no state shard, as one tensor of integers that travels with a gather.

May assume: the rank that unpacks it has the engine of the same flags and rank position. Promises: every bit as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from spare_megatron.worker.engine import StepEngine

_LENGTH_BYTES = 8


def packed(engine: StepEngine) -> torch.Tensor:
    """The engine's values and tensors, int32, in host memory: the length of the values, the values, the tensors, each
    rounded up to 4 bytes."""
    words = json.dumps(engine.state_values()).encode()
    length = torch.tensor(list(len(words).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8)
    parts = [length, torch.frombuffer(bytearray(words), dtype=torch.uint8)]
    parts += [one.detach().reshape(-1).view(torch.uint8).cpu() for one in engine.state_tensors().values()]
    return torch.cat([piece for part in parts for piece in (part, _padding(part.numel()))]).view(torch.int32)


def unpacked(flat: torch.Tensor, engine: StepEngine) -> Mapping[str, Any]:
    """Write the tensors of :func:`packed` into those of ``engine``; returns the values, which it has not adopted."""
    data = flat.view(torch.uint8)
    length = int.from_bytes(bytes(data[:_LENGTH_BYTES].tolist()), "little")
    at = _LENGTH_BYTES
    values: Mapping[str, Any] = json.loads(data[at : at + length].numpy().tobytes())
    at += length + _padding(length).numel()
    for one in engine.state_tensors().values():
        own = one.detach().view(-1).view(torch.uint8)
        own.copy_(data[at : at + own.numel()])
        at += own.numel() + _padding(own.numel()).numel()
    assert at == data.numel(), f"{data.numel()} bytes of state are in no shard of a member, {at} bytes here"
    return values


def _padding(size: int) -> torch.Tensor:
    return torch.zeros(-size % 4, dtype=torch.uint8)
