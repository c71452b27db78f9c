"""The time-outs of the control plane, checked against each other before anything starts.

From short to long: a heartbeat interval is much shorter than the silence that counts as a death; a closed connection is
judged earlier than silence; standing still is judged later than silence, because a process that is gone should be
found by the faster test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from spare_megatron.config.errors import ConfigError


@dataclass(frozen=True)
class Timeouts:
    """The time-outs of a job, all in seconds."""

    heartbeat_interval_s: float = 0.5
    """Time between two heartbeats of a rank."""
    heartbeat_timeout_s: float = 5.0
    """--spare-heartbeat-timeout-s: silence of a rank after which it counts as dead."""
    grace_s: float = 0.5
    """Time within which the same incarnation may open a closed connection again."""
    progress_timeout_s: float = 60.0
    """--spare-progress-timeout-s: time for which a rank may stand still while others wait for it."""
    startup_timeout_s: float = 600.0
    """Time for which the first group waits for all the others."""
    coordinator_timeout_s: float = 120.0
    """Time for which a group goes on without a coordinator before it leaves."""

    @property
    def hung_s(self) -> float:
        """Time after which what stands still has hung although no other group waits for it. It is much longer than the
        progress time-out: a file system or a first compilation may be slow for all."""
        return 10 * self.progress_timeout_s

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value > 0:
                raise ConfigError(f"{_words(item.name)} is {value:g} s, but must be above 0")
        self._above("heartbeat_timeout_s", 3, "heartbeat_interval_s", "so that one late heartbeat is no death")
        self._above("heartbeat_timeout_s", 1, "grace_s", "so that a closed connection is judged before silence")
        self._above("progress_timeout_s", 1, "heartbeat_timeout_s", "so that a dead rank is not taken for a slow one")
        self._above("startup_timeout_s", 1, "heartbeat_timeout_s", "so that groups may arrive one after the other")
        self._above("coordinator_timeout_s", 2, "heartbeat_timeout_s", "so that a coordinator has time to come back")

    def _above(self, name: str, factor: int, other: str, why: str) -> None:
        value, least = getattr(self, name), factor * getattr(self, other)
        if value <= least:
            times = f"{factor} x " if factor > 1 else ""
            raise ConfigError(
                f"{_words(name)} {value:g} s must be above {times}{_words(other)} {getattr(self, other):g} s, {why}; "
                f"use more than {least:g}"
            )


_FLAGS = {"heartbeat_timeout_s": "--spare-heartbeat-timeout-s", "progress_timeout_s": "--spare-progress-timeout-s"}


def _words(name: str) -> str:
    return _FLAGS.get(name, name.removesuffix("_s").replace("_", " "))


def timeouts_from(heartbeat_timeout_s: float | None = None, progress_timeout_s: float | None = None) -> Timeouts:
    """All time-outs for those that the user gave; the others follow from the heartbeat time-out."""
    usual = Timeouts()
    heartbeat = usual.heartbeat_timeout_s if heartbeat_timeout_s is None else heartbeat_timeout_s
    progress = max(usual.progress_timeout_s, 12 * heartbeat) if progress_timeout_s is None else progress_timeout_s
    return Timeouts(
        heartbeat_interval_s=min(usual.heartbeat_interval_s, heartbeat / 10),
        heartbeat_timeout_s=heartbeat,
        grace_s=min(usual.grace_s, heartbeat / 4),
        progress_timeout_s=progress,
        startup_timeout_s=max(usual.startup_timeout_s, 2 * heartbeat),
        coordinator_timeout_s=max(usual.coordinator_timeout_s, 6 * heartbeat),
    )
