"""How processes are forked by a preloaded parent (:mod:`spare_megatron.launch.preloaded_parent`): the other end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.control_plane.launcher_watch import has_ended
from spare_megatron.launch import preload_wire as wire
from spare_megatron.runtime.import_variables import import_environment

ANSWER_S = 5.0
"""How long a parent may take to fork or to reap; one that takes longer is asked nothing more before it answers."""
UNKNOWN = -int(signal.SIGKILL)
"""The status of a process whose parent ended before it: nobody knows it."""


class ForkedProcess:
    """A process that a parent has forked; has what is used of :class:`subprocess.Popen`."""

    def __init__(self, link: ParentLink, pid: int, leash: int) -> None:
        """``leash``: the descriptor of :meth:`release`, which belongs to this object."""
        self._link, self.pid, self._leash = link, pid, leash
        self._handle = os.pidfd_open(pid)
        self.returncode: int | None = None

    def release(self) -> None:
        """Let it run; until then it waits, and ends if this process does. To be called once."""
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self._leash, b"!")
        os.close(self._leash)

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal, if the process has ended."""
        if self.returncode is None and has_ended(self._handle, 0.0):
            self.returncode = self._link.reap(self.pid)
            os.close(self._handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises TimeoutExpired where that lasts longer than ``timeout`` seconds."""
        if self.returncode is None and not has_ended(self._handle, timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ParentLink:
    """A connection to a parent. Used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.broken = False
        """Whether the parent has not answered in time, or is gone: it is asked nothing before :meth:`hear`."""

    def greet(self, modules: Sequence[str], search_path: Sequence[str], **like: Any) -> None:
        """Say what is to be imported, and with which search path; :meth:`receive` reads the answer. Raises OSError
        where the parent is gone.

        Args:
            like: what a parent that listens has to have as this process has it.
        """
        hello = {"modules": list(modules), "search_path": list(search_path), "settings": wire.settings()}
        wire.send(self.sock, {**hello, **like})

    def receive(self) -> None:
        """Read the answer to :meth:`greet`. Raises ForkRefusedError; OSError where the parent is gone."""
        answer, _ = wire.receive(self.sock)
        if "unfit" in answer:
            raise wire.ForkRefusedError(answer["unfit"], answer["module"])
        self.sock.settimeout(ANSWER_S)

    def hear(self) -> bool:
        """Read what the parent has sent though nobody waits for it: an answer that came too late, after which it can be
        asked again, or nothing: False, it has ended. A late process ends, because its leash is closed."""
        try:
            wire.receive(self.sock)
        except OSError:
            self.broken = True
        else:
            self.broken = False
        return not self.broken

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        streams: tuple[int, int, int],
        directory: str | None = None,
    ) -> ForkedProcess:
        """Fork a process that will run ``command`` (the interpreter, a script or ``-m`` and a module, flags) when it is
        released.

        Raises OSError where the parent does not do it; the process then runs nothing."""
        leash, mine = os.pipe()
        try:
            request = {
                "ask": "start",
                "command": list(command),
                "environ": dict(environ),
                "directory": directory or os.getcwd(),
            }
            answer = self._ask(request, (*streams, leash))
            if "errno" in answer:
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            return ForkedProcess(self, answer["pid"], mine)
        except BaseException:
            os.close(mine)
            raise
        finally:
            os.close(leash)

    def reap(self, pid: int) -> int:
        """The status of an ended process; :data:`UNKNOWN` where the parent cannot say it."""
        with contextlib.suppress(OSError):
            status = self._ask({"ask": "reap", "pid": pid})["status"]
            return UNKNOWN if status is None else int(status)
        return UNKNOWN

    def close(self) -> None:
        """End the connection; the parent then kills what it has forked, and ends."""
        self.broken = True
        self.sock.close()

    def _ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        if self.broken:
            raise OSError("the preloaded parent has ended, or has not answered")
        try:
            wire.send(self.sock, request, fds)
            return wire.receive(self.sock)[0]
        except OSError as error:
            self.broken = True
            raise OSError(f"the preloaded parent does not answer: {error}") from error


def connect(
    path: Path, modules: Sequence[str], search_path: Sequence[str], environ: Mapping[str, str], patience_s: float = 60.0
) -> ParentLink:
    """A connection to the parent that listens at ``path``. Raises OSError where there is none or it does not answer
    within ``patience_s``, ForkRefusedError where it forks nothing for this process, or belongs to another user, who
    would get the environment and could name any process as a rank."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(patience_s)
        sock.connect(str(path))
        user = wire.peer_user(sock)
        if user != os.getuid():
            raise wire.ForkRefusedError(f"it belongs to user {user}")
        link = ParentLink(sock)
        link.greet(
            modules,
            search_path,
            stamp=wire.code_stamp(),
            executable=sys.executable,
            environ=import_environment(environ),
            surroundings=wire.surroundings(),
        )
        link.receive()
    except BaseException:
        sock.close()
        raise
    return link


def search_path_of(command: Sequence[str]) -> list[str]:
    """The search path of a process that is started with this command here and now."""
    rest = sys.path if sys.flags.safe_path else sys.path[1:]
    if os.environ.get("PYTHONSAFEPATH"):
        return list(rest)
    first = os.getcwd() if command[1] == "-m" else os.path.dirname(os.path.realpath(command[1]))
    return [first, *rest]
