"""Has the processes that this one starts killed when this one ends, in whatever way.

The guard is a process of its own (:mod:`spare_megatron.runtime.orphan_reaper`) that has a list of those that live. A
process that dies between the start of another and its entry here leaves that one behind, unless that one waits for it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

from spare_megatron.runtime import orphan_reaper


class ChildGuard:
    """The guard and its list. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", orphan_reaper.__file__],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """A process was started that is the leader of its own process group."""
        self._tell(f"+{pid} {orphan_reaper.start_time(pid)}")

    def remove(self, pid: int) -> None:
        """It has ended."""
        self._tell(f"-{pid}")

    def close(self) -> None:
        """Kill the groups that are still listed, and end the guard."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # BrokenPipeError: somebody killed the guard, and the job goes on without it. ValueError: it is closed.
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
