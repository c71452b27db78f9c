"""Reads a file to which other processes append."""

from __future__ import annotations

from pathlib import Path


class FollowedFile:
    """A file to which other processes append lines, from its end at the time when this is made."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._offset = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []  # the file does not exist yet, or the disk fails at the moment
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
