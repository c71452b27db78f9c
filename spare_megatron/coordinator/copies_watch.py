"""How many copies the state shards of a job have (protocol rules 25 to 29), for status.json and for the coordinator's
output.

A copy is that of a host that counts. A job with fewer copies of a shard than it is to have says so once for each record
that changes which are missing, and once when it has them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spare_megatron.config.plural import counted
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.state_shards import named

NAMED = 8
"""So many shards are named in a sentence; of more their number is."""


def state_copies(state: State) -> dict[str, Any] | None:
    """``due``: the copies that each shard is to have; ``hosts``: shard -> the groups whose copies count; ``copying``:
    shard -> new host -> the group that gives it the state, None where it has it or none can; ``unable``: shard -> the
    groups that cannot keep it. None where every group keeps all state."""
    if not state.state_hosts:
        return None
    hosts: dict[str, list[int]] = {str(shard): [] for shard in range(state.job.state_shards)}
    copying: dict[str, dict[str, int | None]] = {}
    unable: dict[str, list[int]] = {}
    for host in state.state_hosts:
        if host.counts:
            hosts[str(host.shard)].append(host.group)
        elif not host.is_new:
            unable.setdefault(str(host.shard), []).append(host.group)
        else:
            donor = None if host.donor is None else host.donor[0]
            copying.setdefault(str(host.shard), {})[str(host.group)] = donor
    return {"due": state.job.state_copies, "hosts": hosts, "copying": copying, "unable": unable}


class CopiesWatch:
    """Follows which shards have too few copies."""

    def __init__(self) -> None:
        self._lacking: dict[str, int] = {}
        """Shard -> its copies, of those that have too few."""
        self._since_s = 0.0
        """When the first of them was lost, seconds since 1970."""

    def observe(self, before: State, after: State, time_s: float) -> str:
        """One sentence on a record where copies are missing since it, or no longer; empty else."""
        if after.state_hosts is before.state_hosts or after.phase not in ("running", "ending"):
            return ""
        copies = state_copies(after)
        known, self._lacking = self._lacking, {} if copies is None else lacking_copies(copies)
        if copies is None or self._lacking == known:
            return ""
        due = counted(copies["due"], "copy", "copies")
        if not self._lacking:
            after_s = max(0.0, time_s - self._since_s)
            return f"each of the {len(copies['hosts'])} state shards has {due} again, {after_s:.1f} s later"
        if not known:
            self._since_s = time_s
        if all(number >= known.get(shard, copies["due"]) for shard, number in self._lacking.items()):
            return ""  # some have come, and none is lost
        shards = sorted(map(int, self._lacking))
        who = named(shards) if len(shards) <= NAMED else f"{len(shards)} state shards"
        verb, least = "has" if len(shards) == 1 else "have", min(self._lacking.values())
        return f"{who} {verb} fewer than {due} (at least {least}); {_remedy(copies, shards)}"

    def memo(self) -> dict[str, Any]:
        """For :meth:`recall` after a restart."""
        return {"lacking": self._lacking, "since_s": self._since_s}

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Go on from a memo."""
        self._lacking, self._since_s = dict(memo["lacking"]), memo["since_s"]


def lacking_copies(copies: Mapping[str, Any]) -> dict[str, int]:
    """Shard -> its copies, of those of :func:`state_copies` that have too few."""
    return {shard: len(groups) for shard, groups in copies["hosts"].items() if len(groups) < copies["due"]}


def _remedy(copies: Mapping[str, Any], shards: Iterable[int]) -> str:
    """Who gets new copies."""
    groups = {int(group) for shard in shards for group in copies["copying"].get(str(shard), {})}
    if not groups:
        return "no other group can keep one"
    return f"new ones are made on {'groups' if len(groups) > 1 else 'group'} {', '.join(map(str, sorted(groups)))}"
