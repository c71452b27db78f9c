"""One rank of a test of the replica communicators: reduces in every epoch it is notified of, and says what came of it.

Started as ``python -m tests.process.replica_rank JSON``; commands come as JSON lines on standard input, read by a
control thread as in a real rank; every line it writes is one JSON object. Group g contributes ``pattern * (g + 1)``,
so every element of the sum is known for any set of groups.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.reduction import ReduceOutcome, Reduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators

SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


class Rank:
    """The training thread is the main thread; commands arrive on another."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.group: int = spec["group"]
        me = Identity(Member(self.group), token="test")
        self.replicas = ReplicaCommunicators(
            me, "gloo", "cpu", spec["timeout_s"], spec["bucket_bytes"], host=spec["host"]
        )
        # Small integers: their sums are exact in float32 in any order.
        self.pattern = (torch.arange(spec["numel"]) % 97 + 1).float()
        self.epoch = 0
        self.fault: dict[str, Any] | None = None
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def control(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if "adopt" in command:
                self.fault = command["fault"]
                reported = command["adopt"]
                members = tuple(Member(group) for group in reported["groups"])
                self.adopt(Membership(reported["epoch"], members, reported["right_at"]))
            self.commands.put(command)
        self.commands.put({"quit": True})

    def adopt(self, membership: Membership) -> None:
        started_s = time.monotonic()
        self.replicas.adopt(membership)
        self.epoch = membership.epoch
        announce(event="adopted", epoch=membership.epoch, took_s=time.monotonic() - started_s)

    def run(self) -> None:
        threading.Thread(target=self.control, daemon=True).start()
        announce(event="up", address=self.replicas.address)
        while True:
            command = self.commands.get()
            if command.get("quit"):
                break
            if "adopt" in command:
                self.reduce_until_over(command["adopt"], command["reductions"])
            if "resources" in command:
                announce(event="resources", lingering=self.replicas.lingering, **resources())
        self.replicas.close()
        announce(event="closed", lingering=self.replicas.lingering)

    def reduce_until_over(self, view: dict[str, Any], reductions: int) -> None:
        """Reduce again and again, or ``reductions`` times, until the epoch is over or something failed."""
        epoch, count, ok = view["epoch"], 0, True
        accumulator = self.pattern * (self.group + 1)
        before = accumulator.clone()
        while ok and (not reductions or count < reductions):
            request = Reduction(
                tensors=(accumulator, accumulator[:77]),
                scalars={"groups": 1.0, "sum": float(self.group)},
                on_bucket=self.on_bucket,
            )
            outcome = self.replicas.reduce(epoch, request, lambda: self.epoch > epoch)
            at_s, ok, count = time.monotonic(), outcome.ok, count + 1
            right = self.is_right(outcome, view["groups"]) and torch.equal(accumulator, before)
            links = [(link.sender, link.receiver, link.silent) for link in outcome.links]
            announce(
                event="reduced",
                epoch=epoch,
                ok=ok,
                stale=outcome.stale,
                right=right,
                at_s=at_s,
                error=outcome.error,
                links=links,
            )

    def is_right(self, outcome: ReduceOutcome, groups: tuple[int, ...]) -> bool:
        if not outcome.ok:
            return True
        expected = self.pattern * sum(group + 1 for group in groups)
        return (
            torch.equal(outcome.tensors[0], expected)
            and torch.equal(outcome.tensors[1], expected[:77])
            and outcome.scalars == {"groups": float(len(groups)), "sum": float(sum(groups))}
        )

    def on_bucket(self, done: int, total: int) -> None:
        fault = self.fault
        if fault is not None and fault["bucket"] <= done < total:
            self.fault = None
            announce(event="fault")
            os.kill(os.getpid(), SIGNALS[fault["signal"]])


def resources() -> dict[str, int]:
    """Threads, descriptors and memory of this process: not the pages that it shares with the parent that has forked
    it, of which each look, and the kernel, maps more or fewer."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = next(line for line in rollup if line.startswith("Private_Dirty"))
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "private_kib": int(private.split()[1]),
    }


def announce(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    Rank(json.loads(sys.argv[1])).run()
