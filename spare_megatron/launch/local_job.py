"""The job that spare-launch was asked to start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from spare_megatron.launch.group_restarts import FIRST_PAUSE_S
from spare_megatron.runtime.run_directory import RunDirectory


@dataclass(frozen=True)
class Launch:
    """A job to start on this machine, and how."""

    num_groups: int
    group_size: int
    run_dir: RunDirectory
    command: tuple[str, ...]
    """The command line of one rank."""
    injections: tuple[str, ...] = ()
    checkpoint_dirs: tuple[str, ...] = ()
    """Directories with checkpoints to start again from, in the order in which they are searched."""
    max_group_restarts: int = 0
    """How often one lost group is started again within an hour; 0: it stays lost."""
    group_restart_pause_s: float = FIRST_PAUSE_S
    """How long the second restart of a group within an hour waits."""
    standby_groups: int = 0
    """Groups that wait for the places of lost ones."""
    preload: str = ""
    """Further modules that ranks need not import, separated by commas; 'none': they import everything themselves."""
    pipeline: int = 1
    """Pipeline stages of a group."""
    listen: str = "127.0.0.1:0"
    tls_dir: str = ""
    save_dir: str = ""
    """Where checkpoints are written; empty: nowhere."""
    health_check: str = ""
    """The user's command before a lost group is started again; empty: none."""
    on_event: str = ""
    """The operator's command, which the coordinator runs for each event."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
