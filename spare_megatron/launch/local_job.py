"""The job that spare-launch was asked to start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.runtime.run_directory import RunDirectory


@dataclass(frozen=True)
class Launch:
    """A job to start on this machine, and how."""

    num_groups: int
    group_size: int
    run_dir: RunDirectory
    command: tuple[str, ...]
    """The command line of one rank."""
    flags: LauncherFlags = field(default_factory=LauncherFlags)
    """What the flags of a rank say to its launcher; of ``group_size``, that above counts."""
    injections: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"
    tls_dir: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
