"""Follows the files of a run directory, of a job that runs or has ended, and draws the picture of the job from them.

May assume: others write there meanwhile. Changes nothing. A line that is not complete yet is read the next time; where
another coordinator took over and the journal is another file now, it is read from the beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.coordinator.journal import JournalError, Record, acted_on
from spare_megatron.coordinator.journal_parts import BEGIN
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.waiting_counts import waiting_counts
from spare_megatron.protocol.codec import decode
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.file_shapes import METRICS_KNOWN, METRICS_NEEDED, misfit
from spare_megatron.runtime.run_directory import RunDirectory, glance

NEEDED = frozenset(
    {"life", "step", "time_unix_s", "step_time_s", "compute_paced_s", "reduce_least_s", "votes_s", "recovery", "loss"}
)
"""What a line of metrics.jsonl must have; one that lacks any of it, of an older version, is left out."""


class RunFiles:
    """The files of one run directory, and the picture drawn from what they have by now."""

    def __init__(self, run_dir: RunDirectory) -> None:
        """Raises ConfigError where the directory is none of a job."""
        self._dir = run_dir
        self._check()
        self._status_seen: tuple[Mapping[str, Any], float] = ({}, 0.0)
        """The newest status, and when it was written, by this process's clock."""
        self._begin()

    def _check(self) -> None:
        run_dir = self._dir
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

    def _begin(self) -> None:
        self._picture, self._place = JobPicture(), BEGIN
        self._lines = _GrowingLines(self._dir.metrics)

    def look(self) -> JobPicture:
        """The picture, with all that is in the files now; the same object each time, unless the journal is another.

        Raises:
            ConfigError: a file cannot be read, is damaged, or was written by another version; or the directory is none
                of a job any more.
        """
        self._check()
        try:
            with readable(self._dir):
                try:
                    self._read()
                except JournalError:
                    self._begin()
                    self._read()
        except JournalError as error:
            raise ConfigError(f"the journal cannot be read: {error}") from None
        except OSError as error:
            raise ConfigError(f"{error.filename or self._dir.path} cannot be read: {words(error)}") from None
        status = glance(self._dir.status)
        if status is not None:
            self._note_age(status)
            self._picture.status = {**status, "waiting": waiting_counts(self._dir)}
        self._picture.job = self._job() or self._picture.job
        # began.json is a launcher's, and ended.json is there from its end until it begins another job attempt
        self._picture.has_launcher, self._picture.has_left = self._dir.began.exists(), self._dir.ended.exists()
        return self._picture

    def now_s(self) -> float:
        """The time of now by the clock of the job's records: that of the newest status, and what has passed since. So
        this host's wall clock is not compared with the coordinator's."""
        status, written_s = self._status_seen
        return float(status.get("time_unix_s", 0.0)) + time.monotonic() - written_s if status else time.time()

    def _note_age(self, status: Mapping[str, Any]) -> None:
        known, _ = self._status_seen
        if status != known:
            self._status_seen = status, time.monotonic() - (0.0 if known else file_age_s(self._dir.status))

    def lines(self, left_out: Callable[[int], None] = lambda _: None) -> Iterator[Mapping[str, Any]]:
        """All lines of metrics.jsonl that are there now, from the first one on; at the end ``left_out`` gets the number
        of those of an older version.

        Raises:
            ConfigError: a line is damaged.
            OSError: the file cannot be read.
        """
        with _opened(self._dir.metrics) as metrics:
            lines = _GrowingLines(self._dir.metrics)
            yield from lines.new(metrics)
        left_out(lines.left_out)

    def _read(self) -> None:
        with _opened(self._dir.metrics) as metrics:  # first, so that the records go further
            if self._lines.are_others(metrics):
                self._begin()
            self._picture.take(self._records(), self._lines.new(metrics))
        self._picture.lines_left_out = self._lines.left_out

    def _job(self) -> JobDescription | None:
        plain = glance(self._dir.job)
        try:
            return None if plain is None else decode(plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self._dir.job} is of another version of spare_megatron: {error}") from None

    def _records(self) -> Iterator[Record]:
        for record, place in acted_on(self._dir.journal, self._place):
            self._place = place
            if record is not None:
                yield record


@contextlib.contextmanager
def readable(run_dir: RunDirectory) -> Iterator[None]:
    """Inside, what files say is taken for what they say. Raises ConfigError where that cannot be, which is found here
    only in the end: a record that is one for itself may speak of a group that there is not."""
    try:
        yield
    except (ConfigError, JournalError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ConfigError(
            f"the files of {run_dir.path} do not fit together ({why}): one of them is damaged or of another version"
        ) from error


def file_age_s(path: Path) -> float:
    """How long ago a file was written, in seconds, as far as its file system's clock says."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


@dataclass(frozen=True)
class _OpenMetrics:
    """metrics.jsonl as it was when it was opened; what is read of it is of the same file, whatever has its name now."""

    file: BinaryIO
    identity: tuple[int, int]
    """Device and inode."""
    length: int
    """In bytes."""


class _GrowingLines:
    """The lines of metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._number = path, 0, 0
        self._identity: tuple[int, int] | None = None
        """Of the file that was read."""
        self.left_out = 0
        """The number of lines of an older version so far."""

    def are_others(self, metrics: _OpenMetrics | None) -> bool:
        """Whether the file is not the one that was read: each coordinator under Slurm writes its own."""
        return self._identity is not None and (metrics is None or self._identity != metrics.identity)

    def new(self, metrics: _OpenMetrics | None) -> Iterator[Mapping[str, Any]]:
        """The lines that were completed between the last call and the opening of the file."""
        if metrics is None:
            return
        self._identity = metrics.identity
        metrics.file.seek(self._offset)
        for text in metrics.file:
            if not text.endswith(b"\n") or self._offset + len(text) > metrics.length:
                return
            self._offset += len(text)
            self._number += 1
            line = self._parsed(text)
            if line.keys() >= NEEDED:
                yield line
            else:
                self.left_out += 1

    def _parsed(self, text: bytes) -> Mapping[str, Any]:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise ConfigError(f"line {self._number} of {self._path} is no JSON object: the file is damaged")
        if line.keys() >= NEEDED:
            wrong = misfit(line, METRICS_NEEDED, METRICS_KNOWN)
            if wrong is not None:
                raise ConfigError(f"line {self._number} of {self._path} is damaged: {wrong}")
        return line


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_OpenMetrics | None]:
    """The file, or None where it is not there."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        there = os.fstat(file.fileno())
        yield _OpenMetrics(file, (there.st_dev, there.st_ino), there.st_size)
