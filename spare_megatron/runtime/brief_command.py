"""Runs a command of the user's that must not hold anybody up: for a limited time, in a process group of its own.

Promises: when :func:`run_command` returns, or the process that called it has ended, no process of the command is left,
except what has made a session of its own, and what the kernel does not let go (a device or a file system that hangs),
for which nobody waits longer than KILL_S; whatever the command writes and however much, little of it is kept; it gets
no file of this process but its standard streams; it need not read its input.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.exits import status_words
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.child_guard import ChildGuard

LOOK_S = 0.1
"""Time between two looks whether the command is wanted any more."""
READ_BYTES = 64 << 10
KEPT_BYTES = 4096
"""How much of the output is kept, from its beginning."""
KILL_S = 2.0
FLOOD_PAUSE_S = 0.01
"""Pause after each full read of more than that, so that a command that never stops writing costs little time here."""
LINE_MOST = 300
"""The longest line that is shown, in characters."""


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended."""

    status: int | None
    """The exit code, or minus the number of the signal; None: it was killed because its time was over."""
    line: str
    """The first line of its output that is not empty."""
    last: str = ""
    """The last one."""

    def words(self, limit_s: float, last: bool = False) -> str:
        """How it ended, and the first line of its output, or the ``last``: 'exit code 1: no route to host'."""
        how = f"not done within {limit_s:g} s" if self.status is None else status_words(self.status)
        line = self.last if last else self.line
        return f"{how}: {line}" if line else how


def run_command(
    command: Sequence[str],
    limit_s: float,
    guard: ChildGuard,
    over: Callable[[], bool],
    *,
    given: bytes = b"",
    environ: Mapping[str, str] | None = None,
    receive_all: bool = False,
) -> CommandEnd:
    """Run ``command`` to its end, and kill what it leaves. Blocks: it is called in a thread that nobody waits for.

    Args:
        limit_s: seconds after which it is killed.
        over: asked several times a second; true when the command is to be killed at once.
        given: its standard input.
        environ: None: this process's own.
        receive_all: keep what it writes to standard output too, not only to standard error.

    Raises:
        OSError: it could not be started.
    """
    process = _started(command, guard, given, environ, receive_all)
    stream = process.stderr
    assert stream is not None
    with stream:
        received = _Output(stream.fileno())
        in_time = False
        try:
            in_time = _wait(process.pid, received, time.monotonic() + limit_s, over)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # no other group has its id before wait()
            until_s = time.monotonic() + KILL_S
            try:
                status = process.wait(KILL_S)
                guard.remove(process.pid)
            except subprocess.TimeoutExpired:
                in_time = False
            _wait_for_others(process.pid, until_s)
        received.receive()
    return CommandEnd(status if in_time else None, received.line, received.last)


def _started(
    command: Sequence[str], guard: ChildGuard, given: bytes, environ: Mapping[str, str] | None, receive_all: bool
) -> subprocess.Popen[bytes]:
    """The process of a command, which begins once the ``guard`` knows it: a shell waits for that on what is then its
    standard output, and ends if this process does."""
    if shutil.which(command[0], path=(os.environ if environ is None else environ).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    output = ">&2" if receive_all else ">/dev/null"
    with contextlib.ExitStack() as files:
        stdin = files.enter_context(open(os.memfd_create("given"), "w+b"))
        stdin.write(given)
        stdin.seek(0)
        reading, writing = os.pipe()
        waits, begins = files.enter_context(open(reading, "rb")), files.enter_context(open(writing, "wb", buffering=0))
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'read -r go <&1 && exec "$@" {output}', "sh", *command],
            env=None if environ is None else dict(environ),
            stdin=stdin,
            stdout=waits,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        failpoints.hit("command.begin")
        guard.add(process.pid)
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            begins.write(b"\n")
    return process


def _wait(pid: int, received: _Output, deadline_s: float, over: Callable[[], bool]) -> bool:
    """Wait for the end of a process and receive what it writes meanwhile; False where it had to end before."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(received.descriptor, select.POLLIN)
        while not over():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            ready = {descriptor for descriptor, _ in poll.poll(1000 * min(LOOK_S, left_s))}
            if handle in ready:
                return True
            if received.descriptor in ready and not received.receive():
                poll.unregister(received.descriptor)
        return False
    finally:
        os.close(handle)


def _wait_for_others(group: int, until_s: float) -> None:
    """Wait for the end of what is left of a process group that was killed, whose leader this process has waited for:
    killed processes die one after the other, each when it gets a processor. Who waits for them is another question, so
    those that have ended may stay in the group."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # there are none, or only another user's, who are not killed
        return
    for pid in _members(group):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                poll.poll(1000 * max(0.0, until_s - time.monotonic()))
            finally:
                os.close(handle)


def _members(group: int) -> list[int]:
    """The processes of a process group, also those that have ended and that nobody has waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(entry.name))
    return found


class _Output:
    """Hears what comes through a pipe, and keeps its beginning and its end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._kept = self._end = b""
        os.set_blocking(descriptor, False)

    def receive(self) -> bool:
        """Read what is there, or a part of it; False when nothing will come any more."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        if len(self._kept) >= KEPT_BYTES:
            time.sleep(FLOOD_PAUSE_S)
        self._kept += data[: KEPT_BYTES - len(self._kept)]
        self._end = (self._end + data)[-KEPT_BYTES:]
        return bool(data)

    @property
    def line(self) -> str:
        return _shown(next(_lines(self._kept), ""))

    @property
    def last(self) -> str:
        return _shown(next(reversed(list(_lines(self._end))), ""))


def _lines(data: bytes) -> Iterator[str]:
    """The lines that are not empty."""
    return filter(None, (line.strip() for line in data.decode(errors="replace").splitlines()))


def _shown(line: str) -> str:
    line = "".join(one if one.isprintable() else "?" for one in line)
    return line if len(line) <= LINE_MOST else line[:LINE_MOST] + "..."
