"""What goodput.py asks of every system that it measures."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from pathlib import Path

import psutil

from benchmarks._goodput_account import Course
from benchmarks._goodput_model import ROOT, environment
from spare_megatron.launch.attempt_report import tail

LINES_SHOWN = 30
"""Of a log, in an error."""


class System(ABC):
    """One job of a system, with all its processes, in a folder of its own."""

    name: str
    notes: str = ""
    """What the report says of its settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.course = Course()
        folder.mkdir(parents=True)
        self.scratch = folder / "tmp"
        self.scratch.mkdir()

    @property
    @abstractmethod
    def version(self) -> str:
        """Of the packages that are measured."""

    @abstractmethod
    def start(self) -> None:
        """Start all processes."""

    @abstractmethod
    def look(self) -> None:
        """Take what was trained since the last look into ``course``; start again what is this system's to start.
        RuntimeError if it has ended."""

    @abstractmethod
    def kill(self, group: int) -> int:
        """SIGKILL all processes of a group; returns how many there were."""

    @abstractmethod
    def failure_free(self, now: bool) -> None:
        """Begin or end a time without kills, in which the system need not be ready for one."""

    @abstractmethod
    def end(self) -> None:
        """End all processes, whatever happened. May be called twice."""

    def run_logged(self, command: list[str], name: str) -> psutil.Popen:
        """Start a process in a session of its own; what it prints is added to the log ``name``."""
        with self._log(name).open("ab") as log:
            return psutil.Popen(
                command, cwd=ROOT, env=environment(self.scratch), stdout=log, stderr=log, start_new_session=True
            )

    def failed(self, name: str, what: str) -> RuntimeError:
        """The error for a process that does not do what it should, with the end of its log."""
        return RuntimeError(f"{name} {what}\n{tail(self._log(name), LINES_SHOWN)}")

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def saving(self) -> tuple[float, float] | None:
        """Seconds between two saves and of one, where they are measured."""
        return None

    @abstractmethod
    def own_failures(self, kills: int) -> int:
        """How many groups or job attempts ended without having been struck; ``kills`` struck."""


def end_with_children(root: psutil.Popen | None) -> None:
    """SIGKILL a process, then all that descended from it, and wait for them."""
    if root is None or root.poll() is not None:
        return
    family = [root, *root.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)


def left_behind(folder: Path, within_s: float = 5.0) -> list[str]:
    """Processes that belong to a folder, by their command or environment, and are still there after a while."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = [*process.cmdline(), process.environ().get("TMPDIR", "")]
                if any(str(folder) in word for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        if not found or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    reported = [f"{process.pid}" for process in found]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return reported
