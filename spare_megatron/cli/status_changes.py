"""What spare-status --watch prints where standard output is no terminal: each change as a line, for a log or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from spare_megatron.config.errors import ConfigError
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.job_texts import clock, happenings, left_out_text, wall_time_line
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.monitor.status_texts import head_lines

EVERY_S = 1.0


def looks(files: RunFiles, picture: JobPicture) -> Iterator[JobPicture | ConfigError]:
    """The picture, then what each further look finds, or why it fails; the last one is of a job that is over."""
    yield picture
    while not picture.is_over:
        time.sleep(EVERY_S)
        try:
            picture = files.look()
        except ConfigError as error:
            yield error
        else:
            yield picture


def follow(files: RunFiles, picture: JobPicture) -> None:
    """Print the changes until the job is over."""
    changes = StatusChanges()
    for found in looks(files, picture):
        for line in [str(found)] if isinstance(found, ConfigError) else changes.lines(found):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class StatusChanges:
    """Finds what has changed since it was asked last."""

    def __init__(self) -> None:
        self._head = ""
        self._listed = 0
        """Number of events that were reported."""

    def lines(self, picture: JobPicture) -> Iterator[str]:
        """Events, each once; the status where it shows something new; at the end where the time went."""
        listed = happenings(picture)
        for one in listed[self._listed :]:
            yield f"{_time_of_day(one.time_s)} {one.text}"
        self._listed = len(listed)
        status = picture.status
        head = ", ".join(head_lines(status)) if status else ""
        if head != self._head:
            yield f"{_time_of_day(status['time_unix_s'])} {head}"
        self._head = head
        if picture.is_over:
            yield from (
                text for text in (wall_time_line(picture.wall_time()), left_out_text(picture.lines_left_out)) if text
            )


def _time_of_day(time_unix_s: float) -> str:
    return clock(time_unix_s).partition(" ")[2]
