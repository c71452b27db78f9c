"""Measures the GB/s of the reduction over 4 groups on one machine, and of a copy of the same bytes.

    python benchmarks/replica_sum.py [--groups 4] [--mib 8 64 256] [--rounds 9]

Each group is a process with one thread for arithmetic. A sum of B bytes over N groups moves 2 (N-1)/N B bytes out of
each of them and as many in; the figure is B over the time of the slowest group, and the bytes that all groups sent a
second. The copy is of B bytes in one process, with nobody else at work; N processes that copy at once share the
memory's bandwidth and the cores, and that is the second figure to compare with. ``cpu_ms`` is the CPU time of a group,
``python_cpu_ms`` that of the same sums where Python moves the bytes, which take turns with the others. Medians.
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
WARM_UP = 2


def main() -> None:
    """Print the table and write the JSON; with --rank, run one of the groups instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", nargs=1, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _one_group(options, *options.rank)
        return
    rows = [_row(options, mib) for mib in options.mib]
    report("replica_sum", {"groups": options.groups, "rounds": options.rounds, "dtype": "int64"}, rows)


def _row(options: argparse.Namespace, mib: int) -> dict[str, object]:
    alone_s = statistics.median(_copies(mib, options.rounds))
    reported = _all_groups(options, mib)
    sum_s, together_s = (
        statistics.median(max(of_round) for of_round in zip(*(one[key] for one in reported), strict=True))
        for key in ("sums", "copies")
    )
    cpu_s, python_cpu_s = (
        statistics.median(cpu for one in reported for cpu in one[key]) for key in ("cpu", "python_cpu")
    )
    size = mib / 1024 * 1.073741824  # GB
    wire = 2 * (options.groups - 1) * size
    return {
        "mib": mib,
        "sum_ms": round(1000 * sum_s, 2),
        "sum_gb_s": round(size / sum_s, 3),
        "all_sent_gb_s": round(wire / sum_s, 3),
        "copy_alone_gb_s": round(size / alone_s, 3),
        "copies_together_gb_s": round(options.groups * size / together_s, 3),
        "cpu_ms": round(1000 * cpu_s, 2),
        "python_cpu_ms": round(1000 * python_cpu_s, 2),
        "python_to_compiled": round(python_cpu_s / cpu_s, 3),
        "sent_to_copied": round(wire / sum_s / (options.groups * size / together_s), 3),
    }


def _all_groups(options: argparse.Namespace, mib: int) -> list[dict[str, list[float]]]:
    """What each group reports."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    base = [sys.executable, __file__, "--groups", str(options.groups), "--rounds", str(options.rounds)]
    base += ["--mib", str(mib), "--rank"]
    processes = [
        subprocess.Popen([*base, str(group)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for group in range(options.groups)
    ]
    try:
        places = [_line(process) for process in processes]
        for process, right in zip(processes, places[1:] + places[:1], strict=True):
            process.stdin.write(right)
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _one_group(options: argparse.Namespace, group: int) -> None:
    import torch

    from spare_megatron.collectives import backend_ring
    from spare_megatron.collectives.handshake import Identity, Member
    from spare_megatron.collectives.reduction import Reduction
    from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators

    torch.set_num_threads(1)
    both = [ReplicaCommunicators(Identity(Member(group)), "gloo", timeout_s=120.0) for _ in ("compiled", "Python")]
    print(" ".join(replicas.address for replicas in both), flush=True)
    members = tuple(map(Member, range(options.groups)))
    for replicas, right in zip(both, sys.stdin.readline().split(), strict=True):
        replicas.adopt(Membership(1, members, right))
        backend_ring.compiled_ring = lambda: None
    mine = torch.ones(options.mib[0] << 17, dtype=torch.int64)
    reported: dict[str, list[float]] = {key: [] for key in ("sums", "cpu", "python_sums", "python_cpu", "copies")}
    for _ in range(options.rounds + WARM_UP):
        for replicas, way in zip(both, ("", "python_"), strict=True):
            replicas.reduce(1, Reduction((mine[:1],)), lambda: False)  # a barrier: all groups start the sum together
            began_s = time.process_time()
            outcome = replicas.reduce(1, Reduction((mine,)), lambda: False)
            assert outcome.ok, outcome.error
            reported[way + "cpu"].append(time.process_time() - began_s)
            reported[way + "sums"].append(outcome.reduce_s)
        reported["copies"] += _copies(options.mib[0], 1, mine)
    print(json.dumps({key: values[WARM_UP:] for key, values in reported.items()}))
    for replicas in both:
        replicas.close()


def _copies(mib: int, rounds: int, source=None) -> list[float]:
    import torch

    torch.set_num_threads(1)
    source = torch.ones(mib << 17, dtype=torch.int64) if source is None else source
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started_s)
    return seconds


if __name__ == "__main__":
    main()
