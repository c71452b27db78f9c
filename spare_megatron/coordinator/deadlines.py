"""The timers that end a job or its wait for groups, and the exit code of the coordinator for each outcome.

A timer only makes an event; the machine decides, and the decision is in the journal like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spare_megatron.config.exits import PLANNED, SIGNAL_REASON, ExitCode
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Event, StartupOver, StopRequested


class Deadlines:
    """The timers of one job attempt."""

    def __init__(self, state: Callable[[], State], decide: Callable[[Event], None], clock: Callable[[], float]) -> None:
        """``clock`` is that of the records."""
        self._state, self._decide, self._clock = state, decide, clock

    def expect_all(self, waited_s: float) -> None:
        """Let a job that forms wait for its groups for ``waited_s`` at most."""
        job_attempt = self._state().job_attempt

        def over() -> None:
            if self._state().phase == "forming" and self._state().job_attempt == job_attempt:
                self._decide(StartupOver(waited_s))

        if self._state().phase == "forming":
            asyncio.get_running_loop().call_later(waited_s, over)

    def limit_duration(self, duration_s: float, began_unix_s: float) -> None:
        """Let the job leave ``duration_s`` after ``began_unix_s`` (--exit-duration-in-mins); 0: no limit."""
        job_attempt = self._state().job_attempt

        def over() -> None:
            if self._state().job_attempt == job_attempt and self._state().phase in ("forming", "running"):
                self._decide(StopRequested(f"the job has run for {duration_s / 60:g} minutes"))

        if duration_s:
            asyncio.get_running_loop().call_later(max(0.0, began_unix_s + duration_s - self._clock()), over)


def exit_code_of(outcome: str, reason: str) -> ExitCode:
    """The exit code of the coordinator for a job that ended with this outcome and reason."""
    if outcome == "finished":
        return ExitCode.FINISHED
    if outcome == "left":
        if reason.startswith(PLANNED):
            return ExitCode.RESTART
        return ExitCode.REQUEUE if reason.startswith(SIGNAL_REASON) else ExitCode.FINISHED
    return ExitCode.WIPE_OUT if outcome == "wipe-out" else ExitCode.FAILED
