"""What a job leaves to be decided while it runs: told to the coordinator by the first group, beside its figures.

Plain values only: it crosses the wire as JSON and is kept in the run directory, like the rest of the description.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Defaults: nothing is decided."""

    save_interval: bool = False
    """--save-interval auto."""
    redundancy: bool = False
    """--spare-redundancy auto: chosen for the next start, from what the first steps and a save cost."""
    restart_after: int | None = 0
    """--spare-restart-after: losses after which the job saves and starts again with all groups; None: auto, 0:
    never."""
    mtbf_gpu_hours: float | None = None
    """--spare-mtbf-gpu-hours; None: the default."""
    group_size: int = 1
    shared_data: bool = False
    groups_return: bool = False
    """Lost groups are started again while the job runs."""
    standby_groups: int = 0
    can_restart: bool = False
    """Whoever started the job starts it again when it says so, and there is a directory to save in."""
