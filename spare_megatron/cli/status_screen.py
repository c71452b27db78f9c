"""What spare-status --watch shows: a screen on a terminal; else each change as a line, for a log or a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spare_megatron.config.errors import ConfigError
from spare_megatron.monitor.durations import duration
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.job_texts import (
    clock,
    effective_text,
    happenings,
    left_out_text,
    parts_shown,
    share,
    wall_time_line,
)
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.monitor.speed_texts import speed_lines
from spare_megatron.monitor.status_texts import head_lines, learners, loads, outlook, places, quiet_text, standbys
from spare_megatron.monitor.wall_time import PARTS

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
    changes, trouble = StatusChanges(), ""
    for found in looks(files, picture):
        before, trouble = trouble, str(found) if isinstance(found, ConfigError) else ""
        if isinstance(found, ConfigError):
            lines: Iterable[str] = [trouble] if trouble != before else ()
        else:
            lines = changes.lines(found, files.now_s())
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class StatusChanges:
    """Finds what has changed since it was asked last."""

    def __init__(self) -> None:
        self._head = ""
        self._listed = 0
        """Number of events that were reported."""
        self._quiet = False

    def lines(self, picture: JobPicture, now_unix_s: float) -> Iterator[str]:
        """Events, each once; the status where it shows something new; that the coordinator writes nothing, and that it
        does again; at the end where the time went. ``now_unix_s``: seconds since 1970."""
        listed = happenings(picture)
        for one in listed[self._listed :]:
            yield f"{_time_of_day(one.time_s)} {one.text}"
        self._listed = len(listed)
        status = picture.status
        head = ", ".join(head_lines(status)) if status else ""
        if head != self._head:
            yield f"{_time_of_day(status['time_unix_s'])} {head}"
        self._head = head
        quiet = quiet_text(picture.quiet_s(now_unix_s))
        if bool(quiet) != self._quiet:
            self._quiet = bool(quiet)
            yield f"{_time_of_day(now_unix_s)} {quiet or 'the coordinator writes again'}"
        if picture.is_over:
            yield from (
                text for text in (wall_time_line(picture.wall_time()), left_out_text(picture.lines_left_out)) if text
            )


def _time_of_day(time_unix_s: float) -> str:
    return clock(time_unix_s).partition(" ")[2]


HAPPENINGS_SHOWN = 8


def watch(files: RunFiles) -> None:
    """Show the job until it ends, or until Ctrl-C: as a screen, or where standard output is no terminal, each change as
    a line. Raises ConfigError as :meth:`RunFiles.look` where nothing can be shown; what fails later is shown, and tried
    again."""
    picture = files.look()
    with contextlib.suppress(KeyboardInterrupt):
        if not sys.stdout.isatty():
            follow(files, picture)
            return
        with Live(auto_refresh=False) as live:
            for found in looks(files, picture):
                live.update(
                    Text(str(found)) if isinstance(found, ConfigError) else screen(found, files.now_s()), refresh=True
                )


def screen(picture: JobPicture, now_unix_s: float) -> RenderableType:
    """All that is shown; ``now_unix_s``: seconds since 1970."""
    lines = list(_status_lines(picture.status)) if picture.status else ["no step has begun yet"]
    said = quiet_text(picture.quiet_s(now_unix_s)), left_out_text(picture.lines_left_out)
    lines += [text for text in said if text]
    shown: list[RenderableType] = [Text(line) for line in lines]
    wall_time = picture.wall_time()
    head = effective_text(wall_time)
    if head:
        table = Table(title=head, title_justify="left", box=None, show_header=False, pad_edge=False)
        for part in parts_shown(wall_time):
            seconds = Text(duration(wall_time.parts[part]), justify="right")
            table.add_row(PARTS[part], seconds, share(wall_time.share(part)))
        shown += [Text(), table]
    listed = Table(box=None, show_header=False, pad_edge=False)
    for one in happenings(picture)[-HAPPENINGS_SHOWN:]:
        listed.add_row(clock(one.time_s).partition(" ")[2], Text(one.text))
    return Group(*shown, Text(), listed)


def _status_lines(status: Mapping[str, Any]) -> Iterable[str]:
    yield from head_lines(status)
    yield from loads(status)
    yield from (f"  {learner} is brought up to date" for learner in learners(status))
    yield from places(status)
    yield from speed_lines(status)
    yield from standbys(status)
    yield from outlook(status)
