"""Kernels of the exact reduction: rounding gradients to integers and adding them, converting sums to fp32 and dividing
these into gradients, checksums, digests, sums of squares.

Each call runs the native library (CUDA on the current stream, or CPU with torch's number of threads), else the torch
operations of :mod:`reference`, with the same bits in the result. docs/exact_reduction.md has formats and bounds.
May assume: nothing about its arguments. Tensors must be flat, contiguous, on one device and of the named dtypes; all
others are refused with ValueError, none is converted. Promises: results depend neither on the number of threads nor on
the instruction set; no host synchronisation on CUDA, except in ``digest``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.kernels import dispatch
from spare_megatron.kernels.native import Compiled
from spare_megatron.kernels.weights import BLOCK, splitmix64, splitmix64_of

__all__ = [
    "BLOCK",
    "NOT_FINITE",
    "OVERFLOW",
    "Adder",
    "Compiled",
    "Converter",
    "Finalizer",
    "accumulate",
    "checksums",
    "digest",
    "finalize",
    "implementation",
    "largest",
    "squares",
    "start",
    "why_slow",
]

OVERFLOW, NOT_FINITE = 1, 2
"""Flags in ``report[1]``. OVERFLOW: a value beyond the bound was counted as the bound. NOT_FINITE: a value that is not
finite was counted as 0."""
EXPONENT_MAX = 800
"""With exponents of at most this magnitude the scaled value of any fp32 number is a normal double."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDEX_MAX = 1 << 62
_SQUARE_EXPONENT_MAX = 200
_BOUND_BITS_MAX = {torch.int64: 62, torch.int32: 30}
SQUARE_BITS = 26
"""Magnitudes up to 2^SQUARE_BITS have squares up to 2^52, which a double rounds to integers."""
Digestible: TypeAlias = torch.Tensor | bytes | bytearray | memoryview


def implementation(device: str = "cpu") -> str:
    """The implementation that runs on ``device``: avx512, avx2, plain, cuda or torch; behind 'torch' one sentence says
    why there is no native one."""
    return dispatch.implementation(device)


def why_slow(device: str) -> str:
    """One sentence that says what is missing where torch's operations do the work on ``device``; else empty."""
    return dispatch.why_slow(device)


def start(device: torch.device) -> None:
    """Run each kernel once on ``device``, with each choice of its types, and wait for that.

    CUDA loads a kernel when it is first launched, and waits for the device meanwhile: where a collective on it waits
    for a peer, for ever. Raises ConfigError where the device or its driver cannot run them, with one sentence.
    """
    try:
        _run_each(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the kernels of spare_megatron do not run on {device} ({str(error).partition(chr(10))[0]}): they were "
            "built for other GPUs, or the driver is too old for them; build them on this host with nvcc "
            "(pip install -e .), or install a newer driver"
        ) from error


def _run_each(device: torch.device) -> None:
    report, sums = torch.zeros(2, 2, dtype=torch.int64, device=device)
    exponents, peaks = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int16, torch.int32))
    segments, number = torch.tensor([(0, 1, 0)]), torch.zeros(1, device=device)
    for dtype, (with_other, apart) in itertools.product(FLOATS, ((False, False), (True, False), (True, True))):
        source = number.to(dtype, copy=True)
        other = source.clone() if with_other else None
        accumulate(source, sums[:1], 0, 0, 1, report, other=other, apart=apart)
        accumulate(source, peaks, exponents, 0, 1, report, other=other, apart=apart)
    for integers in (sums[:1], peaks):
        checksums(integers, segments, report[:1])
        Converter(segments, exponents).convert(0, integers, None, number, report.view(1, 2))
    for dtype in (torch.float32, torch.bfloat16):
        finalize(number, number.to(dtype, copy=True), 1.0, peaks)
    digest(number)
    squares([number], 0)
    largest([number])


def accumulate(
    source: torch.Tensor,
    accumulator: torch.Tensor,
    exponents: int | torch.Tensor,
    first_index: int,
    bound_bits: int,
    report: torch.Tensor,
    *,
    other: torch.Tensor | None = None,
    apart: bool = False,
    first: bool = False,
) -> None:
    """Add one gradient, or two: :meth:`Adder.add` of an :class:`Adder` of these arguments."""
    Adder(accumulator, first_index, bound_bits, report).add(source, exponents, other, apart=apart, first=first)


