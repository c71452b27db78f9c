"""One run that the page's server follows: the only reader of its directory, whoever looks and however often."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.page.frame import Frame, changes
from spare_megatron.monitor.page.run_drawing import RunDrawing
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.runtime.run_directory import RunDirectory

READING = Frame({"phase": "reading", "tone": "", "facts": (), "lines": ("the journal is read for the first time",)})


class FollowedRun:
    """A run directory, and what is shown of it."""

    def __init__(self, number: int, name: str, run_dir: RunDirectory) -> None:
        """Raises ConfigError where the directory is none of a job."""
        self.name, self.run_dir = name, run_dir
        self.trouble = ""
        """Why the directory cannot be read now; empty: it can."""
        self._number, self._files, self._drawing = number, RunFiles(run_dir), RunDrawing()
        self._picture: JobPicture | None = None
        self._at_work = threading.Lock()
        self._seen = self._shown = READING

    def look(self) -> Frame | None:
        """Look into the directory; what is seen, None where nothing is new. For one thread at a time, beside
        :meth:`figures`."""
        with self._at_work:
            try:
                self._picture = self._files.look()
                frame, self.trouble = self._drawing.frame(self._picture, self._files.now_s()), ""
            except ConfigError as error:
                self.trouble = str(error)
                frame = replace(self._seen, head={**self._seen.head, "tone": "bad", "lines": (self.trouble,)})
        is_new, self._seen = frame != self._seen, frame
        return frame if is_new else None

    def show(self, frame: Frame) -> str:
        """Show what was seen; the text of what is new in it. As :meth:`whole`, for the thread of those who look on."""
        new, self._shown = changes(self._shown, frame), frame
        return self._text(new)

    def whole(self) -> str:
        """The text of all that is shown now."""
        return self._text(changes(None, self._shown))

    def figures(self, of: Callable[[JobPicture], Any]) -> Any:
        """What ``of`` makes of the picture, while nobody adds to it; None before the first look, and where the files do
        not fit each other."""
        if self._picture is None:
            return None
        with self._at_work:
            try:
                return of(self._picture)
            except ConfigError:  # the next look says it
                return None

    def _text(self, new: dict[str, Any]) -> str:
        return json.dumps({"run": self._number, **new}, separators=(",", ":"), allow_nan=False)


def names_of(run_dirs: list[RunDirectory]) -> list[str]:
    """What the runs are called: the folder's name, or the path where two have the same; a number behind the path where
    one is given twice."""
    plain = [run_dir.path.resolve().name for run_dir in run_dirs]
    paths = [str(run_dir.path) for run_dir in run_dirs]
    names = [name if plain.count(name) == 1 else path for name, path in zip(plain, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names, 1)]
