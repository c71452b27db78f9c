"""What makes a piece's gradient the same bits wherever it is computed, beside the order-free sum: settings of this
process, and the facts of its machine in which all ranks must agree.

Random numbers are :mod:`spare_megatron.megatron_adapter.model.rng`'s affair. May assume: called before anything uses
CUDA.
"""

from __future__ import annotations

import os

import torch

from spare_megatron.megatron_adapter.shims import cuda_available

CUDA_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
}
"""Each library's own switch (Megatron's --deterministic-mode asks for the same); what the user has set stays."""


def make_deterministic() -> None:
    """Switch off what gives other bits from run to run, or with another number of ranks on a machine: threads are one,
    unless the user has set ``OMP_NUM_THREADS``."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if not cuda_available():
        return
    for name, value in CUDA_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def arithmetic() -> dict[str, str | int]:
    """What results depend on besides: LayerNorm's weight gradients on the number of threads, everything on the
    instruction set or the kind of GPU."""
    facts: dict[str, str | int] = {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    if cuda_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
