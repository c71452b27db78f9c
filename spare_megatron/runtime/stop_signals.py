"""The signals that ask a job to save and leave, for every process that may receive them.

Whoever wants a job to leave signals what it knows: the launcher, its process group, all processes of a control group or
of a Slurm step (systemd, ``scancel``, ``--signal``, LSF's ``bkill``), often more than once (``timeout`` signals its
child and then the child's group). So launchers, coordinators and ranks take each of these signals as the same request,
helper processes ignore them, and a repeat within :data:`REPEAT_S` is no second request.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
REPEAT_S = 1.0
"""Signals that come within this time of the first one are the same request."""
TWICE = f"a second signal, {REPEAT_S:g} s later or more, ends it at once"


def usual_signals() -> None:
    """Undo two things that a process may have inherited over ``exec``: an ignored SIGCHLD, with which the kernel throws
    the exit codes of children away (Python then reports 0), and blocked signals. For the start of a command, in the
    main thread."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to leave: all of :data:`STOP_SIGNALS`, without SIGHUP where it is ignored, as
    nohup has it."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (nohup and number == signal.SIGHUP))


def ignore_stop_signals() -> None:
    """For a helper process whose parent decides when it ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def hold_stop_signals() -> None:
    """Block these signals in this thread, at the end of a process: an event loop that is closed sets their handlers
    back, and the last things that it does would be cut off."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@dataclass
class SignalledStop:
    """What a launcher was asked to do by signals so far."""

    clock: Callable[[], float] = time.monotonic
    reason: str = field(default="", init=False)
    """Why the job is to leave; empty as long as nobody has asked for it."""
    _first_s: float = field(default=0.0, init=False)

    def take(self, reason: str) -> bool:
        """Note one signal; returns whether it is a second request, by somebody who does not want to wait."""
        now_s = self.clock()
        if not self.reason:
            self.reason, self._first_s = reason, now_s
            return False
        return now_s - self._first_s >= REPEAT_S
