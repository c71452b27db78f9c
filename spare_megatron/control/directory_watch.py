"""Notices that a job's run directory was deleted or replaced while the job runs.

A process that has files there open could go on writing for ever, and nobody would find what it writes.
"""

from __future__ import annotations

import os
from pathlib import Path


class DirectoryWatch:
    """One directory, from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, _identity(path)

    def gone(self) -> str:
        """A sentence that says so where the directory is not the one it was; empty where it is, or a disk that fails
        does not say."""
        try:
            if _identity(self._path) == self._known:
                return ""
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return ""
        return (
            f"the run directory {self._path} was deleted or replaced while the job ran, so the job ends; start it "
            "again with another --run-dir and --load its last checkpoint"
        )


def _identity(path: Path) -> tuple[int, int]:
    there = os.stat(path)
    return there.st_dev, there.st_ino
