"""Looks whether this host can run a group's ranks. Run as a short process of its own before a lost group is started
again: ``python -m spare_megatron.launch.health_probe NEEDS``.

It prints ``KIND: sentence`` for the first thing that is wrong and leaves with 1; with 0 where nothing is. Only where
ranks use CUDA it imports torch, and computes a known sum on each of their devices; else the sum is one of plain
integers, because a processor that cannot run Python shows that without torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from spare_megatron.runtime.free_memory import available_bytes

GIB = float(2**30)
DISK_FLOOR_BYTES = 256 << 20
"""Free space that a directory must have in which the job writes."""
SHARED_MEMORY = "/dev/shm"
WRITTEN_BYTES = 1 << 16
SUMMED = 1 << 20


@dataclass(frozen=True)
class HealthNeeds:
    """What the ranks of one group need of their host."""

    memory_bytes: int
    directories: tuple[str, ...]
    devices: tuple[int, ...] = ()
    """Local numbers of the ranks that use CUDA; empty: none does."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HealthNeeds:
        plain = json.loads(text)
        return cls(plain["memory_bytes"], tuple(plain["directories"]), tuple(plain["devices"]))


def faults(needs: HealthNeeds) -> Iterator[str]:
    """What is wrong, each as 'KIND: sentence'; the costly checks last."""
    free_bytes = available_bytes()
    if free_bytes < needs.memory_bytes:
        yield (
            f"memory: {free_bytes / GIB:.2f} GiB of memory are available, the group needs "
            f"{needs.memory_bytes / GIB:.2f}"
        )
    for directory in needs.directories:
        yield from _disk_fault(directory)
    yield from _shared_memory_fault(SHARED_MEMORY)
    if needs.devices:
        yield from _cuda_faults(needs.devices)
    elif sum(range(SUMMED)) != SUMMED * (SUMMED - 1) // 2:
        yield "device: this processor computes a wrong sum"


def _disk_fault(directory: str) -> Iterator[str]:
    """``directory`` may not exist yet; then it will be made in the nearest one above it that does."""
    path = Path(directory).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        reported = os.statvfs(path)
    except OSError as error:
        yield f"disk: {directory} cannot be used: {error.strerror}"
        return
    free_bytes = reported.f_bavail * reported.f_frsize
    if free_bytes < DISK_FLOOR_BYTES:
        yield f"disk: {free_bytes >> 20} MiB are free in {directory}, at least {DISK_FLOOR_BYTES >> 20} are needed"


def _shared_memory_fault(directory: str) -> Iterator[str]:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
    except OSError as error:
        yield f"shm: {directory} cannot be written: {error.strerror}"


def _cuda_faults(ranks: tuple[int, ...]) -> Iterator[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield "device: no CUDA device is visible"
        return
    for number in sorted({rank % count for rank in ranks}):
        try:
            found = int(torch.arange(SUMMED, dtype=torch.int64, device=f"cuda:{number}").sum().item())
        except RuntimeError as error:
            yield f"device: CUDA device {number} does not compute: {str(error).splitlines()[0]}"
            continue
        if found != SUMMED * (SUMMED - 1) // 2:
            yield f"device: CUDA device {number} computes a wrong sum"


def main() -> int:
    """Check what the one argument says; returns the exit code."""
    fault = next(faults(HealthNeeds.from_json(sys.argv[1])), None)
    if fault is not None:
        sys.stdout.write(f"{fault}\n")
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())
