"""Notices that a job's run directory was deleted or replaced while the job runs.

A process that has files there open could go on writing for ever, and nobody would find what it writes. But a shared
file system may lose a directory for a while, and may show it as another one when it is mounted again: so it is
recognised by the job's token as well, and it counts as gone when it has been for :data:`GONE_S`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

GONE_S = 15.0


class DirectoryWatch:
    """One directory, from now on."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` says the time in seconds."""
        self._path, self._clock = path, clock
        self._known, self._token = _identity(path), _token(path)
        self._since_s: float | None = None
        """Since when it has not been there."""

    def gone(self) -> str:
        """A sentence that says so where the directory has not been the one it was for GONE_S; empty where it is, or a
        disk that fails does not say."""
        try:
            there = self._is_there()
        except OSError:
            return ""
        now_s = self._clock()
        if there:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        if self._since_s is None or now_s - self._since_s < GONE_S:
            return ""
        return gone_text(self._path)

    def _is_there(self) -> bool:
        try:
            now = _identity(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if now != self._known and self._token and _token(self._path) == self._token:
            self._known = now  # it was mounted again
        return now == self._known


def gone_text(path: Path) -> str:
    """What is said of a run directory that is not there any more."""
    return (
        f"the run directory {path} was deleted or replaced while the job ran, so the job ends; start it again with "
        "another --run-dir and --load its last checkpoint"
    )


def _identity(path: Path) -> tuple[int, int]:
    there = os.stat(path)
    return there.st_dev, there.st_ino


def _token(path: Path) -> str:
    """The job's secret in a run directory; empty where there is none."""
    try:
        return (path / "token").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""
