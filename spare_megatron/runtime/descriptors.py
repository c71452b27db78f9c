"""File descriptors: the limit of this process, and whether a job fits into it.

Each connection is one. Distributions give 1024 by default and allow many more, because old programs use select().
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable

from spare_megatron.config.errors import ConfigError

MOST = 1 << 20
"""No process of a job needs more; some programs go through all possible ones when they start another."""
SPARE = 256
"""What a process needs beside its connections: files, libraries, pipes, events."""
OF_A_GROUP = 4
"""What a coordinator has for each group at most: its stream, one that comes in its place, and two brief calls."""
OF_A_RANK = 3
"""What a leader has for each rank, or a launcher for each process that it starts, at most."""
LOOK_S = 20.0
"""How often a rank counts its descriptors."""
GROWN = 256
"""So many more than before are worth a line."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit to the most that it may have; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft if soft != resource.RLIM_INFINITY else MOST


def connections_max() -> int:
    """How many connections a server of this process may accept, so that SPARE descriptors are left whoever connects.
    Raises the limit."""
    return max(1, raise_descriptor_limit() - SPARE)


def check_descriptors(needed: int, who: str) -> None:
    """Raise the limit, and ConfigError where ``who`` needs more than it may have."""
    most = raise_descriptor_limit()
    if needed + SPARE > most:
        raise ConfigError(
            f"{who} needs {needed + SPARE} file descriptors, and the hard limit of this process is {most}; raise it "
            f"(ulimit -Hn {needed + SPARE}, LimitNOFILE= of a systemd unit, nofile in /etc/security/limits.conf)"
        )


async def watch_descriptors(who: str, announce: Callable[[str], None], look_s: float = LOOK_S) -> None:
    """Until cancelled: say when this process has GROWN more file descriptors than it had, and again for as many more.
    Strangers at a listener of gloo that a user's script has made are the likely cause, or files that nobody closes."""
    known, most = open_descriptors(), raise_descriptor_limit()
    while True:
        await asyncio.sleep(look_s)
        now = open_descriptors()
        if now > known + GROWN:
            announce(
                f"WARNING: {who} has {now} open files and connections, {now - known} more than before, of at most "
                f"{most}; look at what it has open (ls -l /proc/PID/fd), and at SECURITY.md where they are connections"
            )
            known = now


def open_descriptors() -> int:
    """The number of file descriptors of this process; 0 where that cannot be seen."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
