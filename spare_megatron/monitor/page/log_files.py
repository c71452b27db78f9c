"""The logs of a run directory that the page shows the end of.

A name that a browser sends is never made a path: it is looked for among those that the directory lists, whose paths,
links followed, are below its logs.
"""

from __future__ import annotations

import re
from pathlib import Path

from spare_megatron.runtime.run_directory import RunDirectory

END_BYTES = 32 << 10
RANK_LOG = re.compile(r"rank-(\d+)(?:\.incarnation-(\d+))?\.log")


def job_logs(run_dir: RunDirectory) -> dict[str, Path]:
    """Name -> file of the logs that are of no group."""
    files = (run_dir.coordinator_log, run_dir.launcher_log, run_dir.notices, run_dir.coordinator_errors)
    return {path.name: path for path in files if _is_below(path, run_dir.logs)}


def group_logs(run_dir: RunDirectory, group: int) -> dict[str, Path]:
    """Name -> file of the logs of a group's ranks, by incarnation, the newest first, and position."""
    folder = run_dir.log_of(group, 0).parent
    try:
        paths = [path for path in folder.iterdir() if RANK_LOG.fullmatch(path.name) and _is_below(path, run_dir.logs)]
    except OSError:
        return {}
    return {path.name: path for path in sorted(paths, key=_place)}


def end_of(path: Path) -> str:
    """The last lines of a log. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(max(0, length - END_BYTES))
        text = file.read(END_BYTES).decode("utf-8", errors="replace")
    return text if length <= END_BYTES else text.partition("\n")[2]


def _is_below(path: Path, logs: Path) -> bool:
    """Under Slurm the names of ranks are links to files below the logs."""
    try:
        real = path.resolve(strict=True)
        return real.is_file() and real.is_relative_to(logs.resolve())
    except (OSError, RuntimeError):  # RuntimeError: Python 3.11 and 3.12 say so of a circle of links
        return False


def _place(path: Path) -> tuple[int, int]:
    found = RANK_LOG.fullmatch(path.name)
    assert found is not None
    return -int(found[2] or 0), int(found[1])
