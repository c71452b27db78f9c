"""Ends what spare-launch started when spare-launch itself is gone, however it went. Run as a script, by path.

On standard input it is told ``+PID START`` for each process group that lives (START: field 22 of /proc/PID/stat, so
that a reused id is not taken for it) and ``-PID`` for each that was ended. When the input closes, everything that
still lives is killed, stopped processes too. It imports nothing of the package: it must start in milliseconds.
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
    """SIGKILL to a process group whose leader is (or was) the process that was registered."""
    now = start_time(pid)
    if now and started and now != started:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def main() -> None:
    """Until the input closes, then once over what is left."""
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
