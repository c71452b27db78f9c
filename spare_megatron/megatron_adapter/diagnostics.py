"""Computes figures that Megatron logs on request: the norm of all parameters, and memory.

May assume: the group's world is up. Promises: no state is changed; :func:`params_norm` is collective in the group,
:func:`memory` is not.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.shims import cuda_available


def params_norm(replica: Replica) -> float:
    """The L2 norm of the model's parameters, each counted once (Megatron's ``calc_params_l2_norm``).

    Half-precision parameters are counted by their fp32 main copies where this rank has those whole.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    sums = {True: 0.0, False: 0.0}
    for chunk in replica.chunks:
        for parameter in chunk.parameters():
            if not param_is_not_shared(parameter):
                continue
            expert = not getattr(parameter, "allreduce", True)
            if not expert and not param_is_not_tensor_parallel_duplicate(parameter):
                continue
            main = getattr(parameter, "main_param", None)
            values = main if main is not None and main.shape == parameter.shape else parameter
            sums[expert] += float(values.detach().double().square().sum())
    total = 0.0
    for expert, group in (
        (False, parallel_state.get_model_parallel_group()),
        (True, parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
    ):
        part = torch.tensor([sums[expert]], dtype=torch.float64, device=_device())
        dist.all_reduce(part, group=group)
        total += float(part)
    return float(total**0.5)


def memory(used_by_device: bool = False) -> dict[str, float]:
    """Megatron's memory figures in bytes; without CUDA they are the resident memory of the process."""
    if not cuda_available():
        page = resource.getpagesize()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the kernel updates it only now and then
        return {"mem-allocated-bytes": float(resident), "mem-max-allocated-bytes": float(max(peak, resident))}
    stats = torch.cuda.memory_stats()
    figures = {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
    if used_by_device:
        free, total = torch.cuda.mem_get_info()
        figures["mem-device-used-bytes"] = total - free
    return {name: float(value) for name, value in figures.items()}


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if cuda_available() else torch.device("cpu")
