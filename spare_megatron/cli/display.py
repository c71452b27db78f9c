"""Prints for a launcher: the coordinator's lines, the ranks' notices, its own lines, which it writes into a file too,
and on a terminal a progress bar below them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from spare_megatron.monitor.status_texts import figures_line
from spare_megatron.runtime.run_directory import RunDirectory, glance


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


POLL_S = 0.25


class Display:
    """Follows the files from their present end, so that lines of an earlier job are not shown again; and only once it
    runs, so that those of another job, which has the run directory now, are not shown either."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir
        self._files = [FollowedFile(run_dir.coordinator_log), FollowedFile(run_dir.notices)]
        self._bar = _Bar() if sys.stdout.isatty() else None
        self._running = False
        self._early: list[str] = []
        """Lines of the launcher from before the run directory was its own."""

    def notice(self, text: str) -> None:
        """Print a line of the launcher itself, after the lines that the files have so far."""
        self._follow()
        self._print(text)
        self._early.append(text)
        if self._running:
            self._write()

    async def run(self) -> None:
        """Print new lines until cancelled, and then what is left: the launcher may wait for its disk after that."""
        self._running = True
        self._write()
        try:
            while True:
                self._follow()
                if self._bar is not None:
                    self._bar.show(glance(self._run_dir.status))
                await asyncio.sleep(POLL_S)
        finally:
            self._follow()

    def close(self) -> None:
        """Print the last lines and remove the bar."""
        self._follow()
        if self._bar is not None:
            self._bar.show(glance(self._run_dir.status))
            self._bar.close()

    def _write(self) -> None:
        """Write the launcher's lines into its log; where the disk fails, they are only printed."""
        lines, self._early = self._early, []
        if not lines:
            return
        with contextlib.suppress(OSError):
            self._run_dir.logs.mkdir(exist_ok=True)  # and not a run directory that was removed
            with self._run_dir.launcher_log.open("a", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in lines)

    def _follow(self) -> None:
        for file in self._files if self._running else ():
            for line in file.new_lines():
                self._print(line)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
            return
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            pass  # the reader of this output has ended; the job goes on


class _Bar:
    """A progress bar with the job's step, loss, live groups, load and number of masked failures."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("", total=None, figures="the groups are starting")
        self._progress.start()

    def show(self, status: dict[str, Any] | None) -> None:
        """Show the newest figures."""
        if status is None or status["last_step"] is None:
            return
        self._progress.update(
            self._task, completed=status["step"], total=status["last_step"], figures=figures_line(status), refresh=True
        )

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()
