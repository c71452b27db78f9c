"""What ranks of a group tell each other beside tensors, as JSON.

torch's own collectives of objects pickle them, so whoever gets at a connection of a process group runs code in every
rank. A list or a number needs no more than this.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_bytes(mine: bytes, device: torch.device | str = "cpu") -> list[bytes]:
    """What each rank of the world gave, in order of rank. Collective, by way of ``device``."""
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(one.item()) for one in sizes]
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=device)
    padded[: len(mine)] = _tensor(mine).to(device)
    there = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(there, padded)
    return [_bytes(one[:length]) for one, length in zip(there, lengths, strict=True)]


def gather_json(mine: Any, device: torch.device | str = "cpu") -> list[Any]:
    """What each rank of the world gave, which must be JSON (a tuple becomes a list), in order of rank. Collective."""
    return [json.loads(words) for words in gather_bytes(json.dumps(mine).encode(), device)]


def broadcast_json(value: Any, source: int = 0, device: torch.device | str = "cpu") -> Any:
    """The value of rank ``source``, which must be JSON, on every rank of the world. Collective."""
    mine = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    words = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if mine:
        words.copy_(_tensor(mine))
    dist.broadcast(words, source)
    return json.loads(_bytes(words))


def agree(value: bool, device: torch.device | str = "cpu") -> bool:
    """The value of rank 0 on every rank of the world. Collective."""
    return bool(broadcast_json(value, 0, device))


def _tensor(words: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else torch.empty(0, dtype=torch.uint8)


def _bytes(words: torch.Tensor) -> bytes:
    return bytes(words.cpu().numpy().tobytes())
