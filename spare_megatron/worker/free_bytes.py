"""How much memory of a device a rank can still have."""

from __future__ import annotations

import torch

from spare_megatron.runtime.free_memory import available_bytes


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, and what torch's allocator holds and does not use. Raises RuntimeError if the device
    does not report it."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
