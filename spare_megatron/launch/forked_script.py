"""Turns a process that a preloaded parent has forked into one that runs a script, as if Python had been started
with it.

What a new process has and a forked one would not: its own streams, signals as Python sets them at its start, its
directory, environment, arguments and search path, seeds of its own, its command line in ``/proc``. What stays from the
parent: the imported modules and the hash seed of strings.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import tempfile
import time
import types
from typing import Any

from spare_megatron.control_plane import leader_process
from spare_megatron.launch.parent_imports import repeat_changes
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.import_variables import note_fork
from spare_megatron.runtime.process_image import show_as
from spare_megatron.runtime.stop_signals import STOP_SIGNALS


class ForkedScript:
    """What a forked process is to run."""

    def __init__(self, request: dict[str, Any], fds: list[int], nohup: bool) -> None:
        """Become a process of its own; waits for the leash.

        Args:
            request: ``command`` (the interpreter, then a script or ``-m`` and a module, then flags), ``environ`` and
                ``directory``.
            fds: of standard input, output, error and the leash.
            nohup: whether SIGHUP is ignored.
        """
        os.setpgid(0, 0)
        leash = fds[3]
        for fd, stream in zip(fds[:3], (0, 1, 2), strict=True):
            os.dup2(fd, stream, inheritable=True)
            os.close(fd)
        if not os.read(leash, 1):
            os._exit(1)  # the launcher is gone, or does not know this process
        os.close(leash)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._command: list[str] = request["command"]
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environ"])
        repeat_changes(os.environ)
        time.tzset()
        tempfile.tempdir = None
        if "multiprocessing.process" in sys.modules:
            process: Any = sys.modules["multiprocessing.process"]
            process.ORIGINAL_DIR = os.getcwd()  # where processes that are spawned look for the script
            process.current_process().authkey = os.urandom(32)
        failpoints.read_environment()
        note_fork(os.environ)
        show_as(self._command, os.environ)
        self._seed()
        if os.environ.get("SPARE_POSITION") == "0" and os.environ.get("SPARE_GROUP_SIZE") != "1":
            leader_process.fork_ahead()

    def _seed(self) -> None:
        """Give the generators that libraries share seeds of their own, as a new process has; that of :mod:`random` does
        it by itself."""
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()

    def run(self) -> None:
        """Run the script as ``__main__``. What it raises, and its ``sys.exit``, come out of here."""
        words = self._command[1:]
        sys.orig_argv[:] = self._command
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
        sys.argv[:] = ["-m", *words[2:]] if words[0] == "-m" else words
        sys.argv = list(sys.argv)  # that of the parent is of another type
        if words[0] == "-m":
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
            return
        script = os.path.join(os.getcwd(), words[0].removeprefix("./"))
        with io.open_code(script) as file:
            source = file.read()
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=script,
            __builtins__=builtins,
            __annotations__={},
            __cached__=None,
            __loader__=importlib.machinery.SourceFileLoader("__main__", script),
        )
        sys.modules["__main__"] = main
        exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)
