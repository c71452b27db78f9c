"""Measures the GB/s at which a learner takes a snapshot shard from donors, all processes of one machine.

    python benchmarks/transfer.py [--mib 1024] [--donors 1 2] [--rounds 5] [--tensors 64]

Each donor is a process with one thread for arithmetic, which has put a snapshot shard of fp32 tensors; the learner,
another one, fetches it into tensors that it has. The figure is the bytes of the snapshot shard over the time of the
fetch, header and checksums included. CPU seconds are those of all donors, and of the learner, during the fetch, for
each GB (10^9 bytes) of the snapshot shard; put_gb_s is how fast a donor copies its part. Medians over the rounds.
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
OFFER = 1
WARM_UP = 1


def main() -> None:
    """Print the table and write the JSON; with --role, be one of the processes instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--donors", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--role", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        _one_rank(options, *options.role)
        return
    rows = [_row(options, donors) for donors in options.donors]
    report("transfer", {"mib": options.mib, "tensors": options.tensors, "rounds": options.rounds}, rows)


def _row(options: argparse.Namespace, donors: int) -> dict[str, object]:
    processes = [_start(options, donors, group) for group in range(donors + 1)]
    try:
        up = [_receive(process) for process in processes]
        learner, givers = processes[0], processes[1:]
        addresses = [one["address"] for one in up[1:]]
        puts, takes, cpu_given, cpu_taken = [], [], [], []
        for step in range(options.rounds + WARM_UP):
            puts += [_tell(one, step)["put_s"] for one in givers]
            before = [_tell(one, -1)["cpu_s"] for one in givers]
            taken = _tell(learner, {"step": step, "addresses": addresses})
            cpu_given.append(sum(_tell(one, -1)["cpu_s"] for one in givers) - sum(before))
            takes.append(taken["fetch_s"])
            cpu_taken.append(taken["cpu_s"])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    size_gb = options.mib / 1024 * 1.073741824
    fetch_s = statistics.median(takes[WARM_UP:])
    return {
        "donors": donors,
        "fetch_s": round(fetch_s, 3),
        "gb_s": round(size_gb / fetch_s, 3),
        "least_gb_s": round(size_gb / max(takes[WARM_UP:]), 3),
        "donors_cpu_s_per_gb": round(statistics.median(cpu_given[WARM_UP:]) / size_gb, 3),
        "learner_cpu_s_per_gb": round(statistics.median(cpu_taken[WARM_UP:]) / size_gb, 3),
        "put_gb_s": round(size_gb / donors / statistics.median(puts[WARM_UP * donors :]), 3),
    }


def _start(options: argparse.Namespace, donors: int, group: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--mib", str(options.mib), "--tensors", str(options.tensors)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [*command, "--role", str(group), str(donors)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(process: subprocess.Popen[str], what: object) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    return _receive(process)


def _receive(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def _one_rank(options: argparse.Namespace, group: int, donors: int) -> None:
    """The learner is group 0. A donor puts the snapshot shard of each step that it is notified; -1 asks for its CPU
    time."""
    import torch

    from spare_megatron.collectives.handshake import Identity, Member
    from spare_megatron.transfer.socket_transport import SocketTransport
    from spare_megatron.transfer.transport import SnapshotShard, Source

    torch.set_num_threads(1)
    transport = SocketTransport(Identity(Member(group), token="benchmark"), "127.0.0.1", timeout_s=60.0)
    print(json.dumps({"address": transport.address}), flush=True)
    each = (options.mib << 18) // options.tensors
    tensors = {f"weight.{number}": torch.full((each,), float(group)) for number in range(options.tensors)}
    if group:
        transport.open(OFFER, Member(0), group - 1, donors)
    for line in sys.stdin:
        what = json.loads(line)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if isinstance(what, dict):
            sources = [Source(Member(number + 1), address) for number, address in enumerate(what["addresses"])]
            transport.fetch(OFFER, what["step"], sources, lambda reported: tensors, lambda: False)
            reported = {"fetch_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
        elif what >= 0:
            transport.put(OFFER, what, SnapshotShard(tensors, {}))
            reported = {"put_s": time.perf_counter() - began_s}
        else:
            reported = {"cpu_s": time.process_time()}
        print(json.dumps(reported), flush=True)


if __name__ == "__main__":
    main()
