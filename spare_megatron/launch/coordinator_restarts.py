"""Decides how often a launcher starts the coordinator again.

Pure: the time is an argument. A job attempt lasts for months where lost groups come back, so only what a short time
brings counts: within any COORDINATOR_WITHIN_S at most COORDINATOR_RESTARTS restarts are granted.
"""

from __future__ import annotations

COORDINATOR_RESTARTS = 8
COORDINATOR_WITHIN_S = 3600.0


class CoordinatorRestarts:
    """The restarts of the coordinator in one job attempt."""

    def __init__(self) -> None:
        self._granted_s: list[float] = []

    def another(self, now_s: float) -> bool:
        """Whether one more may begin at ``now_s``; it is counted if so."""
        self._granted_s = [at_s for at_s in self._granted_s if at_s > now_s - COORDINATOR_WITHIN_S]
        if len(self._granted_s) >= COORDINATOR_RESTARTS:
            return False
        self._granted_s.append(now_s)
        return True
