"""Kills the processes that a process has started, when that one itself has ended in any way. Run as a script.

It reads lines from standard input: ``+PID START`` for each process group that was started (START is field 22 of
/proc/PID/stat, which tells it from a later process with the same id) and ``-PID`` for each that has ended. When the
input closes, it kills every group that is left, stopped processes too. It imports nothing of the package, because it
must start in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def kill_group(pid: int, started: str) -> None:
    """SIGKILL a process group, unless its id now belongs to another process than the one that was registered."""
    now = start_time(pid)
    if now and started and now != started:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def main() -> None:
    """Read until the input closes, then kill the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    living: dict[int, str] = {}
    for line in sys.stdin:
        words = line.split()
        if line.startswith("+"):
            living[int(words[0][1:])] = words[1] if len(words) > 1 else ""
        elif line.startswith("-"):
            living.pop(int(words[0][1:]), None)
    for pid, started in living.items():
        kill_group(pid, started)


if __name__ == "__main__":
    main()
