"""Follows the files of a run directory, of a job that runs or has ended, and draws the picture of the job from them.

May assume: others write there meanwhile. Changes nothing. A line that is not complete yet is read the next time; where
another coordinator took over and the journal is another file now, it is read from the beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.control.disk import words
from spare_megatron.control.run_directory import RunDirectory, glance
from spare_megatron.controller.codec import decode
from spare_megatron.coordinator.journal import JournalError, Record, acted_on
from spare_megatron.coordinator.journal_parts import BEGIN
from spare_megatron.watch.job_picture import JobPicture

NEEDED = frozenset(
    {"life", "step", "time_unix_s", "step_time_s", "compute_paced_s", "reduce_least_s", "votes_s", "recovery", "loss"}
)
"""What a line of metrics.jsonl must have."""


class RunFiles:
    """The files of one run directory, and the picture drawn from what they have by now."""

    def __init__(self, run_dir: RunDirectory) -> None:
        """Raises ConfigError where the directory is none of a job."""
        self._dir = run_dir
        try:
            there = run_dir.path.is_dir()
            known = there and (run_dir.journal.exists() or run_dir.status.exists())
        except OSError as error:
            raise ConfigError(f"{run_dir.path} cannot be read: {words(error)}") from None
        if not there:
            raise ConfigError(f"there is no directory {run_dir.path}; give the --run-dir of a job")
        if not known:
            raise ConfigError(
                f"{run_dir.path} has no status.json and no journal.jsonl; give the --run-dir of a job that has been "
                "started"
            )
        self._begin()

    def _begin(self) -> None:
        self._picture, self._place = JobPicture(), BEGIN
        self._lines = _GrowingLines(self._dir.metrics)

    def look(self) -> JobPicture:
        """The picture, with all that is in the files now; the same object each time, unless the journal is another.

        Raises:
            ConfigError: a file cannot be read, is damaged, or was written by another version.
        """
        try:
            try:
                self._read()
            except JournalError:
                self._begin()
                self._read()
        except JournalError as error:
            raise ConfigError(f"the journal cannot be read: {error}") from None
        except OSError as error:
            raise ConfigError(f"{error.filename or self._dir.path} cannot be read: {words(error)}") from None
        self._picture.status = glance(self._dir.status) or self._picture.status
        self._picture.job = self._job() or self._picture.job
        return self._picture

    def _read(self) -> None:
        if self._lines.are_others():
            self._begin()
        until_bytes = self._lines.length()  # first, so that the records go further
        self._picture.take(self._records(), self._lines.new(until_bytes))

    def _job(self) -> JobDescription | None:
        plain = glance(self._dir.job)
        try:
            return None if plain is None else decode(plain)
        except ValueError as error:
            raise ConfigError(f"{self._dir.job} is of another version of spare_megatron: {error}") from None

    def _records(self) -> Iterator[Record]:
        for record, place in acted_on(self._dir.journal, self._place):
            self._place = place
            if record is not None:
                yield record


class _GrowingLines:
    """The lines of metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._number = path, 0, 0
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was read."""

    def are_others(self) -> bool:
        """Whether the file is not the one that was read: each coordinator under Slurm writes its own."""
        there = _stat(self._path)
        return self._file is not None and (there is None or self._file != (there.st_dev, there.st_ino))

    def length(self) -> int:
        """The length of the file, in bytes; 0 where it is not there."""
        there = _stat(self._path)
        if there is None:
            return 0
        self._file = there.st_dev, there.st_ino
        return there.st_size

    def new(self, until_bytes: int) -> Iterator[Mapping[str, Any]]:
        """The lines that were completed since the last call, and end within the first ``until_bytes``."""
        if until_bytes <= self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n") or self._offset + len(text) > until_bytes:
                    return
                self._offset += len(text)
                self._number += 1
                yield self._parsed(text)

    def _parsed(self, text: bytes) -> Mapping[str, Any]:
        where = f"line {self._number} of {self._path}"
        try:
            line: Mapping[str, Any] = json.loads(text)
            missing = sorted(NEEDED - line.keys())
        except (ValueError, AttributeError):
            raise ConfigError(f"{where} is no JSON object: the file is damaged") from None
        if missing:
            raise ConfigError(
                f"{where} has no {missing[0]}: another version of spare_megatron wrote it; read it with that version"
            )
        return line


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
