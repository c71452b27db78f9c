"""What a life of a job leaves in its run directory for whoever decides what follows it.

May assume: none of the life's processes writes there any more, except a coordinator that waits for the decision.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from spare_megatron.config.exits import ExitCode
from spare_megatron.control.disk import patiently
from spare_megatron.control.run_directory import RunDirectory, glance, read_json
from spare_megatron.launch.restart_checkpoint import checkpoint_to_start_from
from spare_megatron.launch.restart_policy import EndedLife, Obstacles, is_failure, needs_checkpoint

LINES_SHOWN = 12
"""Of a log, to the user."""


def forget_last_life(run_dir: RunDirectory) -> None:
    """Remove what the life that begins now would be judged by if it left nothing itself."""
    for path in (run_dir.summary, run_dir.status):
        patiently(partial(path.unlink, missing_ok=True))
    shutil.rmtree(run_dir.errors, ignore_errors=True)


def code_of(status: int) -> ExitCode:
    """The exit code that a coordinator left with; one that is none of ours is a failure."""
    try:
        return ExitCode(status)
    except ValueError:
        return ExitCode.FAILED


def ended_life(
    run_dir: RunDirectory,
    code: ExitCode,
    why_failed: Callable[[], str],
    directories: Sequence[str],
    idle_lives: int,
    told: Callable[[str], None],
) -> EndedLife:
    """The life as the summary and the checkpoints show it, without obstacles and as if nobody had told the launcher to
    stop: these it knows itself. ``why_failed`` is asked where the summary gives no reason for a failure; ``told`` gets
    a sentence for each damaged checkpoint. Waits for a disk that fails for a while.
    """
    summary = patiently(lambda: read_json(run_dir.summary)) or {}
    reason = str(summary.get("reason", ""))
    if not reason and is_failure(code):
        reason = why_failed()
    checkpoint = None
    if needs_checkpoint(code):
        checkpoint = patiently(partial(checkpoint_to_start_from, run_dir, directories, told))
    return EndedLife(
        code=code,
        reason=reason,
        committed=bool(summary.get("steps", 0) > summary.get("first_step", 0)),
        idle_lives=idle_lives,
        checkpoint=None if checkpoint is None else str(checkpoint),
        looked_in=tuple(directories),
        stop_requested=bool(summary.get("stop_signal")),
        obstacles=Obstacles(),
    )


def tail(path: Path, lines: int) -> str:
    """The last lines of a file; empty where it cannot be read."""
    try:
        return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError:
        return ""


def end_of_first(paths: Iterable[Path], otherwise: str) -> str:
    """The end of the first of these files that has any text, with its name; ``otherwise`` where none has."""
    for path in paths:
        text = tail(path, LINES_SHOWN)
        if text:
            return f"the end of {path}:\n{text}"
    return otherwise


def refusal_of_coordinator(run_dir: RunDirectory) -> str:
    """The sentence with which a coordinator refused a user's error."""
    return tail(run_dir.coordinator_errors, 1).removeprefix("spare-coordinator: ")


def live_groups(run_dir: RunDirectory) -> list[int]:
    """Groups that were alive at the life's end; none where that is not known now."""
    return [int(group) for group in (glance(run_dir.summary) or {}).get("live_groups", [])]
