"""What goodput.py asks of every system that it measures."""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import psutil

from benchmarks._goodput_account import Course

LAST_WORDS = 3000
"""Characters of a log that an error shows."""


class Lines:
    """Reads the lines of JSON that a process appends to a file, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._half = path, 0, b""

    def new(self) -> list[dict[str, Any]]:
        """The lines that have been completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        *whole, self._half = (self._half + added).split(b"\n")
        return [json.loads(line) for line in whole]


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
    def calm(self, now: bool) -> None:
        """Begin or end a time without kills, in which the system need not be ready for one."""

    @abstractmethod
    def end(self) -> None:
        """End all processes, whatever happened. May be called twice."""

    def saving(self) -> tuple[float, float] | None:
        """Seconds between two saves and of one, where they are measured."""
        return None

    @abstractmethod
    def own_failures(self, kills: int) -> int:
        """How many groups or lives of the job ended without having been struck; ``kills`` struck."""


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
    told = [f"{process.pid}" for process in found]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return told


def last_words(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-LAST_WORDS:] if log.exists() else ""
