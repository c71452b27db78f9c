"""The environment variables that imports read. A process that was forked by one with other values would have imported
otherwise; and what a script sets before its imports comes too late in a forked process, whose parent has made them.

And those that choose how libraries compute: ranks with other values have other bits, which nothing notices, because all
groups apply the same sums."""

from __future__ import annotations

from collections.abc import Mapping

IMPORT_VARIABLES = (
    *(
        "ACCELERATE",
        "CUBLAS",
        "CUDA",
        "GLOO",
        "GOTO",
        "HF_",
        "HIP",
        "HSA",
        "KMP",
        "LANG",
        "LC_",
        "LD_",
        "MALLOC",
        "MEGATRON",
    ),
    *("MKL", "NCCL", "NVIDIA", "NVTE", "OMP", "OPENBLAS", "PYTHON", "PYTORCH", "RCCL", "ROCR"),
    *("TORCH", "TRANSFORMERS", "TRITON", "TZ", "XDG", "HOME"),
    *("ATEN", "DNNL", "GLIBC", "NPY", "NUMPY", "NVPL", "ONEDNN", "UCX"),
)
"""Beginnings of the names of variables that an import may read: a parent with other values forks nothing."""
ARITHMETIC = (
    *("ATEN_CPU", "CUBLAS", "CUDA_DEVICE_MAX_CONNECTIONS", "DNNL_", "MKL_", "NVIDIA_TF32", "NVTE_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTORCH_", "TORCH_ALLOW_TF32", "TORCH_BLAS", "TORCH_LINALG"),
    *("NCCL_ALGO", "NCCL_COLLNET", "NCCL_MAX_", "NCCL_MIN_", "NCCL_NVLS", "NCCL_PROTO"),
)
"""Beginnings of the names of variables with which libraries choose kernels, precisions, and the order of sums."""
_NO_MATTER = ("PYTHONDONTWRITEBYTECODE", "TORCHDYNAMO_DISABLE", "NCCL_DEBUG")
"""Variables with such names that are read at each use."""

_SEEN_OTHERWISE = ("ATEN_CPU", "OMP_", "PYTORCH_")
"""Those of ``ARITHMETIC`` whose effect is compared itself (the instruction set, the number of threads), or that hold an
allocator's settings and a host's paths too."""
_NO_BITS = ("CACHE", "DEBUG", "_DIR", "PATH", "VERBOSE")
"""Parts of the names of variables that are a host's own."""

_forked_with: dict[str, str] | None = None
"""These variables as this process was forked; None: it was not."""


def import_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ`` that an import may read."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(IMPORT_VARIABLES) and name not in _NO_MATTER
    }


def decides_bits(name: str) -> bool:
    """Whether libraries compute otherwise with another value of this variable."""
    return name.startswith(ARITHMETIC)


def compared(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ`` that decide bits and must be the same in all groups of a job with exact sums."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if decides_bits(name) and not name.startswith(_SEEN_OTHERWISE) and not any(part in name for part in _NO_BITS)
    }


def note_fork(environ: Mapping[str, str]) -> None:
    """This process was forked with this environment, by one that has made its imports."""
    global _forked_with
    _forked_with = import_environment(environ)


def set_too_late(environ: Mapping[str, str]) -> list[str]:
    """The names of variables that were set since this process was forked, after the imports that read them."""
    if _forked_with is None:
        return []
    now = import_environment(environ)
    return sorted(name for name in now.keys() | _forked_with.keys() if now.get(name) != _forked_with.get(name))
