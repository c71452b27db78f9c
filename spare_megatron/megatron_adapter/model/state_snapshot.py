"""The tensors of a rank's part of the model, their digest and their checksums.

The same rank position of another group has the same tensors after the same step. The digest is cheap enough for every
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from spare_megatron import kernels
from spare_megatron.megatron_adapter.model.global_names import global_names
from spare_megatron.megatron_adapter.model.replica import Replica


def model_tensors(replica: Replica) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the whole model and data of each parameter and persistent buffer of this rank, in a fixed order."""
    chunks = [chunk.module.state_dict() for chunk in replica.chunks]
    if replica.row is not None:
        listed = [(chunks[one.chunk].get(one.name), one.model) for one in replica.row.tensors]
    else:
        of_chunks = zip(chunks, global_names(replica.chunks), strict=True)
        listed = [(tensors[name], names.get(name, name)) for tensors, names in of_chunks for name in sorted(tensors)]
    for tensor, name in listed:
        if torch.is_tensor(tensor):
            yield name, tensor


def weights_digest(replica: Replica, beside: Sequence[kernels.Digestible] = ()) -> str:
    """A digest of this rank's weights and what is ``beside`` them, 16 hex digits: equal weights have equal digests on
    every machine, and one changed bit always changes it. It is computed on the device of the tensors, at memory
    speed."""
    tensors = [tensor.detach().contiguous() for _, tensor in model_tensors(replica)]
    return f"{kernels.digest([*tensors, *beside]):016x}"


def weights_checksums(replica: Replica, beside: Mapping[str, Sequence[kernels.Digestible]]) -> dict[str, int]:
    """Name -> signed 64-bit digest of each tensor of :func:`model_tensors` and of what is ``beside`` them, to find
    where weights differ."""
    found = {name: kernels.digest([tensor.detach().contiguous()]) for name, tensor in model_tensors(replica)}
    found |= {name: kernels.digest(parts) for name, parts in beside.items()}
    return {name: (checksum ^ 1 << 63) - (1 << 63) for name, checksum in found.items()}


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, with its dimensions in the order in which it lies in memory."""
    if tensor.is_contiguous():
        return tensor
    ordered = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    assert ordered.is_contiguous(), f"a tensor is not one piece of memory: strides {tensor.stride()}"
    return ordered


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order of its memory, one after the other; they are not copied."""
    return in_memory_order(tensor.detach()).view(-1)
