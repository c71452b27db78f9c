"""Kills what is left of a lost group on this host, before the group is started again here: run on each of its nodes.

    python -m spare_megatron.launch.group_sweep RUN_DIR GROUP GROUP_SIZE INCARNATION

Ranks are known by the environment that their launcher gave them. Those of the group's incarnations up to INCARNATION
are killed, stopped ones too. Leaves with 0 when none is left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import place_of

END_S = 10.0
"""How long the killed processes have to end."""
LOOK_S = 0.05


def is_of(environ: Mapping[str, str], run_dir: str, group: int, size: int, incarnation: int) -> bool:
    """Whether a process with this environment is a rank of such an incarnation of the group, or was started by one.

    srun has the variables of the ranks that it starts, but not that of their step; a batch script and its coordinators
    have no incarnation."""
    if environ.get("SPARE_RUN_DIR") != run_dir or not {"SPARE_INCARNATION", "SLURM_STEP_ID"} <= environ.keys():
        return False
    try:
        place = place_of(environ, group + 1, size, None)
    except ConfigError:  # a rank of a later group, or no rank
        return False
    return place.launcher == "slurm" and place.group == group and place.incarnation <= incarnation


def left(run_dir: str, group: int, size: int, incarnation: int) -> list[int]:
    """The processes of this host that are such ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                # a zombie has no environment any more
                raw = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            environ = dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)
            if is_of(environ, run_dir, group, size, incarnation):
                found.append(int(entry.name))
    return found


def main(words: list[str]) -> int:
    """Run the command; returns its exit code."""
    run_dir, (group, size, incarnation) = words[0], map(int, words[1:])
    deadline_s = time.monotonic() + END_S
    while pids := left(run_dir, group, size, incarnation):
        if time.monotonic() > deadline_s:
            print(f"processes {', '.join(map(str, pids))} of group {group} do not end")
            return 1
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(LOOK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
