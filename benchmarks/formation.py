"""How long a ring of many members takes to be whole again when one dies, and what it costs.

    python benchmarks/formation.py [--members 256] [--processes 4] [--rounds 10]

The real ring code (listeners, calls, proofs, frames) with all members of one rank position in a few processes, on the
loopback device. In each round one member dies: its listener and connections are closed without a message, its
neighbours notice, and every other member gets the view without it; then it comes back and is linked again. Rows: deaths
at once after the return before them, and deaths once all members are ready, which is a beat (a fortieth of the
time-out) later. A few epochs of the same members come before each death: processes that have slept for a beat take
twice as long. ``whole_ms`` is from the first view to the moment when the last member can sum, by one clock; ``calls``
counts the calls that the ring waited for, each of two connections, ``ready_calls`` those that were made afterwards for
the next death; ``cpu_ms`` is the CPU time of all processes from the view on, for each member. ``first_ms`` is the first
epoch, in which all members call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _report import report

ROOT = Path(__file__).resolve().parents[1]
WARM = 3
"""Epochs of the same members before each death."""
EPOCHS = WARM + 2
"""Of a round."""


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=256, help="number of groups")
    parser.add_argument("--processes", type=int, default=4, help="number of processes that share them")
    parser.add_argument("--rounds", type=int, default=10, help="number of deaths")
    parser.add_argument("--part", nargs=2, type=int, metavar=("FIRST", "STOP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        Part(range(*options.part)).run()
        return
    config = {"members": options.members, "processes": options.processes, "rounds": options.rounds}
    report("formation", config, [_measure(options, ready) for ready in (False, True)])


def _measure(options: argparse.Namespace, ready: bool) -> dict[str, object]:
    """A row."""
    each = -(-options.members // options.processes)
    firsts = range(0, options.members, each)
    parts = [Remote(first, min(first + each, options.members)) for first in firsts]
    try:
        addresses = [address for part in parts for address in part.read()]
        everybody = list(range(options.members))
        incarnations = [0] * options.members
        first_s, _, _ = _view(parts, 1, everybody, incarnations, addresses)
        whole_s, back_s, made, made_ready, cpu_s = [], [], [], [0], []
        for number in range(options.rounds):
            dead = (7 + 31 * number) % options.members
            calls_ready = _get_ready(parts) if ready else 0
            for again in range(WARM):
                _, calls, _ = _view(parts, EPOCHS * number + 2 + again, everybody, incarnations, addresses)
            addresses[dead] = ""
            parts[dead // each].ask({"kill": dead})
            survivors = [member for member in everybody if member != dead]
            took_s, after, used_s = _view(parts, EPOCHS * number + 2 + WARM, survivors, incarnations, addresses)
            whole_s.append(took_s)
            cpu_s.append(used_s / len(survivors))
            made.append(after - calls)
            if ready:
                made_ready.append(_get_ready(parts) - calls_ready)
            incarnations[dead] += 1
            addresses[dead] = parts[dead // each].ask({"start": dead, "incarnation": incarnations[dead]})
            took_s, _, _ = _view(parts, EPOCHS * number + 3 + WARM, everybody, incarnations, addresses)
            back_s.append(took_s)
    finally:
        for part in parts:
            part.end()
    return {
        "members": options.members,
        "ready": ready,
        "first_ms": round(1000 * first_s, 1),
        "whole_ms": round(1000 * statistics.median(whole_s), 1),
        "whole_most_ms": round(1000 * max(whole_s), 1),
        "calls": max(made),
        "ready_calls": max(made_ready),
        "cpu_ms": round(1000 * statistics.median(cpu_s), 3),
        "back_ms": round(1000 * statistics.median(back_s), 1),
    }


def _get_ready(parts: list[Remote]) -> int:
    """Wait until a death costs no call; returns how many calls all have made for that so far."""
    for part in parts:
        part.send({"ready": True})
    return sum(part.read() for part in parts)


def _view(
    parts: list[Remote], epoch: int, members: list[int], incarnations: list[int], addresses: list[str]
) -> tuple[float, int, float]:
    """Give all members an epoch: seconds until the last one can sum, the calls that all have made so far, and the CPU
    time that it took all together."""
    order = {"epoch": epoch, "members": members, "incarnations": incarnations, "addresses": addresses}
    began_s = time.monotonic()
    for part in parts:
        part.send(order)
    done = [part.read() for part in parts]
    return max(at_s for at_s, _, _ in done) - began_s, sum(calls for _, calls, _ in done), sum(cpu for *_, cpu in done)


class Remote:
    """A process with some of the members."""

    def __init__(self, first: int, stop: int) -> None:
        command = [sys.executable, __file__, "--part", str(first), str(stop)]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def send(self, order: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def read(self):
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, order: object):
        self.send(order)
        return self.read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Part:
    """The members of one process."""

    def __init__(self, groups: range) -> None:
        self._replicas = {}
        self._calls = self._ready_calls = 0
        """Of members that are gone."""
        for group in groups:
            self._start(group, 0)

    def run(self) -> None:
        """Serve orders until the input ends."""
        _announce([replicas.address for replicas in self._replicas.values()])
        for line in sys.stdin:
            began_s = time.process_time()
            order = json.loads(line)
            if "kill" in order:
                self._kill(order["kill"])
                _announce("")
            elif "start" in order:
                self._start(order["start"], order["incarnation"])
                _announce(self._replicas[order["start"]].address)
            elif "ready" in order:
                while not all(replicas.ready for replicas in self._replicas.values()):
                    time.sleep(0.01)
                _announce(self._ready_calls + sum(replicas.ready_calls for replicas in self._replicas.values()))
            else:
                self._adopt(order)
                formed_s, used_s = time.monotonic(), time.process_time() - began_s
                _announce([formed_s, self._calls + sum(replicas.calls for replicas in self._replicas.values()), used_s])

    def _start(self, group: int, incarnation: int) -> None:
        from spare_megatron.collectives.handshake import Identity, Member
        from spare_megatron.collectives.replica_communicators import ReplicaCommunicators

        self._replicas[group] = ReplicaCommunicators(Identity(Member(group, incarnation)), "gloo", timeout_s=60.0)

    def _kill(self, group: int) -> None:
        replicas = self._replicas.pop(group)
        self._calls += replicas.calls
        self._ready_calls += replicas.ready_calls
        replicas.close()

    def _adopt(self, order: dict) -> None:
        from spare_megatron.collectives.handshake import Member
        from spare_megatron.collectives.replica_communicators import Membership

        members, addresses = order["members"], order["addresses"]
        everybody = tuple(Member(group, order["incarnations"][group]) for group in members)
        for group, replicas in self._replicas.items():
            right = members[(members.index(group) + 1) % len(members)]
            replicas.adopt(Membership(order["epoch"], everybody, addresses[right]))
        while not all(replicas.formed for replicas in self._replicas.values()):
            time.sleep(0.0005)


def _announce(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
