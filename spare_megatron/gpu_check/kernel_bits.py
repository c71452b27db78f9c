"""The kernels of a device against the reference on the CPU: every function, type and mode, bit for bit; on streams and
in threads; and the gradients of a small model over some steps.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spare_megatron import kernels
from spare_megatron.gpu_check.table import CheckError, Machine, MachineCheck, SkipError
from spare_megatron.kernels import dispatch, reference

COUNTS = (1, 5, 1023, 1025, 5000, 300_001)
INDICES = (0, 777, (1 << 41) + 1022)
STEPS = 20
SANITIZER_S = 900.0
MadeTensors = list[torch.Tensor]
KernelCase = tuple[str, Callable[[Any, torch.device], MadeTensors]]
"""A name, and what an implementation makes of it on a device. Arguments are the same at each call."""


def cases(random: torch.Generator, counts: tuple[int, ...] = COUNTS) -> Iterator[KernelCase]:
    """Every function with all types and modes, for each number of elements."""
    for count, index in itertools.product(counts, INDICES):
        where = f"{count} elements from index {index}"
        values = torch.randn(count, generator=random) * torch.exp2(
            torch.randint(-30, 10, (count,), generator=random).float()
        )
        values[count // 2], values[count // 3] = torch.nan, torch.inf
        other = torch.randn(count, generator=random)
        sums = torch.randint(-(2**40), 2**40, (count,), generator=random)
        narrow = torch.randint(-(2**20), 2**20, (count,), dtype=torch.int32, generator=random)
        yield from _accumulations(where, values, other, sums, narrow, index)
        yield from _others(where, sums, narrow, other, index)


def _accumulations(
    where: str, values: torch.Tensor, other: torch.Tensor, sums: torch.Tensor, narrow: torch.Tensor, index: int
) -> Iterator[KernelCase]:
    blocks = kernels._num_blocks(index, values.numel())
    exponents = torch.arange(blocks, dtype=torch.int16) % 5 + 8
    modes = ((None, False), (torch.float32, False), (torch.float32, True), ("same", False), ("same", True))
    for dtype, start, (kind, apart), first in itertools.product(kernels.FLOATS, (sums, narrow), modes, (True, False)):

        def accumulate(
            run: Any,
            device: torch.device,
            *,
            dtype: torch.dtype = dtype,
            start: torch.Tensor = start,
            kind: Any = kind,
            apart: bool = apart,
            first: bool = first,
        ) -> MadeTensors:
            total, report = start.to(device, copy=True), torch.tensor([5, 0], device=device)
            earlier = None if kind is None else other.to(device, dtype if kind == "same" else kind)
            exact = 40 if start is sums else exponents.to(device)
            bound = 55 if start is sums else 25
            run.adder(total, index, bound, report)(values.to(device, dtype), exact, earlier, apart, first)
            return [total, report]

        name = f"accumulate {dtype} into {start.dtype}, {'with ' if kind else 'without '}another, apart {apart}"
        yield f"{name}, first {first}, {where}", accumulate


def _others(
    where: str, sums: torch.Tensor, narrow: torch.Tensor, total: torch.Tensor, index: int
) -> Iterator[KernelCase]:
    count = sums.numel()
    middle = count // 3
    segments = torch.tensor([(0, middle, 777), (middle, count, 8192 + count)])
    exponents = torch.arange(kernels._num_blocks(0, 16_384 + 2 * count), dtype=torch.int16) % 60 + 20
    parts = torch.tensor([(0, middle, 0, index % kernels.BLOCK), (middle, count, middle, 8192 + count)])
    for values, added in itertools.product((sums, narrow), (True, False)):

        def convert(run: Any, device: torch.device, values: torch.Tensor = values, added: bool = added) -> MadeTensors:
            out, found = torch.empty(count, device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)
            there = values.to(device)
            run.convert(segments, exponents.to(device), 0, there, there.flip(0) if added else None, out, found)
            return [out, found]

        def checksums(run: Any, device: torch.device, values: torch.Tensor = values) -> MadeTensors:
            found = torch.zeros(2, dtype=torch.int64, device=device)
            run.checksums(values.to(device), segments, found)
            return [found]

        yield f"convert {values.dtype}, added {added}, {where}", convert
        yield f"checksums {values.dtype}, {where}", checksums
    for dtype, divisor in itertools.product((torch.float32, torch.bfloat16), (3.0, 2.0**40)):

        def finalize(
            run: Any, device: torch.device, dtype: torch.dtype = dtype, divisor: float = divisor
        ) -> MadeTensors:
            out = torch.empty(count, dtype=dtype, device=device)
            peaks = torch.zeros(exponents.numel(), dtype=torch.int32, device=device)
            run.finalize(parts, total.to(device), out, divisor, peaks)
            return [out, peaks]

        yield f"finalize {dtype} by {divisor}, {where}", finalize
    odd = sums.view(torch.uint8)[: 8 * count - 3]
    yield (
        f"digest, {where}",
        lambda run, device: [run.digest_sums([odd.to(device), narrow.to(device).view(torch.uint8)])],
    )


def differs(made: MadeTensors, expected: MadeTensors) -> bool:
    """Whether any bit does."""
    return any(
        not torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(made, expected, strict=True)
    )


def _native(device: torch.device) -> Any:
    found = dispatch.kernels(device)
    if found is reference:
        raise SkipError(kernels.why_slow(device.type))
    return found


def _bits(machine: Machine) -> dict[str, Any]:
    native, cpu = _native(machine.device), torch.device("cpu")
    counts = COUNTS if machine.times(1, 0) else COUNTS[:-1]
    wrong, number = [], 0
    for name, make in cases(torch.Generator().manual_seed(machine.seed), counts):
        number += 1
        if differs(make(native, machine.device), make(reference, cpu)):
            wrong.append(name)
    values = {"cases": number, "with other bits": len(wrong), "on": str(machine.device)}
    if wrong:
        raise CheckError(f"other bits than the reference: {wrong[0]}", values)
    return values


def _threads(machine: Machine) -> dict[str, Any]:
    """Four threads, each on a stream of its own where there are streams."""
    native, cpu = _native(machine.device), torch.device("cpu")
    chosen = list(cases(torch.Generator().manual_seed(machine.seed + 1), (5000,)))
    expected = [make(reference, cpu) for _, make in chosen]
    wrong: list[str] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream(machine.device) if machine.gpus else None):
            for (name, make), right in zip(chosen, expected, strict=True):
                if differs(make(native, machine.device), right):
                    wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise CheckError(f"other bits in a thread: {wrong[0]}", {"with other bits": len(wrong)})
    return {"cases": 4 * len(chosen)}


def _steps(machine: Machine) -> dict[str, Any]:
    """The gradients of a small model, made on the device, summed there and on the CPU."""
    machine.want_gpus()
    native = _native(machine.device)
    torch.manual_seed(machine.seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).to(machine.device)
    numel = sum(one.numel() for one in model.parameters())
    there = [torch.zeros(numel, dtype=torch.int64, device=machine.device), torch.zeros(2, dtype=torch.int64)]
    there[1] = there[1].to(machine.device)
    here = [one.cpu() for one in there]
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(64, 256, device=machine.device)).square().mean().backward()
        gradient = torch.cat([one.grad.view(-1) for one in model.parameters() if one.grad is not None])
        native.adder(there[0], 777, 55, there[1])(gradient, 40)
        reference.adder(here[0], 777, 55, here[1])(gradient.cpu(), 40)
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.01 * one.grad  # type: ignore[misc,operator]
    if differs(there, here):
        raise CheckError(f"the sums of {STEPS} steps differ from those of the CPU")
    return {"steps": STEPS, "elements": numel, "peak MiB": torch.cuda.max_memory_allocated(machine.device) >> 20}


def _sanitizer(machine: Machine) -> dict[str, Any]:
    machine.want_gpus()
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise SkipError("compute-sanitizer is not on the path; it comes with the CUDA toolkit")
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-m", __name__]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_S, check=False)
        if done.returncode:
            raise CheckError(f"compute-sanitizer --tool {kind}: {(done.stdout + done.stderr)[-500:]}")
    return {"tools": "memcheck, racecheck"}


CHECKS = (
    MachineCheck("kernel bits", "every kernel, type and mode has the bits of the reference", _bits),
    MachineCheck("kernels in threads", "four threads on streams of their own get the same bits", _threads),
    MachineCheck("sums of steps", f"sums of {STEPS} steps' gradients are those of the CPU, bit for bit", _steps),
    MachineCheck("sanitizer", "compute-sanitizer finds nothing in the kernels", _sanitizer),
)


if __name__ == "__main__":  # what the sanitizer looks at
    for _, make_one in cases(torch.Generator().manual_seed(1), COUNTS[:4]):
        make_one(dispatch.kernels(torch.device("cuda", 0)), torch.device("cuda", 0))
    torch.cuda.synchronize()