class Adder:
    """Adds rounded gradients into one accumulator again and again: accumulator += rint(source * 2^exponent), ties to
    even.

    What stays the same from call to call is checked and prepared once: for a small gradient the rest of a call takes
    longer than its sum. May assume: one thread at a time calls it.
    """

    def __init__(self, accumulator: torch.Tensor, first_index: int, bound_bits: int, report: torch.Tensor) -> None:
        """Take what stays the same.

        Args:
            accumulator: int64, with one exponent for all elements, or int32, with one for each block of BLOCK indices.
            first_index: index of the first element in the index space of checksums.
            bound_bits: 1..62, or 1..30 for int32; a value above 2^bound_bits in magnitude is flagged and counts as that
                bound.
            report: int64[2]: report[0] += checksum of the rounded values (mod 2^64), report[1] |= flags.
        """
        _check("accumulator", accumulator, tuple(_BOUND_BITS_MAX))
        _check_target(accumulator, first_index, bound_bits, report)
        self._accumulator, self._report = accumulator, report
        self._count, self._device = accumulator.numel(), accumulator.device
        self._start = accumulator.data_ptr()
        self._stop = self._start + accumulator.nbytes
        self._single = accumulator.dtype == torch.int64
        self._blocks = _num_blocks(first_index, self._count)
        self._add = dispatch.kernels(accumulator.device).adder(accumulator, first_index, bound_bits, report)

    def add(
        self,
        source: torch.Tensor,
        exponents: int | torch.Tensor,
        other: torch.Tensor | None = None,
        *,
        apart: bool = False,
        first: bool = False,
    ) -> None:
        """Add ``source``, or ``other`` + ``source``, or both.

        With an ``other`` gradient, what is rounded is other + source, added in fp32 as ``other.add_(source)`` does
        there; where they are ``apart``, both are rounded, each by itself, and added.

        Args:
            source: fp32, bf16 or fp16, contiguous, as many elements as the accumulator.
            exponents: -800..800; for an int32 accumulator int16, one for each block from the one that holds the first
                index, within +-800 (not checked).
            other: fp32 or the dtype of ``source``, as many elements; only read.
            first: the accumulator counts as 0, whatever it holds.
        """
        if not (self._fits(source, FLOATS) and (other is None or self._fits(other, (torch.float32, source.dtype)))):
            _check_sources(_flat(source), self._accumulator, None if other is None else _flat(other))
        if isinstance(exponents, int) != self._single:
            raise ValueError("an int64 accumulator takes one exponent, an int32 accumulator one for each block")
        if isinstance(exponents, int):
            _check_exponent(exponents)
        else:
            _check("exponents", exponents, (torch.int16,), self._blocks, self._device)
        self._add(source, exponents, other, apart, first)

    def _fits(self, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Whether :func:`_check_sources` has nothing against ``tensor``."""
        address = tensor.data_ptr()
        return (
            tensor.dtype in dtypes
            and tensor.numel() == self._count
            and tensor.is_contiguous()
            and tensor.device == self._device
            and address % tensor.itemsize == 0
            and (address >= self._stop or address + self._count * tensor.itemsize <= self._start)
        )


def checksums(values: torch.Tensor, segments: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the checksum of each segment of ``values`` (int64 or int32) to its element of ``sums`` (int64 [segments]).

    Args:
        segments: int64 [segments, 3] on the CPU: start and stop in ``values``, and the index of the first element in
            the index space of checksums.
    """
    _check("values", values, (torch.int64, torch.int32))
    _check_segments(segments, values.numel())
    _check("sums", sums, (torch.int64,), len(segments), values.device)
    dispatch.kernels(values.device).checksums(values, segments, sums)


class Converter:
    """Converts complete sums of one tensor to fp32, range by range, with the checksums of what went in and came out.

    May assume: the segments and the dtype of the exponents stay as they are; their values may change between calls.
    """

    def __init__(self, segments: torch.Tensor, exponents: torch.Tensor) -> None:
        """Take the layout of the tensor.

        Args:
            segments: int64 [segments, 3] on the CPU, as for :func:`checksums`, sorted and without overlaps.
            exponents: int16, one for each block of the index space, on the device of the sums; within +-800 (not
                checked).
        """
        _check("exponents", exponents, (torch.int16,))
        _check_segments(segments)
        _check_order(segments, exponents.numel())
        self._segments, self._exponents = segments, exponents
        self._run = dispatch.kernels(exponents.device)

    def convert(
        self,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        destination: torch.Tensor,
        found: torch.Tensor | None,
    ) -> None:
        """destination = (sums + addend) / 2^exponent in fp32, of the tensor's elements from ``start`` on.

        The sum of integers wraps; as a double it is scaled and rounded to fp32, where what is too large becomes
        infinite. Elements in no segment become 0.

        Args:
            sums: int64 or int32; only read.
            addend: the dtype of ``sums``, as many elements; only read.
            destination: fp32, as many elements.
            found: int64 [segments, 2]: of each segment [0] += checksum of the integers sums + addend, [1] += checksum
                of the bits of the result, taken as int32 (both mod 2^64).
        """
        device = self._exponents.device
        _check("sums", sums, (torch.int64, torch.int32), None, device)
        if addend is not None:
            _check("addend", addend, (sums.dtype,), sums.numel(), device)
            _check_apart("addend", addend, "destination", destination)
        _check("destination", destination, (torch.float32,), sums.numel(), device)
        _check_apart("sums", sums, "destination", destination)
        _check_index("start", start)
        if found is not None:
            self._check_found(found)
        self._run.convert(self._segments, self._exponents, start, sums, addend, destination, found)

    def compiled(self, dtype: torch.dtype, found: torch.Tensor) -> Compiled | None:
        """:meth:`convert` of sums of ``dtype``, for a caller in C: spare_cpu_convert and a SpareConvert of which the
        caller fills sums, addend, destination, start and count. None where torch's operations or CUDA do the work."""
        assert dtype in _BOUND_BITS_MAX, f"no sums are {dtype}"
        self._check_found(found)
        return self._run.compiled_convert(self._segments, self._exponents, dtype, found)

    def _check_found(self, found: torch.Tensor) -> None:
        shape = (len(self._segments), 2)
        if found.dtype != torch.int64 or found.shape != shape or not found.is_contiguous():
            raise ValueError(
                f"found is {found.dtype} {tuple(found.shape)}; give a contiguous int64 tensor {list(shape)}"
            )
        _check("found", found.view(-1), (torch.int64,), None, self._exponents.device)


class Finalizer:
    """Divides sums by a number and takes note of how large they were, for all segments of a tensor in one call.

    May assume: the segments stay as they are.
    """

    def __init__(self, segments: torch.Tensor, peaks: torch.Tensor) -> None:
        """Take the layout.

        Args:
            segments: int64 [segments, 4] on the CPU: start and stop in the tensor of the sums, start in that of the
                results, where they are apart, and the index of the first element in the index space. Those that share a
                block of it are parts of one parameter.
            peaks: int32, one for each block of the index space: each call sets it to max(peaks, bits of the largest
                |sum| of the block), which order as the magnitudes do.
        """
        _check("peaks", peaks, (torch.int32,))
        _check_table(segments, 4)
        self._total = self._results = 0  # the least number of elements
        for start, stop, to, first_index in segments.tolist():
            if not 0 <= start <= stop or to < 0:
                raise ValueError(f"segment {start}..{stop} to {to} begins before the tensors, or ends before it begins")
            _check_index("first_index", first_index)
            if first_index + stop - start > peaks.numel() * BLOCK:
                raise ValueError(
                    f"segment {start}..{stop} ends at index {first_index + stop - start}, but {peaks.numel()} peaks "
                    f"are for {peaks.numel() * BLOCK} indices"
                )
            self._total, self._results = max(self._total, stop), max(self._results, to + stop - start)
        self._segments, self._peaks = segments, peaks
        self._run = dispatch.kernels(peaks.device)

    def finalize(self, total: torch.Tensor, destination: torch.Tensor, divisor: float) -> None:
        """destination (fp32 or bf16) = total (fp32, no NaN) / divisor, computed in double and rounded once, where there
        are segments; the rest of ``destination`` stays as it is.

        Args:
            divisor: 2^-100..2^100 in magnitude.
        """
        _check("total", total, (torch.float32,), None, self._peaks.device)
        _check("destination", destination, (torch.float32, torch.bfloat16), None, self._peaks.device)
        for name, tensor, least in (("total", total, self._total), ("destination", destination, self._results)):
            if tensor.numel() < least:
                raise ValueError(f"{name} has {counted(tensor.numel(), 'element')}, but its segments end at {least}")
        if not math.isfinite(divisor) or not 2.0**-100 <= abs(divisor) <= 2.0**100:
            raise ValueError(f"divisor {divisor} is not within 2^-100..2^100")
        _check_apart("total", total, "destination", destination)
        self._run.finalize(self._segments, total, destination, divisor, self._peaks)


def finalize(
    total: torch.Tensor, destination: torch.Tensor, divisor: float, peaks: torch.Tensor, first_index: int = 0
) -> None:
    """What :class:`Finalizer` does, for ``total`` as one segment.

    Args:
        peaks: int32, one for each block of the index space from the one that holds ``first_index``.
    """
    count = total.numel()
    _check("destination", destination, (torch.float32, torch.bfloat16), count)
    _check_index("first_index", first_index)
    _check("peaks", peaks, (torch.int32,), _num_blocks(first_index, count), total.device)
    segments = torch.tensor([(0, count, 0, first_index % BLOCK)])
    Finalizer(segments, peaks).finalize(total, destination, divisor)


def digest(data: Digestible | Sequence[Digestible]) -> int:
    """A 64-bit hash of a tensor or byte string, or of several in order; the same on every device. It detects accidental
    changes, but is no protection against intended ones."""
    parts = [_as_tensor(part) for part in ([data] if isinstance(data, Digestible) else data)]
    state = splitmix64(len(parts))
    if parts:
        sizes = np.array([[part.nbytes] for part in parts])
        for number in splitmix64_of(np.hstack([sizes, _digest_sums(parts)]).ravel()).tolist():
            state = splitmix64(state ^ number)
    return state


def _digest_sums(parts: Sequence[torch.Tensor]) -> np.ndarray:
    """int64 [parts, 2]. Waits once for each device, in whatever order those of several come."""
    device = parts[0].device
    if all(part.device == device for part in parts):
        return dispatch.kernels(device).digest_sums(parts).cpu().numpy()
    sums = np.empty((len(parts), 2), dtype=np.int64)
    for device in dict.fromkeys(part.device for part in parts):
        there = [number for number, part in enumerate(parts) if part.device == device]
        sums[there] = dispatch.kernels(device).digest_sums([parts[number] for number in there]).cpu().numpy()
    return sums


def largest(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bits of the largest magnitude of several fp32 tensors of one device, at least one: int32 [1]. Those of
    infinity are larger than those of numbers, those of NaN larger still."""
    _check_parts(parts)
    return dispatch.kernels(parts[0].device).largest(parts)


def squares(parts: Sequence[torch.Tensor], exponent: int) -> torch.Tensor:
    """The sum of rint((x * 2^exponent)^2), ties to even, over all elements x of several fp32 tensors of one device, at
    least one: int64 [2], the sum is [0] + 2^32 * [1] with 0 <= [0] < 2^32.

    Args:
        exponent: -200..200, such that |x * 2^exponent| <= 2^SQUARE_BITS for each x, which is finite (not checked).
    """
    _check_parts(parts)
    if not -_SQUARE_EXPONENT_MAX <= exponent <= _SQUARE_EXPONENT_MAX:
        raise ValueError(f"exponent {exponent} is not within -{_SQUARE_EXPONENT_MAX}..{_SQUARE_EXPONENT_MAX}")
    low, high = dispatch.kernels(parts[0].device).squares(parts, exponent).unbind()
    return torch.stack([low & 0xFFFFFFFF, high + (low >> 32)])


def _check_parts(parts: Sequence[torch.Tensor]) -> None:
    if not parts:
        raise ValueError("no tensor was given; give at least one")
    for part in parts:
        _check("a tensor", part, (torch.float32,), None, parts[0].device)


def _as_tensor(part: Digestible) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        return torch.from_numpy(np.frombuffer(part, dtype=np.uint8).copy())
    if not part.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(part.shape)} is not contiguous; give .contiguous()")
    return part


def _num_blocks(first_index: int, count: int) -> int:
    return (first_index + count - 1) // BLOCK - first_index // BLOCK + 1 if count else 0


def _check(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    count: int | None = None,
    device: torch.device | None = None,
) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; give {' or '.join(str(dtype) for dtype in dtypes)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; give a flat, contiguous tensor"
        )
    if tensor.data_ptr() % tensor.element_size():
        raise ValueError(
            f"{name} at address {tensor.data_ptr():#x} is not aligned to its {tensor.element_size()} bytes"
        )
    if count is not None and tensor.numel() != count:
        raise ValueError(f"{name} has {counted(tensor.numel(), 'element')}; give {count}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}; give all on one device")


def _check_index(name: str, index: int) -> None:
    if not 0 <= index < _INDEX_MAX:
        raise ValueError(f"{name} {index} is not within 0..2^62 - 1")


def _check_table(segments: torch.Tensor, columns: int) -> None:
    good = segments.dtype == torch.int64 and segments.dim() == 2 and segments.shape[1] == columns
    if not good or not segments.is_contiguous():
        raise ValueError(
            f"segments is {segments.dtype} {tuple(segments.shape)}; give a contiguous int64 tensor "
            f"[segments, {columns}]"
        )
    if segments.device.type != "cpu":
        raise ValueError(f"segments is on {segments.device}; give it on the CPU")


def _check_segments(segments: torch.Tensor, count: int = _INDEX_MAX) -> None:
    _check_table(segments, 3)
    for start, stop, first_index in segments.tolist():
        if not 0 <= start <= stop <= count:
            raise ValueError(f"segment {start}..{stop} is not within the {count} values")
        _check_index("first_index", first_index)


def _check_order(segments: torch.Tensor, num_blocks: int) -> None:
    """That segments do not overlap and that there is an exponent for each of their blocks."""
    last = 0
    for start, stop, first_index in segments.tolist():
        if start < last:
            raise ValueError(f"segment {start}..{stop} begins before {last}, where the one before ends; sort them")
        if first_index + stop - start > num_blocks * BLOCK:
            raise ValueError(
                f"segment {start}..{stop} ends at index {first_index + stop - start}, but {num_blocks} exponents are "
                f"for {num_blocks * BLOCK} indices"
            )
        last = stop


def _check_exponent(exponent: int) -> None:
    if not -EXPONENT_MAX <= exponent <= EXPONENT_MAX:
        raise ValueError(f"exponent {exponent} is not within -{EXPONENT_MAX}..{EXPONENT_MAX}")


def _check_apart(name: str, one: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    start, other_start = one.data_ptr(), other.data_ptr()
    stop, other_stop = start + one.nbytes, other_start + other.nbytes
    if max(start, other_start) < min(stop, other_stop):
        raise ValueError(f"{name} and {other_name} share memory; give separate buffers")


def _check_target(accumulator: torch.Tensor, first_index: int, bound_bits: int, report: torch.Tensor) -> None:
    _check("report", report, (torch.int64,), 2, accumulator.device)
    _check_index("first_index", first_index)
    bound_bits_max = _BOUND_BITS_MAX[accumulator.dtype]
    if not 1 <= bound_bits <= bound_bits_max:
        raise ValueError(f"bound_bits {bound_bits} is not within 1..{bound_bits_max}")


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """Where it is contiguous; else itself, to be refused."""
    return gradient.view(-1) if gradient.is_contiguous() else gradient


def _check_sources(source: torch.Tensor, accumulator: torch.Tensor, other: torch.Tensor | None) -> None:
    _check("source", source, FLOATS, accumulator.numel(), accumulator.device)
    _check_apart("source", source, "accumulator", accumulator)
    if other is not None:
        dtypes = tuple(dict.fromkeys((torch.float32, source.dtype)))
        _check("other", other, dtypes, accumulator.numel(), accumulator.device)
        _check_apart("other", other, "accumulator", accumulator)
