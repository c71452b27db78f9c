"""What strikes a job beside deaths and pauses: its disk, its network, its clocks, its memory, strangers.

The job runs in a network namespace of its own, where its packets are dropped and reset by nftables, and in a mount
namespace with a /dev/shm of 256 KiB; both end with it. Its processes load a small library (:data:`CLOCK_SOURCE`) that
adds to the wall clock what a file says. Files fail and locks are held by failpoints
(spare_megatron/runtime/failpoints.py) while a file of :attr:`Weather.folder` is there. Needs root, nft, and a C
compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from benchmarks._chaos import Fault, Kind

Undo = Callable[[], None]

CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
/* CLOCK_REALTIME of this process, later by the seconds in the first 8 bytes of $SPARE_CLOCKS/PID. */
static volatile double *offset;
static pid_t of;
static void open_offset(void) {
  char path[4096];
  const char *folder = getenv("SPARE_CLOCKS");
  of = getpid();
  offset = NULL;
  if (!folder) return;
  snprintf(path, sizeof path, "%s/%d", folder, (int)of);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (ftruncate(fd, 8) == 0) {
    void *there = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (there != MAP_FAILED) offset = there;
  }
  close(fd);
}
int clock_gettime(clockid_t which, struct timespec *reported) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(which, reported);
  if (which == CLOCK_REALTIME && !failed) {
    if (of != getpid()) open_offset();
    if (offset) reported->tv_sec += (time_t)*offset;
  }
  return failed;
}
"""
JUMPS_S = (86400.0, -86400.0, 3600.0, -7.0)
DISK_FAULTS = (
    "coordinator:journal.sync=EIO",
    "coordinator:journal.write=ENOSPC",
    "coordinator:journal.write=EDQUOT",
    "coordinator:journal.written=EROFS",
    "coordinator:accepted-N.json.sync=EIO",
    "coordinator:status.json.rename=EIO",
    "coordinator:metrics.write=EROFS",
    "coordinator:coordinator.json.read=ESTALE",
    "rank:checkpoint.file=ENOSPC",
    "rank:checkpoint.file=EDQUOT",
    "rank:coordinator.json.read=ESTALE",
    "rank:group-N.json.read=EIO",
    "notices.write=EROFS",
)
HOLDS_S = {False: 1.5, True: 9.0}
"""How long the interpreter's lock is held: of which nobody may be lost, and which counts as a death."""
HELD_S = 0.7
"""A rank passes the place within this time: heartbeats are 0.5 s apart."""
LOSS_PERCENT, HOLE_BYTES, STRANGERS = 5, 700, 200
FLAP_S = 0.3
OOM_BYTES = 1 << 20
CLONE_NEWNET = 0x40000000


