"""How many standbys of a job wait for a place, from its run directory: the coordinator does not know them."""

from __future__ import annotations

from collections.abc import Mapping

from spare_megatron.config.plural import counted
from spare_megatron.runtime.run_directory import RunDirectory, glance


def waiting_counts(run_dir: RunDirectory) -> dict[str, int]:
    """The number that wait as 'standby', that of those that are about to as 'standby starts', and that of those which
    get no place because a signal has stopped a process of them as 'standby stopped'; only those of which there are
    any."""
    there: dict[str, list[str]] = {}
    for one in (glance(run_dir.processes) or {}).get("waiting", ()):
        waits = "" if run_dir.waits(one["name"], one["pid"]) else " starts"
        there.setdefault(one["name"], []).append(" stopped" if one.get("stopped") else waits)
    found: dict[str, int] = {}
    for name, how in there.items():
        kind = name.partition("-")[0] + max(how)  # the last of these three in the order of the alphabet
        found[kind] = found.get(kind, 0) + 1
    return found


def waiting_text(counts: Mapping[str, int]) -> str:
    """One line on them; empty where there are none."""
    waits, starts, stopped = (counts.get(f"standby{how}", 0) for how in ("", " starts", " stopped"))
    if not (waits or starts or stopped):
        return ""
    some = f"{counted(waits, 'standby')} wait{'s' if waits == 1 else ''} for a place"
    some += f", {starts} more start{'s' if starts == 1 else ''}" if starts else ""
    return some + (f", {stopped} {'is' if stopped == 1 else 'are'} stopped by a signal" if stopped else "")
