"""Every instruction set of this machine, with one thread and with two (for less work than they are used for in a job),
as fixtures; all is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spare_megatron.kernels import dispatch, native

CPU = torch.device("cpu")


def library() -> native.CpuLibrary:
    found = dispatch.kernels(CPU)
    if not isinstance(found, native.CpuLibrary):
        pytest.skip(dispatch.implementation("cpu"))
    return found


@pytest.fixture(
    params=[(level, threads) for level in native.LEVELS for threads in (1, 2)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def cpu(request: pytest.FixtureRequest) -> Iterator[native.CpuLibrary]:
    found, threads = library(), torch.get_num_threads()
    level = found.level()
    if found.limit(request.param[0]) != request.param[0]:
        found.limit(level)
        pytest.skip(f"this processor has no {request.param[0]}")
    torch.set_num_threads(request.param[1])
    least = found.bytes_per_thread(1 << 20)
    yield found
    found.bytes_per_thread(least)
    found.limit(level)
    torch.set_num_threads(threads)


class Cpus:
    """Calling it gives the library at one instruction set after the other, with ``threads`` threads; outside of that
    loop there is one thread. For tests whose reference takes longest: it is computed once for all."""

    def __init__(self, found: native.CpuLibrary, threads: int) -> None:
        self._found, self.threads = found, threads

    def __call__(self) -> Iterator[native.CpuLibrary]:
        torch.set_num_threads(self.threads)
        try:
            for name in native.LEVELS:
                if self._found.limit(name) == name:
                    yield self._found
        finally:
            torch.set_num_threads(1)


@pytest.fixture(params=(1, 2), ids=("1 thread", "2 threads"))
def cpus(request: pytest.FixtureRequest) -> Iterator[Cpus]:
    found, threads = library(), torch.get_num_threads()
    level, least = found.level(), found.bytes_per_thread(1 << 20)
    torch.set_num_threads(1)
    yield Cpus(found, request.param)
    found.bytes_per_thread(least)
    found.limit(level)
    torch.set_num_threads(threads)
