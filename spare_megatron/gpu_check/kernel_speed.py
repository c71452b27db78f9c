"""The kernels' bandwidth on a GPU, beside a copy of as many bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from spare_megatron import kernels
from spare_megatron.gpu_check.table import CheckError, Machine, MachineCheck

ELEMENTS = 1 << 28
REPEATS = 20
LEAST, LEAST_FINALIZE = 0.75, 0.5


def _seconds(call: Callable[[], object]) -> float:
    """The median of REPEATS, by events of the device."""
    took = []
    for _ in range(REPEATS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        took.append(float(begin.elapsed_time(end)) / 1000)
    return statistics.median(took[2:])


def _speed(machine: Machine) -> dict[str, Any]:
    machine.want_gpus()
    device, count = machine.device, ELEMENTS
    total, report = (torch.zeros(size, dtype=torch.int64, device=device) for size in (count, 2))
    gradient, out = torch.randn(count, device=device), torch.empty(count, device=device)
    half = torch.empty(count, dtype=torch.bfloat16, device=device)
    blocks = -(-count // kernels.BLOCK)
    peaks = torch.zeros(blocks, dtype=torch.int32, device=device)
    segments = torch.tensor([(0, count, 0)])
    converter = kernels.Converter(segments, torch.full((blocks,), 40, dtype=torch.int16, device=device))
    found = torch.zeros(1, 2, dtype=torch.int64, device=device)
    starts = torch.arange(256).view(-1, 1) * (count // 256)
    parts, sums = starts + torch.tensor([0, count // 256, 0, 0]), torch.zeros(256, dtype=torch.int64, device=device)
    bfloat = gradient.bfloat16()
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "accumulate fp32": (20, lambda: kernels.accumulate(gradient, total, 20, 0, 57, report)),
        "accumulate bf16": (18, lambda: kernels.accumulate(bfloat, total, 20, 0, 57, report)),
        "checksums": (8, lambda: kernels.checksums(total, segments, report[:1])),
        "convert": (12, lambda: converter.convert(0, total, None, out, found)),
        "finalize fp32": (8, lambda: kernels.finalize(gradient, out, 96.0, peaks)),
        "finalize bf16": (6, lambda: kernels.finalize(gradient, half, 96.0, peaks)),
        "checksums of 256 parts": (8, lambda: kernels.checksums(total, parts[:, [0, 1, 3]].contiguous(), sums)),
        "finalize of 256 parts": (8, lambda: kernels.Finalizer(parts, peaks).finalize(gradient, out, 96.0)),
    }
    copied = _seconds(lambda: out.copy_(gradient))
    copy = 8 * count / copied
    values = {"copy GB/s": round(copy / 1e9, 1)}
    slow = []
    for name, (size, call) in calls.items():
        speed = size * count / _seconds(call)
        values[f"{name} of a copy"] = round(speed / copy, 3)
        if speed < copy * (LEAST_FINALIZE if name.startswith("finalize") else LEAST):
            slow.append(name)
    if slow:
        raise CheckError(f"slower than the criterion: {', '.join(slow)}", values)
    return values


CHECKS = (
    MachineCheck(
        "kernel speed",
        f"kernels at 2^28 elements reach {LEAST:.0%} of a copy's bytes a second, finalize {LEAST_FINALIZE:.0%}",
        _speed,
    ),
)
