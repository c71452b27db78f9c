"""How much memory of this host processes can still have. Imports nothing."""

from __future__ import annotations

from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """The memory that new processes can have: of the host, and of the control group of this process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    known = {line.split(":")[0]: line.split()[1] for line in lines}
    host = int(known["MemAvailable"]) << 10
    try:
        name = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):  # no control groups of version 2
        return host
    inner = CONTROL_GROUPS / name.strip("/")
    above = [one for one in inner.parents if one.is_relative_to(CONTROL_GROUPS)]
    return min([host, *(left for one in (inner, *above) if (left := _left_in(one)) is not None)])


def _left_in(group: Path) -> int | None:
    """What a control group has left of its memory, caches of files not counted; None where it has no limit."""
    try:
        most = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["active_file"]) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
    return most - used
