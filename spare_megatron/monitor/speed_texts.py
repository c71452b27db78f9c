"""Which groups are slow, and what was taken from them, as text; from the content of status.json. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spare_megatron.config.plural import counted
from spare_megatron.monitor.group_numbers import numbered_groups

SLOW = 0.75
"""A group below this speed is slow; the median group's is 1."""
SHOWN_MAX = 5
"""So many slow groups are named one by one."""


def speed_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines on slow groups, each with its rank that is furthest behind, and on the last step in which pieces moved; an
    older version's status says nothing of either."""
    if status["phase"] != "running":
        return
    members = {group: one for group, one in status.get("groups", {}).items() if group in status["live"]}
    slow = sorted((one["speed"], int(group)) for group, one in members.items() if one.get("speed", SLOW) < SLOW)
    relieved = status.get("relieved") or {"step": 0, "moved": {}}
    gave = {int(group): taken for group, taken in relieved["moved"].items()}
    yield from _lasting_lines(status.get("slow_for_long", {}))
    for speed, group in slow[:SHOWN_MAX]:
        one = members[str(group)]
        where = f" (rank {one['rank']}, {one['phase']})" if "phase" in one else ""
        text = f"group {group} is at {speed:.2f} of the median speed{where}"
        yield f"{text}; it gave {_gift(gave.pop(group), relieved['step'])}" if group in gave else text
    if len(slow) > SHOWN_MAX:
        yield f"{counted(len(slow) - SHOWN_MAX, 'more group')} below {SLOW:g} of the median speed"
    if len(gave) == 1:
        ((group, taken),) = gave.items()
        yield f"group {group} gave {_gift(taken, relieved['step'])}"
    elif gave:
        total = counted(sum(sum(taken.values()) for taken in gave.values()), "piece")
        yield f"{numbered_groups(gave)} gave {total} of step {relieved['step']} to others"


def _lasting_lines(known: Mapping[str, Any]) -> Iterator[str]:
    for group, one in list(known.items())[:SHOWN_MAX]:
        share = counted(one["share"], "piece")
        yield f"group {group} is slow for long ({one['slowness']:.2f} times as long for a piece), its share is {share}"
    if len(known) > SHOWN_MAX:
        yield f"{counted(len(known) - SHOWN_MAX, 'more group')} slow for long"


def _gift(taken: Mapping[str, int], step: int) -> str:
    """What a group gave to whom."""
    return f"{counted(sum(taken.values()), 'piece')} of step {step} to {numbered_groups(map(int, taken))}"
