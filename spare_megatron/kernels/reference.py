"""Every kernel in torch operations: the reference that the native kernels equal bit for bit.

It also runs where there is no native library, on the CPU and on CUDA, without host synchronisation. Temporaries have
``_CHUNK`` elements; benchmarks/reduce_kernels.py measures the cost. May assume: the package has checked the arguments,
and the thread does not flush denormal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from spare_megatron.kernels.weights import BLOCK, checksum_weights, digest_keys

_CHUNK = 1 << 18


def _chunks(count: int, first_index: int = 0) -> Iterator[tuple[int, int]]:
    """Ranges of positions that end at multiples of _CHUNK in the index space."""
    start = 0
    while start < count:
        stop = min(count, start + _CHUNK - (first_index + start) % _CHUNK)
        yield start, stop
        start = stop


def _blocks(first_index: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Of positions ``start`` to ``stop`` the number of the block of the index space, counted from the one that holds
    ``first_index``."""
    return torch.arange(first_index + start, first_index + stop, device=device) // BLOCK - first_index // BLOCK


def _scale(exponents: torch.Tensor, first_index: int, start: int, stop: int, sign: int = 1) -> torch.Tensor:
    """2^(sign * exponent) for positions ``start`` to ``stop`` (float64); there is one exponent for each block of the
    index space from the one that holds ``first_index``."""
    block = _blocks(first_index, start, stop, exponents.device)
    return ((sign * exponents[block].long() + 1023) << 52).view(torch.float64)


class KernelAdd(Protocol):
    """Adds a gradient, or two, into the tensors of an accumulator."""

    def __call__(
        self,
        source: torch.Tensor,
        exponents: int | torch.Tensor,
        other: torch.Tensor | None = None,
        apart: bool = False,
        first: bool = False,
    ) -> None: ...


def adder(accumulator: torch.Tensor, first_index: int, bound_bits: int, report: torch.Tensor) -> KernelAdd:
    bound = 2.0**bound_bits

    def add(
        source: torch.Tensor,
        exponents: int | torch.Tensor,
        other: torch.Tensor | None = None,
        apart: bool = False,
        first: bool = False,
    ) -> None:
        if first:
            accumulator.zero_()
        if other is not None and apart:
            add(other, exponents)
            other = None
        source, other = source.view(-1), None if other is None else other.view(-1)
        for start, stop in _chunks(source.numel(), first_index):
            part = source[start:stop]
            if other is not None:
                part = other[start:stop].float() + part
            scale = 2.0**exponents if isinstance(exponents, int) else _scale(exponents, first_index, start, stop)
            scaled = part.double() * scale
            finite = scaled.isfinite()
            scaled = torch.where(finite, scaled, 0.0)
            over = scaled.abs() > bound
            values = scaled.clamp_(-bound, bound).round_().long()
            accumulator[start:stop] += values.to(accumulator.dtype)
            _add_checksum(values, first_index + start, report[0])
            report[1:2] |= over.any().long() + 2 * (~finite).any().long()

    return add


def checksums(values: torch.Tensor, segments: torch.Tensor, sums: torch.Tensor) -> None:
    for (start, stop, first_index), one in zip(segments.tolist(), sums, strict=True):
        _add_checksum(values[start:stop], first_index, one)


def _add_checksum(values: torch.Tensor, first_index: int, to: torch.Tensor) -> None:
    for start, stop in _chunks(values.numel(), first_index):
        weights = checksum_weights(first_index + start, stop - start, values.device)
        to += (values[start:stop].long() * weights).sum()


def convert(
    segments: torch.Tensor,
    exponents: torch.Tensor,
    start: int,
    sums: torch.Tensor,
    addend: torch.Tensor | None,
    destination: torch.Tensor,
    found: torch.Tensor | None,
) -> None:
    destination.zero_()
    for number, (first, last, first_index) in enumerate(segments.tolist()):
        low, high = max(first - start, 0), min(last - start, sums.numel())
        index = first_index + start + low - first
        for begin, end in _chunks(high - low, index):
            part = slice(low + begin, low + end)
            integers = sums[part] if addend is None else sums[part] + addend[part]
            scale = _scale(exponents[index // BLOCK :], index, begin, end, -1)
            destination[part] = integers.double() * scale
            if found is not None:
                _add_checksum(integers, index + begin, found[number, 0])
                _add_checksum(destination[part].view(torch.int32), index + begin, found[number, 1])


def compiled_convert(segments: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype, found: torch.Tensor) -> None:
    """None: there is nothing compiled."""


def finalize(
    segments: torch.Tensor, total: torch.Tensor, destination: torch.Tensor, divisor: float, peaks: torch.Tensor
) -> None:
    for first, last, to, first_index in segments.tolist():
        sums, out = total[first:last], destination[to : to + last - first]
        own = peaks[first_index // BLOCK :]
        for start, stop in _chunks(last - first, first_index):
            value = sums[start:stop].double() / divisor
            out[start:stop] = _to_bfloat16(value) if out.dtype == torch.bfloat16 else value.float()
            size = sums[start:stop].abs().view(torch.int32)
            own.scatter_reduce_(0, _blocks(first_index, start, stop, total.device), size, "amax")


def _to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    """float64 to the nearest bf16 as if rounded once: first towards zero to fp32, with the last bit set where that is
    inexact, then to the nearest bf16. (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", 2008.)"""
    single = value.float()
    bits = single.view(torch.int32)
    inexact = single.double() != value
    bits = torch.where(inexact & (single.double().abs() > value.abs()), bits - 1, bits)
    return torch.where(inexact, bits | 1, bits).view(torch.float32).bfloat16()


def digest_sums(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [parts, 2]: the nonlinear and the linear sum of the bytes of each tensor."""
    sums = torch.zeros(len(parts), 2, dtype=torch.int64, device=parts[0].device)
    for part, pair in zip(parts, sums, strict=True):
        raw = part.detach().view(-1).view(torch.uint8)
        words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
        for start, stop in _chunks(words.numel()):
            keyed = words[start:stop] + digest_keys(start, stop - start, part.device)
            pair[0] += ((keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF)).sum()
        _add_checksum(words, 0, pair[1])
    return sums


def largest(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """int32 [1]: the bits of the largest magnitude."""
    top = torch.zeros(1, dtype=torch.int32, device=parts[0].device)
    for part in parts:
        if part.numel():
            torch.maximum(top, (part.detach().view(torch.int32) & 0x7FFFFFFF).max(), out=top)
    return top


def squares(parts: Sequence[torch.Tensor], exponent: int) -> torch.Tensor:
    """int64 [2]: the sums of the lower and of the upper 32 bits of the squares."""
    sums = torch.zeros(2, dtype=torch.int64, device=parts[0].device)
    for part in parts:
        for start, stop in _chunks(part.numel()):
            scaled = part[start:stop].detach().double() * 2.0**exponent
            whole = (scaled * scaled).round_().long()
            sums += torch.stack([(whole & 0xFFFFFFFF).sum(), (whole >> 32).sum()])
    return sums
