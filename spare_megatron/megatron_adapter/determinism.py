"""Makes a piece's gradient the same bits wherever it is computed: settings of this process, and the properties of its
machine in which all ranks must agree.

Random numbers are set by :mod:`spare_megatron.megatron_adapter.model.rng`. May assume: called before anything uses
CUDA.
"""

from __future__ import annotations

import os

import torch

from spare_megatron.megatron_adapter.shims import cuda_available
from spare_megatron.runtime.import_variables import compared

CUDA_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
"""Each library's own switch (Megatron's --deterministic-mode wants the same); values that the user has set are kept."""


def make_deterministic() -> None:
    """Switch off what changes bits from run to run, or with the number of ranks on a machine. Without OMP_NUM_THREADS,
    torch gets one thread."""
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
    """The properties of this process on which bits still depend: LayerNorm's weight gradients on the number of threads,
    all results on the instruction set or the kind of GPU, and on variables by which libraries choose their kernels."""
    facts: dict[str, str | int] = {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    if cuda_available():
        major, minor = torch.cuda.get_device_capability()
        facts["gpu"] = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return facts | {f"variable {name}": value for name, value in compared(os.environ).items()}