class Weather:
    """The surroundings of one job, and what it does to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        """``folder`` is for its files; it is made."""
        self.folder, self._rng = folder, random.Random(seed)
        self._name = f"weather-{os.getpid()}"
        self._cgroup = Path(f"/sys/fs/cgroup/memory/{self._name}")
        self._rules = 0
        self._strangers: list[socket.socket] = []
        (folder / "clocks").mkdir(parents=True)

    def begin(self) -> None:
        """Make the namespaces; raises OSError or CalledProcessError where that is not possible."""
        for name in ("nft", "cc", "unshare", "ip"):
            if shutil.which(name) is None:
                raise OSError(f"the weather needs the program {name}")
        build_clock(self.folder)
        _run("ip", "netns", "add", self._name)
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("nft", "add", "table", "inet", "weather")
        chain = "{ type filter hook input priority 0; policy accept; }"
        self._inside("nft", "add", "chain", "inet", "weather", "input", chain)
        if self._cgroup.parent.is_dir():
            self._cgroup.mkdir()

    def end(self) -> None:
        """Remove what :meth:`begin` has made; the job has ended."""
        for one in self._strangers:
            one.close()
        subprocess.run(["ip", "netns", "del", self._name], check=False)
        with contextlib.suppress(OSError):
            self._cgroup.rmdir()

    @property
    def under(self) -> tuple[str, ...]:
        """The words before the job's command."""
        small = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
        return ("ip", "netns", "exec", self._name, "unshare", "--mount", "--", "sh", "-c", small, "sh")

    def environ(self, groups: int, group_size: int) -> Mapping[str, str]:
        """The variables of the job's processes."""
        faults = [f"{fault},while={self.folder / f'disk-{n}'}" for n, fault in enumerate(DISK_FAULTS)]
        for group in range(groups):
            for position in range(group_size):
                for long, hold_s in HOLDS_S.items():
                    there = self._hold_file(group, position, long)
                    faults.append(f"rank-{group}-{position}:report.beat=hold:{hold_s:g},while={there}")
        return {
            "SPARE_FAILPOINTS": ";".join(faults),
            "SPARE_CLOCKS": str(self.folder / "clocks"),
            "LD_PRELOAD": str(self.folder / "clock.so"),
        }

    def strike(self, fault: Fault, processes: list[psutil.Process], others: list[psutil.Process]) -> Undo:
        """Strike one rank's ``processes``, or any of ``others``; returns what ends it after the fault's time. Raises
        OSError or psutil.Error where nobody is there any more."""
        kind = fault.kind
        if kind is Kind.DISK:
            return _touched(self.folder / f"disk-{fault.position % len(DISK_FAULTS)}")
        if kind is Kind.HOLD_LOCK:
            undo = _touched(self._hold_file(fault.groups[0], fault.position, fault.fatal))
            threading.Timer(HELD_S, undo).start()  # else it would strike the rank's successor too
            return undo
        if kind is Kind.CLOCK:
            return self._jump(others[fault.position % len(others)].pid, JUMPS_S[fault.position % len(JUMPS_S)])
        if kind is Kind.OUT_OF_MEMORY:
            return self._out_of_memory(processes[0])
        if kind is Kind.STRANGERS:
            return self._besiege(others[fault.position % len(others)])
        if kind is Kind.LOSS:
            return self._rule(f"meta l4proto tcp numgen random mod 100 < {LOSS_PERCENT} drop")
        if kind is Kind.HOLE:
            return self._rule(f"meta l4proto tcp meta length > {HOLE_BYTES} numgen random mod 2 == 0 drop")
        ports = sorted(set(_ports(processes[0].pid)))
        if not ports:
            raise OSError("it has no ports")
        to = f"tcp dport {{ {', '.join(map(str, ports))} }}"
        if kind is Kind.RESET:
            return self._rule(f"{to} numgen random mod 20 == 0 reject with tcp reset")
        if kind is Kind.CUT:
            return self._rule(f"{to} drop")
        return self._flap(f"{to} drop")

    def _hold_file(self, group: int, position: int, long: bool) -> Path:
        return self.folder / f"hold-{group}-{position}-{'long' if long else 'short'}"

    def _jump(self, pid: int, by_s: float) -> Undo:
        path = self.folder / "clocks" / str(pid)

        def put(seconds: float) -> None:
            with path.open("r+b") as file:
                file.write(struct.pack("d", seconds))

        put(by_s)
        return lambda: put(0.0)

    def _out_of_memory(self, process: psutil.Process) -> Undo:
        """The kernel cannot give it another page: its limit is below what it has."""
        cgroup = self._cgroup / str(process.pid)
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(OOM_BYTES))
        (cgroup / "cgroup.procs").write_text(str(process.pid))

        def remove() -> None:
            with contextlib.suppress(OSError):  # its processes are not reaped yet
                cgroup.rmdir()

        return remove

    def _besiege(self, process: psutil.Process) -> Undo:
        """Strangers at its ports: silent ones, and some that talk nonsense. They are in the job's namespace."""
        found: list[socket.socket] = []

        def come() -> None:
            with open(f"/run/netns/{self._name}") as net:
                ctypes.CDLL(None).setns(net.fileno(), CLONE_NEWNET)  # of this thread
            ports = list(_ports(process.pid))
            for number in range(STRANGERS if ports else 0):
                with contextlib.suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 0.05)
                    found.append(one)
                    if number % 2:
                        one.sendall(self._rng.randbytes(self._rng.randint(1, 300)))

        thread = threading.Thread(target=come)
        thread.start()

        def go() -> None:
            thread.join()
            for one in found:
                one.close()

        return go

    def _flap(self, rule: str) -> Undo:
        over = threading.Event()

        def flap() -> None:
            while not over.is_set():
                undo = self._rule(rule)
                over.wait(FLAP_S)
                undo()
                over.wait(FLAP_S)

        thread = threading.Thread(target=flap)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        return end

    def _rule(self, rule: str) -> Undo:
        reported = self._inside("nft", "-e", "-a", "add", "rule", "inet", "weather", "input", rule)
        handle = reported.rpartition("# handle ")[2].split()[0]
        return lambda: self._remove(handle)

    def _remove(self, handle: str) -> None:
        self._inside("nft", "delete", "rule", "inet", "weather", "input", "handle", handle)

    def _inside(self, *words: str) -> str:
        return _run("ip", "netns", "exec", self._name, *words)


def _touched(path: Path) -> Undo:
    path.touch()
    return lambda: path.unlink(missing_ok=True)


def _ports(pid: int) -> Iterator[int]:
    """The ports at which a process, of whatever network namespace, listens."""
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            where = os.readlink(entry)
            if where in listening:
                yield listening[where]


def build_clock(folder: Path) -> Path:
    """The library that has a process's wall clock jump, built in ``folder``; raises OSError where that fails."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK_SOURCE)
    _run("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl")
    return library


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
