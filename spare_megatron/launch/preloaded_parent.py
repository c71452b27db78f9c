"""A process that has imported what ranks import, and forks them: a rank then starts in milliseconds, not seconds, and
shares the memory of its modules with the others.

It has one thread and no device, so a child of it is as a new process that has imported the same. Where that is not so
after its imports (:mod:`spare_megatron.launch.parent_imports`), it says which module did it and forks nothing.

Two ways to be started: by spare-launch, with one end of a socket, for the ranks of one job (``--fd``); or by hand or
for tests (``--listen``), for every launcher of the same user whose environment, limits and files are the same: each
gets a fork of this process, which then serves it as in the first way.

A child is the leader of a process group and waits, before it runs the script, for a byte on its *leash*, a pipe from
the launcher: nothing runs that its launcher does not know of. An ended child is reaped at the launcher's request,
which has then killed what was left of the process group. When the launcher's end of the socket closes, all children are
killed.

Messages (:mod:`spare_megatron.launch.preload_wire`):

* ``hello`` with the modules to import, the search path and what the launcher gives its children -> ``ready``, or
  ``unfit`` with the sentence why, and with the ``module`` if it is one's fault.
* ``start`` with command, environment and directory, descriptors of standard input, output, error and leash -> ``pid``,
  or ``errno`` where the kernel forks no more.
* ``reap`` with a pid -> ``status``, as :func:`os.waitstatus_to_exitcode` has it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.launch import parent_imports
from spare_megatron.launch import preload_wire as wire
from spare_megatron.launch.forked_script import ForkedScript
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.import_variables import import_environment
from spare_megatron.runtime.stop_signals import ignore_stop_signals, usual_signals

PATH_BYTES = 107
"""The longest path of a Unix socket."""


class Parent:
    """Serves one launcher."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: set[int] = set()

    def serve(self, hello: dict[str, Any]) -> ForkedScript | None:
        """Answer until the launcher is gone: None. In each forked process it returns the script to run."""
        try:
            self._prepare(hello)
        except wire.ForkRefusedError as unfit:
            wire.send(self._sock, {"unfit": str(unfit), "module": unfit.module})
            return None
        wire.send(self._sock, {"ready": True})
        try:
            while True:
                request, fds = wire.receive(self._sock)
                failpoints.hit("preload.request")
                if request["ask"] == "start":
                    if self._fork(fds) == 0:
                        break
                else:
                    wire.send(self._sock, {"status": self._reaped(request["pid"])})
        except OSError:
            self._end_children()
            return None
        self._sock.close()  # in the forked process, whose errors are its own
        return ForkedScript(request, fds, hello["settings"]["nohup"])

    def _prepare(self, hello: dict[str, Any]) -> None:
        path = hello["search_path"]
        if not parent_imports.finds_this_package(path):
            raise wire.ForkRefusedError(f"{wire.PACKAGE} is not the package that the script would import")
        sys.path[:] = path
        fault = parent_imports.other_file()
        if fault:
            raise wire.ForkRefusedError(fault)
        parent_imports.import_all(hello["modules"])

    def _fork(self, fds: list[int]) -> int:
        """Fork, and answer; returns 0 in the forked process. A host that has no room for another process is no reason
        to end those that there are."""
        try:
            failpoints.hit("preload.fork")
            pid = os.fork()
        except OSError as error:
            pid, answer = -1, {"errno": error.errno}
        else:
            answer = {"pid": pid}
        if pid == 0:
            return 0
        for fd in fds:
            os.close(fd)
        if pid > 0:
            with contextlib.suppress(OSError):  # the child does it too: whoever is first
                os.setpgid(pid, pid)
            self._children.add(pid)
        wire.send(self._sock, answer)
        return pid

    def _reaped(self, pid: int) -> int | None:
        """The status of an ended child; None for one that has not ended, or is none."""
        if pid not in self._children:
            return None
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == 0:
            return None
        self._children.remove(pid)
        return os.waitstatus_to_exitcode(status)

    def _end_children(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


# ------------------------------------------------------------------------------------------------------ for launchers


class Listener:
    """Forks a :class:`Parent` for each launcher that connects, as long as standard input is open."""

    def __init__(self, path: Path, modules: Sequence[str]) -> None:
        self._path, self._modules = path, modules
        self._environ = import_environment(os.environ)
        self._stamp = wire.code_stamp()
        self._pid = os.getpid()

    def serve(self) -> ForkedScript | None:
        """Listen until standard input ends: None. In each forked process, as :meth:`Parent.serve`."""
        parent_imports.import_all(self._modules)
        files = parent_imports.imported_files()
        with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
            own = self._path.with_name(f"{self._path.name}.{self._pid}")
            listener.bind(str(own))
            own.chmod(0o600)
            listener.listen()
            own.replace(self._path)  # who finds it is answered
            mine = self._path.stat().st_ino
            selector.register(listener, selectors.EVENT_READ)
            selector.register(0, selectors.EVENT_READ)
            try:
                while True:
                    ready = [key.fileobj for key, _ in selector.select(timeout=1.0)]
                    self._reap()
                    if 0 in ready and not os.read(0, 1):
                        return None
                    if listener in ready:
                        sock, _ = listener.accept()
                        if os.fork() == 0:
                            listener.close()
                            return self._serve_one(sock, files)
                        sock.close()
            finally:
                if os.getpid() == self._pid:  # and not in a process that it has forked
                    with contextlib.suppress(OSError):
                        if self._path.stat().st_ino == mine:  # and not that of a later one
                            self._path.unlink()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _serve_one(self, sock: socket.socket, files: Mapping[str, int]) -> ForkedScript | None:
        os.setpgid(0, 0)
        if wire.peer_user(sock) != os.getuid():
            return None
        sock.settimeout(10.0)
        hello, fds = wire.receive(sock)
        for fd in fds:
            os.close(fd)
        sock.settimeout(None)
        fault = self._fault(hello, files)
        if not fault:
            try:
                wire.take_settings(hello["settings"])
            except (OSError, ValueError) as error:
                fault = f"it may not take the launcher's settings: {error}"
        if fault:
            wire.send(sock, {"unfit": fault, "module": None})
            return None
        return Parent(sock).serve(hello)

    def _fault(self, hello: dict[str, Any], files: Mapping[str, int]) -> str:
        """Why this process, which has imported these files, cannot fork for a launcher; empty: it can."""
        if hello["stamp"] != self._stamp:
            return "it was started with other files of the package"
        if hello["executable"] != sys.executable:
            return f"it runs {sys.executable}"
        names = {name for name, _ in set(hello["environ"].items()) ^ set(self._environ.items())}
        changed = [file for file, then_ns in files.items() if parent_imports.changed_ns(file) != then_ns]
        if changed:
            return f"it has imported {min(changed)}, which has changed since"
        if names:
            return f"it was started with other values of {', '.join(sorted(names))}"
        here = wire.surroundings()
        others = [name for name in here if here[name] != hello["surroundings"][name]]
        return f"it has other {' and '.join(others)}" if others else ""


def main(words: Sequence[str] | None = None) -> ForkedScript | None:
    """The process; returns the script to run in each process that it forks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--fd", type=int, help="a socket of the launcher that started this process")
    how.add_argument("--listen", type=Path, metavar="PATH", help="a socket to listen at, until standard input ends")
    parser.add_argument("modules", nargs="*", help="modules to import; with --fd the launcher names them")
    options = parser.parse_args(words)
    usual_signals()
    ignore_stop_signals()  # they mean the launcher and the ranks
    failpoints.act_as("preload")
    if options.listen is not None:
        if options.listen.exists() and not options.listen.is_socket():
            parser.error(f"{options.listen} exists and is no socket; give another path to --listen")
        room = PATH_BYTES - len(f".{os.getpid()}")
        if len(os.fsencode(options.listen.absolute())) > room:
            parser.error(f"{options.listen.absolute()} has more than {room} bytes; give a shorter path to --listen")
        return Listener(options.listen.absolute(), options.modules).serve()
    with socket.socket(fileno=options.fd) as sock:
        return Parent(sock).serve(wire.receive(sock)[0])


if __name__ == "__main__":
    _script = main()
    if _script is None:
        os._exit(0)  # to take down the modules would copy the memory that forked processes share with this one
    _script.run()
