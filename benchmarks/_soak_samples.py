"""What the processes of a soaked job hold while it runs: descriptors, threads and memory, and how fast they grow."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

HELD = ("descriptors", "threads", "rss_mib")
WARM_UP_S, WARM_UP_RETURNS = 60.0, 2
"""The beginning of a process, in which it makes what it keeps, some of it when the first groups come back: what it
holds then is no growth."""
LISTENS = "0A"
"""The state of a socket that listens (Linux, include/net/tcp_states.h)."""
LEAST_S = 60.0
"""Processes that were seen for less than this say nothing about growth."""


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    kind: str
    pid: int
    at_s: float
    age_s: float
    returns: int
    """How many groups had come back by then."""
    ranks: int
    """How many ranks the job had at that moment: most processes have connections to all."""
    descriptors: int
    threads: int
    rss_mib: float


@dataclass
class Samples:
    """All looks at a job, and every process that it was seen to have."""

    found: list[Sample] = field(default_factory=list)
    seen: set[psutil.Process] = field(default_factory=set)
    ports: dict[int, int] = field(default_factory=dict)
    """Sockets (their inodes) with which processes of the job were seen to listen -> the port. The kernel may give a
    port that the job has left to anybody; a socket stays what it is."""

    def look(self, launcher: int, at_s: float, returns: int) -> None:
        """Sample spare-launch and all processes below it."""
        try:
            top = psutil.Process(launcher)
            processes = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        self.seen |= set(processes)
        kinds = {process: kind_of(process, process.pid == launcher) for process in processes}
        ranks = sum(kind == "rank" for kind in kinds.values())
        for process, kind in kinds.items():
            try:
                self._sample(process, kind, at_s, returns, ranks)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

    def look_at_ports(self) -> None:
        """Note where the living processes of the job listen."""
        for process in self.seen:
            try:
                held, there = _sockets_of(process.pid), listening(process.pid)
            except OSError:
                continue
            self.ports |= {inode: port for inode, port in there.items() if inode in held}

    def left_ports(self) -> list[str]:
        """The ports at which a socket of the job still listens."""
        there = listening(os.getpid())
        return [str(port) for inode, port in self.ports.items() if inode in there]

    def left(self) -> list[str]:
        """The processes of the job that are still there."""
        return [f"{one.pid} ({kind_of(one, False)})" for one in self.seen if is_there(one)]

    def write(self, path: Path) -> None:
        """One JSON line for each sample."""
        path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in self.found))

    def _sample(self, process: psutil.Process, kind: str, at_s: float, returns: int, ranks: int) -> None:
        with process.oneshot():
            age_s = time.time() - process.create_time()
            memory = process.memory_info().rss / 2**20
            held = process.num_fds(), process.num_threads(), round(memory, 3)
        if age_s >= WARM_UP_S:
            self.found.append(Sample(kind, process.pid, round(at_s, 3), round(age_s, 3), returns, ranks, *held))


def kind_of(process: psutil.Process, is_launcher: bool) -> str:
    """What a process of a job is, by its command line."""
    try:
        words = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "gone"
    marks = {"spare_megatron.cli.coordinator": "coordinator", "leader_process": "leader", "orphan_reaper": "guard"}
    marks |= {"preloaded_parent": "parent"}
    return "spare-launch" if is_launcher else next((kind for mark, kind in marks.items() if mark in words), "rank")


def listening(pid: int) -> dict[int, int]:
    """The inodes of the TCP sockets that listen in the network of a process -> their ports (proc(5), /proc/net/tcp).
    Raises OSError where the process is gone."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS:
                found[int(words[9])] = int(words[1].rpartition(":")[2], 16)
    return found


def _sockets_of(pid: int) -> set[int]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            kind, _, inode = str(path.readlink()).partition(":")
            if kind == "socket":
                found.add(int(inode.strip("[]")))
    return found


def is_there(process: psutil.Process) -> bool:
    """Whether the process itself, and no other of its id, has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def slope(series: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """The growth of y with x within series that each have a level of their own (least squares); None where no x
    differs from another of its series."""
    above = below = 0.0
    for points in series:
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        above += sum((x - mean_x) * (y - mean_y) for x, y in points)
        below += sum((x - mean_x) ** 2 for x, _ in points)
    return above / below if below else None


@dataclass(frozen=True)
class Growth:
    """How one thing that the processes of one kind hold grows."""

    kind: str
    held: str
    processes: int
    returns: int
    """The most returns during which one of them was seen."""
    per_minute: float | None
    per_return: float | None
    most: float


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Of each kind and thing, over the processes that were seen for LEAST_S. Only looks at one process while the job
    had the same number of ranks are compared: what goes up and down with them is no growth."""
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_process[sample.kind, sample.pid].append(sample)
    by_kind: dict[str, list[list[Sample]]] = defaultdict(list)
    for (kind, _), found in by_process.items():
        warm = [one for one in found if one.returns >= found[0].returns + WARM_UP_RETURNS]
        if warm and warm[-1].at_s - warm[0].at_s >= LEAST_S:
            by_kind[kind].append(warm)
    found = []
    for kind, of_kind in sorted(by_kind.items()):
        alike: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for sample in (sample for of_process in of_kind for sample in of_process):
            alike[sample.pid, sample.ranks].append(sample)
        found += [_growth_of(kind, held, of_kind, list(alike.values())) for held in HELD]
    return found


def _growth_of(kind: str, held: str, of_kind: list[list[Sample]], alike: list[list[Sample]]) -> Growth:
    return Growth(
        kind,
        held,
        len(of_kind),
        max(of_process[-1].returns - of_process[0].returns for of_process in of_kind),
        slope([[(s.at_s / 60, getattr(s, held)) for s in samples] for samples in alike]),
        slope([[(s.returns, getattr(s, held)) for s in samples] for samples in alike]),
        max(getattr(s, held) for samples in alike for s in samples),
    )
