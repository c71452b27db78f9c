"""Exit codes: what scripts around a job may rely on, and what a rank tells its launcher."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Of every command of the package."""

    FINISHED = 0
    """The last step was reached, or the run left at its exit interval or duration."""
    FAILED = 1
    BAD_INPUT = 2
    """Bad flags or configuration; the message names the flag, the value and the fix."""
    NO_CHECKPOINT = 3
    """Wipe-out or total loss, and no usable checkpoint to start from again."""
    REQUEUE = 4
    """Saved and left on SIGTERM or SIGUSR1; or there is a checkpoint, and whoever queued the job is to start it
    again."""
    FENCED = 10
    """Of a rank: its group is no member of the job any more."""
    WIPE_OUT = 11
    """Of a rank: too few groups are left; the job is to be started again from its last good checkpoint."""
    RESTART = 12
    """Of a coordinator: the job saved and is to be started again at once, with all groups."""
    DISK_FAILED = 13
    """Of a coordinator: it could not write its journal for too long; another one is to go on from it."""


SIGNAL_REASON = "signal"
"""Start of the reason of a stop that a signal asked for; the signal's name follows."""


def status_words(status: int) -> str:
    """How a process ended: its exit code, or minus the signal that killed it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
