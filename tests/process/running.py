"""Which processes run now, by their environment or command line: tests ask often, beside a hundred processes, so
nothing is parsed of those that are not meant."""

from __future__ import annotations

import os
from collections.abc import Iterator


def processes(environ: str = "", words: str = "") -> Iterator[int]:
    """Pids of processes that have not ended, but for this one, whose environment has the whole entry ``environ``
    (``NAME=value``) or whose command line, joined with spaces, contains ``words``; empty: not asked for."""
    entry, part, own = b"\0" + os.fsencode(environ) + b"\0", os.fsencode(words), os.getpid()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        found = bool(words) and part in _read(pid, "cmdline").replace(b"\0", b" ")
        found = found or (bool(environ) and entry in b"\0" + _read(pid, "environ") + b"\0")
        if found and int(pid) != own and has_not_ended(int(pid)):
            yield int(pid)


def has_not_ended(pid: int) -> bool:
    """Whether a process runs; nobody may wait for one that has ended, where the first process reaps no orphans."""
    state = _read(str(pid), "stat").rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X")


def _read(pid: str, name: str) -> bytes:
    """Empty where the process is gone, or keeps this to itself."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.readall() or b""
    except OSError:
        return b""
