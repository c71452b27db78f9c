"""Writes to the boards (TensorBoard, W&B, OpenTelemetry) in a thread of its own: they are slow to start, and fail."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spare_megatron.config.job import JobDescription
from spare_megatron.metrics.boards import Boards

PAUSE_S = 10.0
"""How long after a failure the boards are opened again at the earliest."""


class BoardThread:
    """The boards of a job. Methods return at once, but :meth:`close`."""

    def __init__(self, run_dir: Path, announce: Callable[[str], None]) -> None:
        self._run_dir, self._announce, self._job = run_dir, announce, JobDescription()
        self._boards: Boards | None = None
        self._again_s = 0.0
        """Monotonic time at which boards that failed may be opened again; 0: they have not failed."""
        self._worker = ThreadPoolExecutor(1, "spare-boards")

    def begin(self, job: JobDescription) -> None:
        """A job attempt begins."""
        self._job = job
        self._worker.submit(self._open)

    def do(self, write: Callable[[Boards], None]) -> None:
        """Let the boards be written to, if the job has any."""
        if self._job.has_boards:
            self._worker.submit(self._write, write)

    def close(self) -> None:
        """Write what is left, and close the boards."""
        self._worker.submit(self._close)
        self._worker.shutdown(wait=True)

    def _open(self) -> None:
        if self._boards is not None and self._boards.job == self._job:
            return  # another job attempt of the same job
        self._close()
        try:
            self._boards = Boards(self._job, self._run_dir)
        except Exception as error:
            self._fail(error)

    def _write(self, write: Callable[[Boards], None]) -> None:
        if self._boards is None and time.monotonic() >= self._again_s:
            self._open()
        if self._boards is None:
            return
        try:
            write(self._boards)
            if self._again_s:
                self._announce("the boards are written again")
            self._again_s = 0.0
        except Exception as error:
            self._close()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Note that the boards failed, which is reported once, and when to try again. They are third-party code with
        files and connections of its own, so any exception is possible."""
        if not self._again_s:
            self._announce(f"the boards fail: {error!r}; the job goes on, metrics.jsonl has all of it")
        self._again_s = time.monotonic() + PAUSE_S

    def _close(self) -> None:
        boards, self._boards = self._boards, None
        if boards is not None:
            with contextlib.suppress(Exception):
                boards.close()
