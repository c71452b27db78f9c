"""Moves copies of state shards from the groups that keep most of them to those that keep least. Pure.

A group that comes back keeps no shard at first, and others keep what it had: so losses and returns leave some groups
with more shards than others, and with more memory in use. A move takes two records, both of commits. The first names
one more host; the second, with which that host counts, strikes off the fullest host of the shard, and may begin the
next move (protocol rule 26).

Promises: each shard keeps r_s hosts that count. Each move lowers the sum of the squares of what groups keep, so without
losses and returns moves come to an end.
"""

from __future__ import annotations

from collections import Counter

from spare_megatron.config.plural import counted
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.state import State
from spare_megatron.protocol.state_shards import unable_groups
from spare_megatron.protocol.view import NEW, StateHost


def levelled(state: State) -> tuple[State, str]:
    """The state at a commit at which nothing else is due, and what changes, in words: hosts are struck off where a
    shard has more than it is to have, and one more is named where two members differ by two shards. While there is a
    new host, or a group that is to become a member, nothing changes."""
    if not state.state_hosts or state.learners or any(host.is_new for host in state.state_hosts):
        return state, ""
    kept = Counter(host.group for host in state.state_hosts if host.counts)
    surplus = _surplus(state, kept)
    hosts = [host for host in state.state_hosts if host not in surplus]
    words = [f"group {host.group} drops state shard {host.shard}" for host in surplus]
    named = _named(state, hosts, kept)
    if named is not None:
        hosts.append(named)
        few = counted(kept[named.group], "state shard")
        words.append(f"group {named.group}, which keeps {few}, gets state shard {named.shard}")
    return (replace(state, state_hosts=tuple(hosts)), "; ".join(words)) if words else (state, "")


def _surplus(state: State, kept: Counter[int]) -> list[StateHost]:
    """One host of each shard that has too many: the fullest. ``kept`` loses what is struck off."""
    hosts: dict[int, list[StateHost]] = {}
    for host in state.state_hosts:
        if host.counts:
            hosts.setdefault(host.shard, []).append(host)
    found = list[StateHost]()
    for of_shard in hosts.values():
        if len(of_shard) > state.job.state_copies:
            fullest = max(of_shard, key=lambda host: (kept[host.group], host.group))
            kept[fullest.group] -= 1
            found.append(fullest)
    return found


def _named(state: State, hosts: list[StateHost], kept: Counter[int]) -> StateHost | None:
    """One more host of a shard of the fullest member: the one that keeps least, of those that are not to leave and
    never lacked room for a shard; None where the two differ by less than two shards."""
    asked = state.live.keys() - state.drained - set[int]().union(*unable_groups(state).values())
    if not asked:
        return None
    fullest = max(state.live, key=lambda group: (kept[group], -group))
    least = min(asked, key=lambda group: (kept[group], group))
    if kept[fullest] - kept[least] < 2:
        return None
    there, here = ({host.shard for host in hosts if host.counts and host.group == one} for one in (fullest, least))
    shard = min(there - here, key=lambda shard: (least - shard) % state.job.num_groups)
    return StateHost(shard, least, state.live[least], NEW)
