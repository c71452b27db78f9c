"""Chooses the implementation for a device: its native library, or torch's operations where there is none.

A library is looked for at the first call. One of another version raises ConfigError; a missing one is no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch

from spare_megatron.kernels import native, reference

COST = "adding a gradient takes about 20 times as long as with AVX-512 (benchmarks/reduce_kernels.py)"


class Kernels(Protocol):
    """The functions of an implementation: the module :mod:`reference`, or a library of :mod:`native`."""

    def adder(
        self, accumulator: torch.Tensor, first_index: int, bound_bits: int, report: torch.Tensor
    ) -> reference.KernelAdd:
        """The function that adds gradients into these tensors, as the package's ``accumulate`` specifies."""

    def checksums(self, values: torch.Tensor, segments: torch.Tensor, sums: torch.Tensor) -> None: ...

    def convert(
        self,
        segments: torch.Tensor,
        exponents: torch.Tensor,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        destination: torch.Tensor,
        found: torch.Tensor | None,
    ) -> None: ...

    def compiled_convert(
        self, segments: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype, found: torch.Tensor
    ) -> native.Compiled | None:
        """``convert`` of sums of ``dtype`` for a caller in C, where this implementation has that."""

    def finalize(
        self,
        segments: torch.Tensor,
        total: torch.Tensor,
        destination: torch.Tensor,
        divisor: float,
        peaks: torch.Tensor,
    ) -> None: ...

    def digest_sums(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def squares(self, parts: Sequence[torch.Tensor], exponent: int) -> torch.Tensor: ...


@lru_cache
def _found(device_type: str) -> tuple[Kernels, str]:
    """The kernels of a device, and why they are not native ('' when they are)."""
    name = {"cpu": "_native", "cuda": "_native_cuda"}.get(device_type)
    if name is None:
        return reference, f"there are no native kernels for {device_type}"
    path = native.find(name)
    if path is None:
        tool = "C++ compiler" if device_type == "cpu" else "nvcc"
        return reference, f"no native kernels for {device_type} were built (install a {tool}, then pip install -e .)"
    try:
        return (native.CpuLibrary if device_type == "cpu" else native.CudaLibrary)(path), ""
    except OSError as error:
        return reference, f"{path} cannot be loaded ({error}); build it again with pip install -e ."


def kernels(device: torch.device) -> Kernels:
    """The implementation for tensors on ``device``."""
    return _found(device.type)[0]


def why_slow(device_type: str) -> str:
    """Why there are no native kernels, and what that costs; empty where there are."""
    why = _found(device_type)[1]
    return f"{why}; {COST}" if why else ""


def implementation(device_type: str) -> str:
    """Name of the implementation, and one sentence why where it is not native."""
    found, why = _found(device_type)
    if why:
        return f"torch: {why_slow(device_type)}"
    return found.level() if isinstance(found, native.CpuLibrary) else "cuda"
