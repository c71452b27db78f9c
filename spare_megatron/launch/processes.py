"""Starts a job's processes on this machine, each in its own process group, learns of their end, and kills by group.

A pidfd becomes readable when its process ends, so an exit is known within a millisecond and without a thread. A guard
(:mod:`spare_megatron.runtime.child_guard`) kills them if this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from spare_megatron.launch.preload_client import ForkedProcess
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.child_guard import ChildGuard
from spare_megatron.runtime.disk import with_retries, words
from spare_megatron.runtime.run_directory import write_json

KILLED_S = 30.0
"""How long killed processes have to end, before the launcher goes on without them."""
LOG_PATIENCE_S = 2.0
"""How long the start of a process waits for the disk on which its log is, if that fails."""


Fork = Callable[[Sequence[str], Mapping[str, str], tuple[int, int, int]], ForkedProcess | None]
"""Forks a process that runs a command with an environment and three standard streams; None where it cannot."""


class Child:
    """One started process, the leader of its own process group."""

    def __init__(self, name: str, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        self.name, self.process, self.pid = name, process, process.pid
        self.handle = os.pidfd_open(process.pid)
        self.status: int | None = None
        """The exit code, or minus the number of the signal, once the process has ended."""

    @property
    def alive(self) -> bool:
        """Whether the process is not known to have ended."""
        return self.status is None

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process (state T)."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in ("T", "t")

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Processes:
    """Starts processes and calls back when they end. Used as a context manager, at whose end all of them are killed."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self.guard = ChildGuard()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes and wait for their end; the guard ends last, in case this is interrupted."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        deadline_s = time.monotonic() + KILLED_S
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot be killed
                child.process.wait(max(0.1, deadline_s - time.monotonic()))
            os.close(child.handle)
        self.guard.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        out: Path,
        *,
        ended: Callable[[Child], None],
        err: Path | None = None,
        fork: Fork | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start one process. Its output is appended to ``out``, that of standard error to ``err`` if given; ``ended``
        is called in the event loop when it has ended. ``fork`` is asked first whether it forks the process.

        It leads a process group, to be killed with what it starts, but no session: outside of control groups Linux
        shares each processor between sessions first (sched_autogroup), and the share of one whose training thread runs
        on another processor is so small that its other threads wake up to 0.1 s late.
        """
        with contextlib.ExitStack() as files:
            stdout = files.enter_context(_open_log(out))
            stderr = files.enter_context(_open_log(err)) if err is not None else subprocess.STDOUT
            process: subprocess.Popen[bytes] | ForkedProcess | None = None
            if fork is not None:
                nothing = files.enter_context(open(os.devnull, "rb"))
                error = stdout if isinstance(stderr, int) else stderr
                process = fork(command, environ, (nothing.fileno(), stdout.fileno(), error.fileno()))
            if process is None:
                process = subprocess.Popen(
                    list(command),
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    process_group=0,
                    pass_fds=pass_fds,
                )
        child = Child(name, process)
        self._children[child.pid] = child
        self.guard.add(child.pid)
        if isinstance(process, ForkedProcess):
            process.release()
        asyncio.get_running_loop().add_reader(child.handle, self._ended, child, ended)
        return child

    def _ended(self, child: Child, ended: Callable[[Child], None]) -> None:
        asyncio.get_running_loop().remove_reader(child.handle)
        os.close(child.handle)
        child.signal(signal.SIGKILL)  # what it has started too; no other group has its id before wait()
        child.status = child.process.wait()
        del self._children[child.pid]
        self.guard.remove(child.pid)
        ended(child)


def _open_log(path: Path) -> IO[bytes]:
    """Open the log of a process. If the disk fails for longer than :data:`LOG_PATIENCE_S`, the output is lost, but the
    process is started."""

    def opened() -> IO[bytes]:
        failpoints.hit("processes.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")

    try:
        return with_retries(opened, LOG_PATIENCE_S)
    except OSError as error:
        sys.stderr.write(f"spare: the output of a process is lost: {path} cannot be opened: {words(error)}\n")
        return Path(os.devnull).open("ab")


ListedRank = tuple[int, int, int, int]
"""(group, position, incarnation, process id) of a rank that is alive."""


ListedWaiting = tuple[str, int, int, bool]
"""(name, position, process id, whether a signal has stopped it) of a process that waits for a place and is alive; such
as 'standby-0'."""


def publish_processes(
    path: Path, coordinator: Child | None, ranks: Sequence[ListedRank], waiting: Sequence[ListedWaiting] = ()
) -> None:
    """Replace processes.json by the list of the processes that are alive."""
    host = socket.gethostname()
    listed: list[dict[str, Any]] = [
        {"group": group, "position": position, "incarnation": incarnation, "pid": pid, "host": host}
        for group, position, incarnation, pid in sorted(ranks)
    ]
    living = coordinator is not None and coordinator.alive
    pid = coordinator.pid if living and coordinator else None
    parked = [
        {"name": name, "position": position, "pid": pid, "host": host, "stopped": stopped}
        for name, position, pid, stopped in waiting
    ]
    write_json(path, {"coordinator": {"pid": pid}, "ranks": listed, "waiting": parked})
