"""Measures what strangers at all ports of a job cost it: 2,000 that keep silent and 200 that come again and again.

    python benchmarks/strangers.py [--rounds 8] [--span-s 20] [--silent 2000] [--reconnecting 200] [--json FILE]

One Megatron job of 2 groups x PP2 trains. In turns nobody is there for a while, then strangers are, in a process of
their own: silent ones are connected to the ports of all ranks, leaders and the coordinator; each of the others connects
once a second, and half of them send random bytes. What they cost is the paired ratio of the job's CPU time per step,
and of its step times; the strangers' own process shares the cores, so on a small machine the first is what counts. The
memory and descriptors of every process are compared between the first calm span and the last.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._soak_models import Megatron
from spare_megatron.config.exits import ExitCode
from tests.process.harness import RESTARTS, Job

GROUPS, SETTLE_S = 2, 3.0
COME_S = 1.0
"""Each of those that come again does so once in this time."""


def main() -> None:
    """Run the job, print the table, write the JSON; or be the strangers."""
    options = _options()
    if options.ports:
        besiege(options.ports, options.silent, options.reconnecting)
        return
    folder = Path(tempfile.mkdtemp(prefix="strangers-"))
    job = Megatron(groups=GROUPS, redundancy=GROUPS).start(folder / "run", {RESTARTS: 0}, folder)
    spans: list[dict[str, Any]] = []
    try:
        _until(lambda: len(job.metrics) >= 20, 180.0)
        first = holdings(job)
        for number in range(2 * options.rounds):
            strangers = _strangers(job, options) if number % 2 else None
            try:
                time.sleep(SETTLE_S)
                spans.append({"besieged": number % 2, **span(job, options.span_s)})
            finally:
                if strangers is not None:
                    strangers.kill()
                    strangers.wait()
            print(f"{number + 1} of {2 * options.rounds}: {spans[-1]}", flush=True)
        time.sleep(15.0)  # what waits for a proof has had its time
        last = holdings(job)
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE, timeout_s=120.0)
    finally:
        job.end()
    rows = [_compared(name, spans) for name in ("cpu_s", "step_s")]
    grown = [
        {"what": f"{kind} {held}", "calm median": first[kind, held], "besieged median": last[kind, held]}
        for kind, held in first
    ]
    config = {name: getattr(options, name) for name in ("rounds", "span_s", "silent", "reconnecting")}
    report("strangers", config, [*rows, *grown], options.json)


def span(job: Job, span_s: float) -> dict[str, float]:
    """CPU seconds and seconds of each step in the next ``span_s``."""
    steps, cpu_s, began_s = len(job.metrics), _cpu_s(job), time.monotonic()
    time.sleep(span_s)
    count = len(job.metrics) - steps
    took_s = time.monotonic() - began_s
    return {"cpu_s": (_cpu_s(job) - cpu_s) / count, "step_s": took_s / count, "steps": count}


def holdings(job: Job) -> dict[tuple[str, str], float]:
    """(kind of process, what it holds) -> the most that one holds: resident MiB, descriptors."""
    found: dict[tuple[str, str], float] = {}
    for process in _processes(job):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            kinds = ("coordinator", "leader_process", "pretrain_gpt")
            kind = "launcher" if process == _processes(job)[0] else next((k for k in kinds if k in line), "other")
            for held, value in (("MiB", process.memory_info().rss / 2**20), ("descriptors", process.num_fds())):
                found[kind, held] = max(found.get((kind, held), 0.0), round(value, 1))
    return found


def besiege(ports: list[int], silent: int, reconnecting: int) -> None:
    """Connect to all ports until killed."""
    rng, there = random.Random(43), []
    for number in range(silent):
        with contextlib.suppress(OSError):
            there.append(socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 0.05))
    while True:
        began_s = time.monotonic()
        for number in range(reconnecting):
            place = "127.0.0.1", ports[number % len(ports)]
            with contextlib.suppress(OSError), socket.create_connection(place, 0.02) as one:
                if number % 2:
                    one.sendall(rng.randbytes(rng.randint(1, 4000)))
            time.sleep(max(0.0, began_s + (number + 1) * COME_S / reconnecting - time.monotonic()))


def _strangers(job: Job, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    ports = set()
    for process in _processes(job):
        with contextlib.suppress(psutil.Error):
            found = process.net_connections("inet")
            ports |= {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
    words = [f"--{name}={getattr(options, name)}" for name in ("silent", "reconnecting")]
    return subprocess.Popen([sys.executable, __file__, *words, "--ports", *map(str, sorted(ports))])


def _processes(job: Job) -> list[psutil.Process]:
    launcher = psutil.Process(job.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def _cpu_s(job: Job) -> float:
    used = 0.0
    for process in _processes(job):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def _compared(name: str, spans: list[dict[str, Any]]) -> dict[str, object]:
    calm = [one[name] for one in spans if not one["besieged"]]
    besieged = [one[name] for one in spans if one["besieged"]]
    ratios = [one / other for one, other in zip(besieged, calm, strict=True)]
    return {
        "what": f"{name} of a step",
        "calm median": round(statistics.median(calm), 4),
        "besieged median": round(statistics.median(besieged), 4),
        "ratio median": round(statistics.median(ratios), 3),
        "ratio min": round(min(ratios), 3),
        "ratio max": round(max(ratios), 3),
    }


def _until(true: Any, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            raise SystemExit("the job does not train")
        time.sleep(0.05)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--span-s", type=float, default=20.0)
    parser.add_argument("--silent", type=int, default=2000)
    parser.add_argument("--reconnecting", type=int, default=200)
    parser.add_argument("--ports", type=int, nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
