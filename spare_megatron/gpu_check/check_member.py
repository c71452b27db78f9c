"""One rank of a communicator, as a process: ``python -m spare_megatron.gpu_check.check_member JSON``.

Commands come as JSON lines on standard input and are read by a control thread, as views are in a job; each line of
standard output is one JSON object with the time (monotonic, the same clock for all processes of a machine). Member m
gives ``pattern * (m + 1)`` in int64, so every element of a sum is known for any set of members.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from spare_megatron.collectives import nccl_start
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.reduction import Reduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators


def pattern(numel: int, device: torch.device) -> torch.Tensor:
    """What member 0 gives: the low bits of products, positive and negative."""
    return (torch.arange(numel, device=device) * 2_654_435_761) % (1 << 33) - (1 << 32)


def announce(**words: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(words | {"at_s": time.monotonic()}) + "\n")
    sys.stdout.flush()


class Process:
    """The training thread is the main thread; commands arrive on another."""

    def __init__(self, number: int, backend: str, timeout_s: float) -> None:
        self.number = number
        self.device = torch.device("cpu")
        if backend == "nccl":
            nccl_start.prepare(nccl_start.Devices.here(number), timeout_s)
            nccl_start.without_watchdog()
            self.device = torch.device("cuda", number)
            torch.cuda.set_device(self.device)
        me = Identity(Member(number), token="spare-gpu-check")
        self.replicas = ReplicaCommunicators(me, backend, self.device, timeout_s)
        self.epoch = 0
        self.work: queue.Queue[dict[str, Any]] = queue.Queue()
        self._patterns: dict[int, torch.Tensor] = {}

    def control(self) -> None:
        """Read commands; a view is adopted at once, whatever the training thread does."""
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "adopt":
                members = tuple(map(Member, command["members"]))
                self.epoch = command["epoch"]
                self.replicas.adopt(Membership(command["epoch"], members, command["right_at"]))
                announce(event="adopted", epoch=command["epoch"])
            else:
                self.work.put(command)
        self.work.put({"do": "end"})

    def run(self) -> None:
        """The training thread's loop."""
        threading.Thread(target=self.control, daemon=True).start()
        announce(event="up", address=self.replicas.address)
        while True:
            command = self.work.get()
            match command["do"]:
                case "sum":
                    self.sum(command["epoch"], command["members"], command["numel"])
                case "figures":
                    announce(event="figures", **self.figures())
                case _:
                    self.replicas.close()
                    return

    def sum(self, epoch: int, members: list[int], numel: int) -> None:
        """Sum once over the members, and look at every bit."""
        if numel not in self._patterns:
            self._patterns = {numel: pattern(numel, self.device)}
        mine = self._patterns[numel]
        began_s = time.monotonic()
        announce(event="begun", epoch=epoch)
        outcome = self.replicas.reduce(epoch, Reduction((mine * (self.number + 1),)), lambda: self.epoch > epoch)
        took_s = time.monotonic() - began_s
        right = None
        if outcome.ok:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took_s = time.monotonic() - began_s
            expected = pattern(numel, torch.device("cpu")) * sum(one + 1 for one in members)
            right = torch.equal(outcome.tensors[0].cpu(), expected)
        announce(
            event="summed",
            epoch=epoch,
            ok=outcome.ok,
            stale=outcome.stale,
            right=right,
            error=outcome.error,
            links=[(link.sender, link.receiver) for link in outcome.links if link.silent],
            took_s=took_s,
            formed_s=outcome.formation_s,
        )

    def figures(self) -> dict[str, int]:
        """What must not grow with epochs, once the old epoch's connections are closed and those for the next loss are
        made."""
        until_s = time.monotonic() + 30.0
        while (self.replicas.lingering or not self.replicas.ready) and time.monotonic() < until_s:
            time.sleep(0.01)
        status = Path("/proc/self/status").read_text().splitlines()
        memory = next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))
        device = 0
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            device = (total - free) >> 20
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "MiB": memory,
            "device MiB": device,
            "lingering": self.replicas.lingering,
        }


if __name__ == "__main__":
    reported = json.loads(sys.argv[1])
    Process(reported["number"], reported["backend"], reported["timeout_s"]).run()
