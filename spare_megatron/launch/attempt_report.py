"""Reads how a job attempt ended from its run directory, for the decision on what follows it.

May assume: no process of the job attempt writes there any more, except a coordinator that waits for the decision.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane.exit_report import ExitReport, read_exit_reports
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints, checkpoint_to_start_from
from spare_megatron.launch.restart_policy import EndedAttempt, JobProgress, Obstacles, is_failure, needs_checkpoint
from spare_megatron.runtime.directory_watch import gone_text
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import RunDirectory, glance, read_json, write_json

_ELSEWHERE = re.compile(r"closed by peer|[Cc]onnection reset|Broken pipe|[Rr]emote (process|peer)|DistNetworkError")
"""Errors of torch's collectives and stores where the process at the other end is gone."""
LINES_SHOWN = 12
"""How many lines of a log the user is shown."""


def forget_last_attempt(run_dir: RunDirectory) -> None:
    """Remove the last job attempt's records, by which the job attempt that begins now would be judged if it wrote none
    itself."""
    for path in (run_dir.ended, run_dir.summary, run_dir.status):
        with_retries(partial(path.unlink, missing_ok=True))
    shutil.rmtree(run_dir.errors, ignore_errors=True)


def note_end(run_dir: RunDirectory, code: ExitCode) -> None:
    """Note that the launcher leaves and starts no other job attempt: whoever looks at the job cannot know it from how
    the last one ended. Raises OSError."""
    write_json(run_dir.ended, {"code": int(code)})


def code_of(status: int) -> ExitCode:
    """The exit code of a coordinator; one that is not in ExitCode is a failure."""
    try:
        return ExitCode(status)
    except ValueError:
        return ExitCode.FAILED


def ended_attempt(
    run_dir: RunDirectory,
    code: ExitCode,
    why_failed: Callable[[], str],
    flags: LauncherFlags,
    *,
    own: OwnCheckpoints,
    groups: int,
    before: JobProgress,
    reported: Callable[[str], None],
    killed: Collection[int] = (),
) -> EndedAttempt:
    """The job attempt as its summary and the checkpoints show it. Waits for a disk that fails for a while.

    An exit code alone is no proof that a job is finished: its coordinator has to have said so as well.

    However it ended, a checkpoint that counts gets its name first: where no other job attempt follows, nobody else
    would give it.

    The launcher adds what only it knows: obstacles, and that it was asked to stop itself.

    Args:
        why_failed: called where the summary gives no reason for a failure.
        own: the checkpoints of the job.
        groups: how many groups the job has.
        before: how far the job attempts before this one have come.
        reported: called with a sentence for each damaged checkpoint, and where one that counts cannot get its name.
        killed: groups of which a signal has ended the first process, as far as the launcher saw it.
    """
    summary = with_retries(lambda: read_json(run_dir.summary)) or {}
    reason = str(summary.get("reason", ""))
    if code is ExitCode.FINISHED and summary.get("outcome") not in ("finished", "left"):
        code = ExitCode.FAILED
        reason = f"the coordinator left with exit code 0 and never said that the job is finished; see {run_dir.logs}"
    if not reason and is_failure(code):
        reason = why_failed()
    words = own_ends(run_dir, groups, killed) if needs_checkpoint(code) or is_failure(code) else []
    if words:
        reason = f"every group ended by an error of its own, first {words[0].who}: {words[0].error}"
    checkpoint = None
    own.publish(flags, reported)
    if needs_checkpoint(code):
        saved_step = own.newest_step(flags.save_dir)
        checkpoint = with_retries(partial(checkpoint_to_start_from, flags, saved_step, reported))
    return EndedAttempt(
        code=code,
        reason=reason,
        first_step=int(summary.get("first_step", 0)),
        reached=int(summary.get("steps", 0)),
        before=before,
        checkpoint=None if checkpoint is None else str(checkpoint),
        looked_in=tuple(filter(None, (flags.save_dir, flags.load_dir))),
        stop_requested=bool(summary.get("stop_signal")),
        obstacles=Obstacles(),
        own_end=words[0].shown if words else "",
    )


def own_ends(run_dir: RunDirectory, groups: int, killed: Collection[int]) -> list[ExitReport]:
    """What the ranks of a job attempt said of the exceptions that ended them, the earliest first, where each of so many
    groups ended by one; else nothing, because something else than the user's code may have ended the job. An exception
    that only tells of another rank's end counts for nothing."""
    there = sorted(read_exit_reports(run_dir.errors), key=lambda one: one.time_unix_s)
    words = [one for one in there if one.group not in killed and not _ELSEWHERE.search(one.error)]
    return words if len({one.group for one in words}) >= groups else []


def tail(path: Path, lines: int) -> str:
    """The last lines of a file; empty where it cannot be read."""
    try:
        return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError:
        return ""


def end_of_first(paths: Iterable[Path], otherwise: str) -> str:
    """The name and the last lines of the first of ``paths`` that has any text; ``otherwise`` where none has."""
    for path in paths:
        text = tail(path, LINES_SHOWN)
        if text:
            return f"the end of {path}:\n{text}"
    return otherwise


def refusal_of_coordinator(run_dir: RunDirectory) -> str:
    """The sentence in which a coordinator has reported a user's error. It may be gone with the run directory, which is
    such an error too."""
    reported = tail(run_dir.coordinator_errors, 1).removeprefix("spare-coordinator: ")
    if reported or run_dir.coordinator_errors.exists():
        return reported or f"the coordinator left with exit code {int(ExitCode.BAD_INPUT)}; see {run_dir.logs}"
    return gone_text(run_dir.path)


def is_users_error(number: int, groups: int, first_exits: Iterable[int]) -> bool:
    """Whether bad input that a group finds at its first start in a job attempt is the user's error, which ends the job.
    ``first_exits``: how the first process of each group ended that has lost one. Where an earlier job attempt has
    trained with the same command, it is one only if all groups find it: else the group's host has changed."""
    return number == 1 or sum(status == ExitCode.BAD_INPUT for status in first_exits) == groups


def live_groups(run_dir: RunDirectory) -> list[int]:
    """The groups that were live at the end of the job attempt; empty where that cannot be read."""
    return [int(group) for group in (glance(run_dir.summary) or {}).get("live_groups", [])]
