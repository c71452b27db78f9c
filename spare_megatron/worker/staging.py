"""Brings the data of a shard to this host by a command of the user's (``--spare-stage-command``)."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path

from spare_megatron.runtime.brief_command import run_command
from spare_megatron.runtime.child_guard import ChildGuard

FLAG = "--spare-stage-command"


class StagingError(RuntimeError):
    """The command has not brought the data."""


def bring(command: str, shard: int, locks: Path, limit_s: float) -> None:
    """Run ``command`` for a shard and this host, and wait for its end. Ranks of one host run it one after the other:
    all but the first should find nothing to do.

    Args:
        command: is given to the shell, with the shard's number for ``{shard}`` and the name of this host for
            ``{host}``.
        locks: a directory for files that are locked meanwhile.
        limit_s: seconds after which it is killed.

    Raises:
        StagingError: it could not be started, failed, or took too long; with the last line of what it wrote.
    """
    host = socket.gethostname()
    text = command.replace("{shard}", str(shard)).replace("{host}", host)
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{host}-{shard}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        guard = ChildGuard()
        try:
            end = run_command(("/bin/sh", "-c", text), limit_s, guard, lambda: False, receive_all=True)
        finally:
            guard.close()
    if end.status != 0:
        raise StagingError(f"{FLAG} for shard {shard} on {host}: {end.words(limit_s, last=True)}")
