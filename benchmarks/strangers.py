"""Measures what strangers at all ports of a job cost it: 2,000 that keep silent and 200 that come again and again.

    python benchmarks/strangers.py [--rounds 8] [--span-s 20] [--silent 2000] [--reconnecting 200] [--json FILE]
    python benchmarks/strangers.py --hostile-minutes 10 [--hostile-per-s 200] [--seed 43] [--json FILE]

One Megatron job of 2 groups x PP2 trains. In turns nobody is there for a while, then strangers are, in a process of
their own: silent ones are connected to the ports of all ranks, leaders and the coordinator; each of the others connects
once a second, and half of them send random bytes. What they cost is the paired ratio of the job's CPU time per step,
and of its step times; the strangers' own process shares the cores, so on a small machine the first is what counts. The
memory and descriptors of every process are compared between the first failure-free span and the last.

With --hostile-minutes the memory is what is measured: for half as long nobody is there, then the strangers are, and
clients that send random, cut and changed words (benchmarks/_hostile.py) to every port of the job and of a spare-page.
Every 30 s the resident and the proportional set and the descriptors of each process are read, and a line is fitted to
the second half of either span: strangers are there up to bounds that take a while to fill. The job must train on with
all groups.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._hostile import Hostile
from benchmarks._report import report
from benchmarks._soak_models import Megatron
from benchmarks._soak_samples import slope
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.host_port import join_address, split_address
from tests.process.harness import RESTARTS, Job
from tests.process.page_process import PageProcess

GROUPS, SETTLE_S = 2, 3.0
WARM_UP_S, SAMPLE_S = 60.0, 30.0
HELD = ("RSS MiB", "PSS MiB", "descriptors")
COME_S = 1.0
"""Each of those that come again does so once in this time."""


def main() -> None:
    """Run the job, print the table, write the JSON; or be the strangers."""
    options = _options()
    if options.addresses and options.hostile_minutes:
        attack(options)
        return
    if options.addresses:
        besiege(options.addresses, options.silent, options.reconnecting)
        return
    folder = Path(tempfile.mkdtemp(prefix="strangers-"))
    job = Megatron(groups=GROUPS, redundancy=GROUPS).start(folder / "run", {RESTARTS: 0}, folder)
    try:
        _until(lambda: len(job.metrics) >= 20, 180.0)
        name, config, rows = hostile_bytes(job, options) if options.hostile_minutes else cost(job, options)
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE, timeout_s=120.0)
    finally:
        job.end()
    report(name, config, rows, options.json)


Table = tuple[str, dict[str, object], list[dict[str, object]]]
"""The name of a result, its configuration and its rows."""


def cost(job: Job, options: argparse.Namespace) -> Table:
    """What strangers cost a step, in turns with nobody."""
    spans: list[dict[str, Any]] = []
    first = holdings(job)
    for number in range(2 * options.rounds):
        strangers = _strangers(_addresses(_processes(job)), options) if number % 2 else None
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
    rows = [_compared(name, spans) for name in ("cpu_s", "step_s")]
    rows += [
        {"what": f"{kind} {held}", "failure-free median": first[kind, held], "besieged median": last[kind, held]}
        for kind, held in first
    ]
    return "strangers", {name: getattr(options, name) for name in ("rounds", "span_s", "silent", "reconnecting")}, rows


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
            kind = _kind(process)
            for held, value in (("MiB", process.memory_info().rss / 2**20), ("descriptors", process.num_fds())):
                found[kind, held] = max(found.get((kind, held), 0.0), round(value, 1))
    return found


@dataclass(frozen=True)
class Look:
    """What one process holds at one moment, in the order of HELD."""

    process: str
    at_min: float
    hostile: bool
    held: tuple[float, ...]


def hostile_bytes(job: Job, options: argparse.Namespace) -> Table:
    """What each process holds while nobody is there, then while strangers are and hostile clients."""
    looks: list[Look] = []
    with PageProcess(job.run_dir) as page:
        time.sleep(WARM_UP_S)
        processes = [*_processes(job), psutil.Process(page.process.pid)]
        names = {one: f"{_kind(one)} {number}" for number, one in enumerate(processes)}
        began_s, steps = time.monotonic(), len(job.metrics)

        def watch(minutes: float, hostile: bool) -> None:
            until_s = time.monotonic() + 60 * minutes
            while True:
                looks.extend(Look(names[one], (time.monotonic() - began_s) / 60, hostile, _held(one)) for one in names)
                print(f"{looks[-1].at_min:.1f} min, step {len(job.metrics)}", flush=True)
                if time.monotonic() >= until_s:
                    return
                time.sleep(SAMPLE_S)

        watch(options.hostile_minutes / 2, False)
        addresses = _addresses(processes)
        clients = [
            _strangers(addresses, options),
            _strangers(addresses, options, "--hostile-minutes=1", f"--seed={options.seed}"),
        ]
        try:
            time.sleep(SAMPLE_S)  # connections that wait for a proof, up to their bounds
            watch(options.hostile_minutes, True)
        finally:
            for one in clients:
                one.terminate()
        attacked = json.loads(clients[1].communicate()[0])
        clients[0].communicate()
        lines = job.metrics[steps:]
    if any(line["live_groups"] != GROUPS for line in lines):
        raise SystemExit("a group was lost")
    config = {name: getattr(options, name) for name in ("hostile_minutes", "hostile_per_s", "seed", "silent")}
    config |= {"reconnecting": options.reconnecting, "addresses": len(addresses), "steps": len(lines), **attacked}
    return "hostile_bytes", config, list(itertools.chain.from_iterable(_grown(looks, n) for n in names.values()))


def _held(process: psutil.Process) -> tuple[float, ...]:
    memory = process.memory_full_info()
    return memory.rss / 2**20, memory.pss / 2**20, process.num_fds()


def _grown(looks: Sequence[Look], process: str) -> list[dict[str, object]]:
    """One row for each thing that a process holds."""
    quiet, hostile = ([one for one in looks if one.process == process and one.hostile is x] for x in (False, True))
    rows: list[dict[str, object]] = []
    for number, what in enumerate(HELD):
        row: dict[str, object] = {"process": process, "what": what}
        for name, some in (("quiet", quiet), ("hostile", hostile)):
            series = [(one.at_min, one.held[number]) for one in some]
            row |= {f"{name} first": round(series[0][1], 2), f"{name} last": round(series[-1][1], 2)}
            settled = series[len(series) // 2 :]
            row[f"{name} growth per minute"] = round(slope([settled]) or 0.0, 4)
        rows.append(row | {"hostile most": round(max(one.held[number] for one in hostile), 2)})
    return rows


def attack(options: argparse.Namespace) -> None:
    """Be the hostile clients until SIGTERM; then print what was sent."""
    clients = Hostile(options.addresses, options.seed, options.hostile_per_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        clients.come()
    finally:
        sent_mib = round(clients.sent_bytes / 2**20, 1)
        print(json.dumps({"connections": clients.connections, "sent_mib": sent_mib, "answered": len(clients.answered)}))


def besiege(addresses: list[str], silent: int, reconnecting: int) -> None:
    """Connect to all addresses until killed."""
    rng, there = random.Random(43), []
    places = [split_address(address) for address in addresses]
    for number in range(silent):
        with contextlib.suppress(OSError):
            there.append(socket.create_connection(places[number % len(places)], 0.05))
    while True:
        began_s = time.monotonic()
        for number in range(reconnecting):
            place = places[number % len(places)]
            with contextlib.suppress(OSError), socket.create_connection(place, 0.02) as one:
                if number % 2:
                    one.sendall(rng.randbytes(rng.randint(1, 4000)))
            time.sleep(max(0.0, began_s + (number + 1) * COME_S / reconnecting - time.monotonic()))


def _addresses(processes: Sequence[psutil.Process]) -> list[str]:
    """Where these processes listen, as a client of this host writes it."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}
                    found.add(join_address(here.get(one.laddr.ip, one.laddr.ip), one.laddr.port))
    return sorted(found)


def _strangers(addresses: Sequence[str], options: argparse.Namespace, *also: str) -> subprocess.Popen[str]:
    words = [
        f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ("silent", "reconnecting", "hostile_per_s")
    ]
    command = [sys.executable, __file__, *words, *also, "--addresses", *addresses]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _kind(process: psutil.Process) -> str:
    """What a process is, by its command line."""
    line = " ".join(process.cmdline())
    marks = {f"spare_megatron.cli.{kind}": kind for kind in ("launch", "coordinator", "page")}
    marks |= {kind: kind for kind in ("leader_process", "preloaded_parent", "pretrain_gpt")}
    return next((kind for mark, kind in marks.items() if mark in line), "other")


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
    failure_free = [one[name] for one in spans if not one["besieged"]]
    besieged = [one[name] for one in spans if one["besieged"]]
    ratios = [one / other for one, other in zip(besieged, failure_free, strict=True)]
    return {
        "what": f"{name} of a step",
        "failure-free median": round(statistics.median(failure_free), 4),
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
    parser.add_argument("--hostile-minutes", type=float, default=0.0)
    parser.add_argument("--hostile-per-s", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=43)
    parser.add_argument("--addresses", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
