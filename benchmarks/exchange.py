"""Times the exchange of sums over NCCL where each call has a GPU's latency: what of it is bytes, and what is waiting.

    python benchmarks/exchange.py [--json FILE] [--parameters 1e9] [--rounds 5]

Two members in one process run the real communicators, reductions and NCCL backend; tests/nccl_as_torch.py stands for
torch's process group. Its collectives move nothing: each begins when the stream is free and CALL_S have passed since
the call, and takes its bytes over BANDWIDTH, as a member of N = 8 sends them. So kernels, copies and conversions cost
nothing here, and memory is never touched: the figures are the least that this code's order of calls and waits allows,
and the fastest of some rounds is taken.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.collectives import backend_nccl, nccl_start
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.reduction import PlainReduction, ReduceOutcome, Reduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators
from tests import nccl_as_torch

CALL_S, BANDWIDTH, GROUPS = 0.4e-3, 50e9, 8
DEVICES = nccl_start.Devices(True, "", 8, 0, "a stand-in", "2.14", (2, 30))
MIB = 1 << 20


class TimedProcessGroup(nccl_as_torch.ProcessGroup):
    """Its collectives take time, and move nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.free_s = 0.0
        self.ends_s: list[float] = [0.0]

    def _timed(self, name: str, tensor: torch.Tensor, whole: torch.Tensor) -> nccl_as_torch.Work:
        work = self._issue(name, tensor)
        begins_s = max(self.free_s, time.monotonic() + CALL_S)
        self.free_s = begins_s + (GROUPS - 1) / GROUPS * whole.nbytes / BANDWIDTH
        self.ends_s.append(self.free_s)
        return work

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> nccl_as_torch.Work:
        work = self._timed("allreduce", tensors[0], tensors[0])
        if tensors[0].dtype == torch.float64:  # the header: both members give the same
            tensors[0] *= 2
        return work

    def _reduce_scatter_base(self, mine: torch.Tensor, whole: torch.Tensor, options: Any) -> nccl_as_torch.Work:
        return self._timed("reduce_scatter", mine, whole)

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor) -> nccl_as_torch.Work:
        return self._timed("allgather", mine, whole)

    def complete(self, number: int) -> bool:
        return super().complete(number) and time.monotonic() >= self.ends_s[min(number, len(self.ends_s) - 1)]


class NoCopy(PlainReduction):
    """Leaves memory alone."""

    def encode(self, accumulator: torch.Tensor, wire: torch.Tensor) -> None: ...


class NoConversion:
    """Sums that become fp32 by nothing, of the first tensor."""

    tensors, dtype, check_vector_size = 1, torch.float32, 1

    def begin(self) -> NoConversion:
        return self

    def convert(self, *_: Any) -> None: ...

    def compiled(self, tensor: int, dtype: torch.dtype) -> None: ...

    def check_vector(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)


def exchange_s(parameters: int, bucket: int, in_flight: int, rounds: int) -> float:
    """The fastest of rounds, of its slower member."""
    with pytest.MonkeyPatch.context() as patch:
        nccl = nccl_as_torch.install(patch, TimedProcessGroup)
        patch.setattr(TimedProcessGroup, "process", nccl)
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(backend_nccl.NcclBackend, "in_flight", in_flight)
        nccl_start.prepare(DEVICES, 15.0)
        nccl_start.without_watchdog()
        both = [ReplicaCommunicators(Identity(Member(one)), "nccl", "cpu", bucket_bytes=bucket) for one in range(2)]
        sums = torch.empty(parameters, dtype=torch.int64)
        try:
            for one, other in ((0, 1), (1, 0)):
                both[one].adopt(Membership(1, (Member(0), Member(1)), both[other].address))
            took = [_round(both, sums) for _ in range(rounds + 1)]
        finally:
            for one in both:
                one.close()
    return min(took[1:])


def _round(both: list[ReplicaCommunicators], sums: torch.Tensor) -> float:
    outcomes: list[ReduceOutcome] = []

    def reduce(one: ReplicaCommunicators) -> None:
        request = Reduction((sums,), method=NoCopy(), conversion=NoConversion())
        outcomes.append(one.reduce(1, request, lambda: False))

    threads = [threading.Thread(target=reduce, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.ok for one in outcomes), [one.error for one in outcomes]
    return max(one.reduce_s for one in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=8.03e9 / 8, help="of one rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    parameters = int(options.parameters)
    ideal_s = (GROUPS - 1) / GROUPS * 12 * parameters / BANDWIDTH
    rows = []
    for bucket, in_flight in ((16, 1), (64, 1), (256, 1), (16, 3), (64, 2), (64, 3)):
        seconds = exchange_s(parameters, bucket * MIB, in_flight, options.rounds)
        row = {"bucket_mib": bucket, "in_flight": in_flight, "exchange_s": round(seconds, 3)}
        rows.append(row | {"of_the_ideal": round(seconds / ideal_s, 2)})
    given = {"parameters": parameters, "rounds": options.rounds, "call_s": CALL_S, "bytes_per_s": BANDWIDTH}
    report("exchange", given | {"ideal_s": round(ideal_s, 3)}, rows, options.json)


if __name__ == "__main__":
    main()
