"""How many standbys of a job wait for a place, from its run directory: the coordinator does not know them."""

from __future__ import annotations

from collections.abc import Mapping

from spare_megatron.config.plural import counted
from spare_megatron.runtime.run_directory import RunDirectory, glance


def waiting_counts(run_dir: RunDirectory) -> dict[str, int]:
    """The number that wait as 'standby', and that of those that are about to as 'standby starts'; only those of which
    there are any."""
    there: dict[str, bool] = {}
    for one in (glance(run_dir.processes) or {}).get("waiting", ()):
        there[one["name"]] = there.get(one["name"], True) and run_dir.waits(one["name"], one["pid"])
    found: dict[str, int] = {}
    for name, waits in there.items():
        kind = name.partition("-")[0] + ("" if waits else " starts")
        found[kind] = found.get(kind, 0) + 1
    return found


def waiting_text(counts: Mapping[str, int]) -> str:
    """One line on them; empty where there are none."""
    waits, starts = counts.get("standby", 0), counts.get("standby starts", 0)
    if not waits and not starts:
        return ""
    some = f"{counted(waits, 'standby')} wait{'s' if waits == 1 else ''} for a place"
    return some + (f", {starts} more start{'s' if starts == 1 else ''}" if starts else "")
