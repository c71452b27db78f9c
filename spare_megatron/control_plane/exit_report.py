"""The exit report of a rank: the exception that ends it, from which the launcher tells why the job ended.

A rank writes it into the run directory before its connections close. So it is there however long Python takes to end,
and wherever the rank's log is. A new incarnation of a rank removes the report of the older one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import Place
from spare_megatron.runtime.file_shapes import number, text, whole
from spare_megatron.runtime.run_directory import RunDirectory

LINES = 12
"""How many lines of a traceback are kept: the end, where the exception is."""


@dataclass(frozen=True)
class ExitReport:
    """What one rank reported."""

    group: int
    incarnation: int
    position: int
    time_unix_s: float
    error: str
    """The exception in one line: its class and its text."""
    lines: str
    """The end of the traceback."""
    log: str
    """The file with the rank's whole output; empty where that is not known."""

    @property
    def who(self) -> str:
        """'group 2 (rank 1)'."""
        return f"group {self.group} (rank {self.position})"

    @property
    def shown(self) -> str:
        """The end of the traceback, and where the rest is."""
        return (f"the end of {self.log}:\n" if self.log else "") + self.lines


@contextlib.contextmanager
def exit_reported(run_dir: RunDirectory, place: Place) -> Iterator[None]:
    """Inside this context an exception that is no user's error (which has a way of its own) is written to the run
    directory before it goes on. Where the disk fails it is in the rank's log alone, as is that of a process which began
    as a standby: it was of no group then, and has a context of its own once it has a place."""
    if place.place_file:
        yield
        return
    log = run_dir.log_of(place.group, place.position, place.incarnation if place.restarts else None)
    folder = run_dir.errors
    mine = f"group-{place.group}-rank-{place.position}.words.json"
    with contextlib.suppress(OSError):
        (folder / mine).unlink(missing_ok=True)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        shown = "".join(traceback.format_exception(error)).rstrip().splitlines()[-LINES:]
        text = " ".join(str(error).split())
        reported = ExitReport(
            place.group,
            place.incarnation,
            place.position,
            time.time(),
            error=type(error).__name__ + (f": {text}" if text else ""),
            lines="\n".join(shown),
            log=str(log) if log.is_file() else "",
        )
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            scratch = folder / f".{mine}.{os.getpid()}"
            scratch.write_text(json.dumps(asdict(reported)))
            scratch.replace(folder / mine)
        raise


def read_exit_reports(folder: Path) -> list[ExitReport]:
    """What the ranks of the present job attempt have said; what cannot be read is left out."""
    found = []
    for path in sorted(folder.glob("*.words.json")) if folder.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, TypeError):
            one = ExitReport(**json.loads(path.read_text()))
            if (
                all(map(whole, (one.group, one.incarnation, one.position)))
                and number(one.time_unix_s)
                and all(map(text, (one.error, one.lines, one.log)))
            ):
                found.append(one)
    return found
