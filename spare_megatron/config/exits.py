"""Exit codes, on which scripts around a job may rely and by which a rank tells its launcher how it ended."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of all commands of the package."""

    FINISHED = 0
    """The last step was reached, or the run left at its exit interval or duration."""
    FAILED = 1
    BAD_INPUT = 2
    """Bad flags or configuration; the message names the flag, the value and the fix."""
    NO_CHECKPOINT = 3
    """The job was wiped out or lost all groups, and there is no usable checkpoint to start again from."""
    REQUEUE = 4
    """The job left on a signal, and saved with --save, or it failed and has a checkpoint: it should be queued again."""
    FENCED = 10
    """A rank left because its group is no member of the job any more."""
    WIPE_OUT = 11
    """A rank or the coordinator left after a wipe-out; the job should be started again from its last good
    checkpoint."""
    RESTART = 12
    """The coordinator left after the job saved; the job should be started again at once, with all groups."""
    DISK_FAILED = 13
    """The coordinator could not write its journal for too long; another one should go on from it."""


SIGNAL_REASON = "signal"
"""How the reason of a stop begins that a signal asked for; the signal's name follows."""
PLANNED = "planned restart"
"""How the reason begins with which a job attempt ends when another one with all groups is to follow."""


def status_words(status: int) -> str:
    """How a process ended, in words; ``status`` is its exit code, or minus the number of the signal that killed it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
