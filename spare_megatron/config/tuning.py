"""The settings that a job chooses while it runs; the first group sends them to the coordinator with the description.

Plain values only, because they are sent as JSON and kept in the run directory, as the rest of the description.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Which settings are to be chosen, and the figures for it. With the defaults nothing is chosen."""

    save_interval: bool = False
    """--save-interval is auto."""
    redundancy: bool = False
    """--spare-redundancy is auto: it is chosen for the next start, from the costs of the first steps and of a save."""
    restart_after: int | None = 0
    """--spare-restart-after: number of lost groups after which the job saves and restarts with all groups; None: auto,
    0: never."""
    mtbf_gpu_hours: float | None = None
    """--spare-mtbf-gpu-hours; None: the default."""
    group_size: int = 1
    shared_data: bool = False
    groups_return: bool = False
    """Lost groups are restarted while the job runs."""
    standby_groups: int = 0
    adopt_s: float | None = None
    """--spare-adopt-timeout-s: the longest that groups take to open a shard that they adopt; None with
    --spare-no-adoption."""
    can_restart: bool = False
    """The launcher starts the job again when it asks for it, and there is a directory to save in."""
