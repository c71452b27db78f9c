"""Loads the compiled libraries beside this file with ctypes and calls them with the addresses of tensors.

May assume: the package has checked the arguments. Promises: a library of another version is refused, and named; the
libraries depend on no version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p, cast
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spare_megatron.config import native_code
from spare_megatron.kernels.reference import KernelAdd

VERSION = 10
"""SPARE_KERNELS_VERSION of kernels/spare_kernels.h."""
LEVELS = ("plain", "avx2", "avx512")
_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ELEMENTS = {torch.int64: 0, torch.int32: 1}


class _Accumulate(Structure):
    _fields_ = (
        ("source", c_void_p),
        ("other", c_void_p),
        ("accumulator", c_void_p),
        ("exponents", c_void_p),
        ("report", c_void_p),
        ("count", c_int64),
        ("first_index", c_int64),
        ("source_type", c_int32),
        ("other_type", c_int32),
        ("accumulator_type", c_int32),
        ("exponent", c_int32),
        ("bound_bits", c_int32),
        ("apart", c_int32),
        ("first", c_int32),
    )


class _Convert(Structure):
    _fields_ = (
        ("sums", c_void_p),
        ("addend", c_void_p),
        ("destination", c_void_p),
        ("exponents", c_void_p),
        ("segments", c_void_p),
        ("found", c_void_p),
        ("num_segments", c_int64),
        ("start", c_int64),
        ("count", c_int64),
        ("type", c_int32),
    )
    tensors: tuple[torch.Tensor | None, ...]
    """Those whose memory the fields that stay the same point to."""


class _Finalize(Structure):
    _fields_ = (
        ("total", c_void_p),
        ("destination", c_void_p),
        ("peaks", c_void_p),
        ("segments", c_void_p),
        ("num_segments", c_int64),
        ("divisor", c_double),
        ("destination_type", c_int32),
    )
    tensors: tuple[torch.Tensor, ...]
    """The table of segments, which ``segments`` points to."""


class Compiled(NamedTuple):
    """A compiled function for a caller in C, and its first argument."""

    function: int
    """Its address."""
    job: Structure
    """Keeps alive the tensors that it points to."""


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "accumulate": (POINTER(_Accumulate),),
    "checksums": (c_void_p, c_int, c_void_p, c_int64, c_void_p),
    "convert": (POINTER(_Convert),),
    "finalize": (POINTER(_Finalize),),
    "digests": (POINTER(c_void_p), POINTER(c_int64), c_int64, c_void_p),
    "largest": (POINTER(c_void_p), POINTER(c_int64), c_int64, c_void_p),
    "squares": (POINTER(c_void_p), POINTER(c_int64), c_int64, c_int, c_void_p),
}


def _conversion(
    segments: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype, found: torch.Tensor | None
) -> _Convert:
    """The fields that are the same for all ranges of a tensor."""
    job = _Convert(
        exponents=exponents.data_ptr(),
        segments=segments.data_ptr(),
        found=None if found is None else found.data_ptr(),
        num_segments=len(segments),
        type=_ELEMENTS[dtype],
    )
    job.tensors = (segments, exponents, found)
    return job


class Library:
    """What the CPU and the CUDA library have in common.

    ``call(name, device, *arguments)`` of a subclass appends the last argument: a number of threads, or a CUDA stream.
    """

    _prefix = ""
    _last: type = c_int

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = native_code.load(path, VERSION, "spare_kernels_version", "kernels of ")
        for name, types in _SIGNATURES.items():
            getattr(self._library, self._prefix + name).argtypes = (*types, self._last)

    def call(self, name: str, device: torch.device, *arguments: Any) -> int:
        raise NotImplementedError

    def adder(self, accumulator: torch.Tensor, first_index: int, bound_bits: int, report: torch.Tensor) -> KernelAdd:
        """Its calls fill only what differs from call to call into the arguments: Python takes as long for the rest as a
        small gradient takes to be added."""
        job = _Accumulate(
            accumulator=accumulator.data_ptr(),
            report=report.data_ptr(),
            count=accumulator.numel(),
            first_index=first_index,
            accumulator_type=_ELEMENTS[accumulator.dtype],
            bound_bits=bound_bits,
        )
        device, argument, call = accumulator.device, byref(job), self.call

        def add(
            source: torch.Tensor,
            exponents: int | torch.Tensor,
            other: torch.Tensor | None = None,
            apart: bool = False,
            first: bool = False,
        ) -> None:
            job.source = source.data_ptr()
            job.source_type = job.other_type = _FLOATS[source.dtype]
            job.apart, job.first = apart, first
            if other is None:
                job.other = None
            else:
                job.other, job.other_type = other.data_ptr(), _FLOATS[other.dtype]
            if isinstance(exponents, int):
                job.exponent, job.exponents = exponents, None
            else:
                job.exponent, job.exponents = 0, exponents.data_ptr()
            call("accumulate", device, argument)

        return add

    def checksums(self, values: torch.Tensor, segments: torch.Tensor, sums: torch.Tensor) -> None:
        kind, address = _ELEMENTS[values.dtype], segments.data_ptr()
        self.call("checksums", values.device, values.data_ptr(), kind, address, len(segments), sums.data_ptr())

    def convert(
        self,
        segments: torch.Tensor,
        exponents: torch.Tensor,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        destination: torch.Tensor,
        found: torch.Tensor | None,
    ) -> None:
        job = _conversion(segments, exponents, sums.dtype, found)
        job.sums, job.addend = sums.data_ptr(), None if addend is None else addend.data_ptr()
        job.destination, job.start, job.count = destination.data_ptr(), start, sums.numel()
        self.call("convert", sums.device, byref(job))

    def compiled_convert(
        self, segments: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype, found: torch.Tensor
    ) -> Compiled | None:
        return None

    def finalize(
        self,
        segments: torch.Tensor,
        total: torch.Tensor,
        destination: torch.Tensor,
        divisor: float,
        peaks: torch.Tensor,
    ) -> None:
        job = _Finalize(
            total.data_ptr(),
            destination.data_ptr(),
            peaks.data_ptr(),
            segments.data_ptr(),
            len(segments),
            divisor,
            _FLOATS[destination.dtype],
        )
        job.tensors = (segments,)
        self.call("finalize", total.device, byref(job))

    def digest_sums(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        number, device = len(parts), parts[0].device
        sums = torch.zeros(number, 2, dtype=torch.int64, device=device)
        sizes = (c_int64 * number)(*[part.nbytes for part in parts])
        self.call("digests", device, _addresses(parts), sizes, number, sums.data_ptr())
        return sums

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        top = torch.zeros(1, dtype=torch.int32, device=parts[0].device)
        self.call("largest", top.device, _addresses(parts), _counts(parts), len(parts), top.data_ptr())
        return top

    def squares(self, parts: Sequence[torch.Tensor], exponent: int) -> torch.Tensor:
        sums = torch.zeros(2, dtype=torch.int64, device=parts[0].device)
        self.call("squares", sums.device, _addresses(parts), _counts(parts), len(parts), exponent, sums.data_ptr())
        return sums


def _addresses(parts: Sequence[torch.Tensor]) -> Array[c_void_p]:
    return (c_void_p * len(parts))(*[part.data_ptr() for part in parts])


def _counts(parts: Sequence[torch.Tensor]) -> Array[c_int64]:
    return (c_int64 * len(parts))(*[part.numel() for part in parts])


class CpuLibrary(Library):
    """Runs in the calling thread; for many bytes in several threads, at most torch's number."""

    _prefix = "spare_cpu_"
    _last = c_int

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._functions = {name: getattr(self._library, self._prefix + name) for name in _SIGNATURES}
        for function in self._functions.values():
            function.restype = None
        self._library.spare_cpu_bytes_per_thread.argtypes = (c_int64,)
        self._library.spare_cpu_bytes_per_thread.restype = c_int64

    def level(self) -> str:
        return LEVELS[self._library.spare_cpu_level()]

    def limit(self, level: str) -> str:
        """Use instruction sets up to ``level`` only; returns the one in use. For tests and benchmarks."""
        return LEVELS[self._library.spare_cpu_limit(LEVELS.index(level))]

    def bytes_per_thread(self, least: int) -> int:
        """Use a thread for each ``least`` bytes that a call reads and writes; returns the old value. For tests."""
        return int(self._library.spare_cpu_bytes_per_thread(least))

    def compiled_convert(
        self, segments: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype, found: torch.Tensor
    ) -> Compiled | None:
        address = cast(self._functions["convert"], c_void_p).value
        assert address is not None, "a function of a loaded library has an address"
        return Compiled(address, _conversion(segments, exponents, dtype, found))

    def call(self, name: str, device: torch.device, *arguments: Any) -> int:
        self._functions[name](*arguments, torch.get_num_threads())
        return 0


class CudaLibrary(Library):
    """Queues kernels on torch's current stream of the tensors' device."""

    _prefix = "spare_cuda_"
    _last = c_void_p

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._library.spare_cuda_error.argtypes = (c_int,)
        self._library.spare_cuda_error.restype = c_char_p

    def call(self, name: str, device: torch.device, *arguments: Any) -> int:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            error = int(getattr(self._library, self._prefix + name)(*arguments, stream))
        if error:
            raise RuntimeError(f"kernel {name} on {device}: {self._library.spare_cuda_error(error).decode()}")
        return 0


def find(name: str) -> Path | None:
    """The library file ``name`` (given without the interpreter's suffix) beside this file, or None."""
    return native_code.find(Path(__file__).parent, name)
