"""State shards: which groups keep which parts of the optimizer's state, and what follows when copies are lost. Pure.

A job may divide the state of its optimizer into S shards with r_s hosts each. A host *counts* where votes have compared
its copy; a *new* one gets the state from a counting host, and keeps every result since (protocol rules 25 to 29). Who
cannot keep a shard says so, and another group is asked. Where
every group hosts everything, a state has no such hosts and all functions here leave it as it is.

Receivers of a shard's sums, and its primary, follow from the views of an epoch. So hosts are named, and begin to count,
only in records that make an epoch; what a new host reports of itself may change between two epochs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import Have, Vote
from spare_megatron.protocol.standing import leaving
from spare_megatron.protocol.state import State
from spare_megatron.protocol.view import COUNTS, NEW, UNABLE, VOID, WHOLE, StateHost


def drawn(state: State) -> State:
    """The state at the start of a job attempt: each shard on r_s of the groups that came, which read it from the
    checkpoint."""
    live, spec = sorted(state.live), state.job
    copies = range(min(spec.state_copies, len(live)))
    hosts = (
        StateHost(shard, group, state.live[group])
        for shard in range(spec.state_shards)
        for group in sorted(live[(shard + k) % len(live)] for k in copies)
    )
    return replace(state, state_hosts=tuple(hosts))


def uncounted(state: State) -> list[int]:
    """The shards that no host counts for: nothing is committed while there are any."""
    counted = {host.shard for host in state.state_hosts if host.counts}
    return [shard for shard in range(state.job.state_shards) if shard not in counted]


def counts_less(after: State, before: State) -> bool:
    """Whether a shard that a host counted for has none that does."""
    return len(uncounted(after)) > len(uncounted(before))


def lost(state: State) -> list[int]:
    """The shards of which no copy is left: no host counts, and each new one has reported that it has none."""
    hoped = {host.shard for host in state.state_hosts if host.standing in (WHOLE, NEW)}
    return [shard for shard in uncounted(state) if shard not in hoped]


def remaining(state: State) -> State:
    """The state without hosts and donors that are no members. Where no host of a shard counts any more, those that have
    reported that they have its state do."""
    if not state.state_hosts:
        return state
    here = [host for host in state.state_hosts if state.is_member(host.member)]
    counted = {host.shard for host in here if host.counts}
    here = [_counting(host) if host.standing == WHOLE and host.shard not in counted else host for host in here]
    donors = {(host.shard, host.member) for host in here if host.counts}
    hosts = (
        replace(host, donor=None, step=-1) if host.donor and (host.shard, host.donor) not in donors else host
        for host in here
    )
    return replace(state, state_hosts=tuple(hosts))


def copies_voted(state: State) -> dict[int, dict[int, str]]:
    """Shard -> group -> the checksum of its copy, of the hosts that count and have voted it."""
    found: dict[int, dict[int, str]] = {shard: {} for shard in range(state.job.state_shards)}
    counting = {(host.shard, host.group) for host in state.state_hosts if host.counts}
    for group, vote in state.votes.items():
        for shard, checksum in vote.result.state:
            if (shard, group) in counting:
                found[shard][group] = str(checksum)
    return found


def compared(state: State) -> State:
    """The state at the commit for which all have voted: a new host counts whose vote had the state of its shard that
    the counting hosts have."""
    if not any(host.is_new for host in state.state_hosts):
        return state
    voted = {(shard, vote.group): checksum for vote in state.votes.values() for shard, checksum in vote.result.state}
    right = {(host.shard, voted.get((host.shard, host.group))) for host in state.state_hosts if host.counts}
    hosts = (
        _counting(host)
        if host.is_new and (host.shard, host.group) in voted and (host.shard, voted[host.shard, host.group]) in right
        else host
        for host in state.state_hosts
    )
    return replace(state, state_hosts=tuple(hosts))


def renewed(state: State) -> State:
    """The state in a new epoch: new hosts are named where a shard has too few, and each new host that has not the state
    and no donor is given one, for the state after t*."""
    if not state.state_hosts:
        return state
    hosts, able, unable = list(state.state_hosts), _able(state), unable_groups(state)
    lacking = uncounted(state)
    for shard in range(state.job.state_shards):
        if shard in lacking:
            continue
        asked = able.difference(unable[shard])
        for _ in range(min(state.job.state_copies, len(asked)) - _number(hosts, shard, asked)):
            group = min(asked - {host.group for host in hosts if host.shard == shard}, key=_burden(state, hosts, shard))
            hosts.append(StateHost(shard, group, state.live[group], NEW))
    serving = Counter(host.donor for host in hosts if host.donor)
    for number, host in enumerate(hosts):
        donors = [other.member for other in hosts if other.shard == host.shard and other.counts]
        if host.standing in (NEW, VOID) and host.donor is None and donors:
            donor = min(donors, key=lambda who: (serving[who], who))
            serving[donor] += 1
            hosts[number] = replace(host, standing=NEW, donor=donor, step=state.committed[0])
    return replace(state, state_hosts=tuple(sorted(hosts, key=lambda host: (host.shard, host.group))))


def new_host(state: State, event: Have) -> StateHost | None:
    """The new host that this is about; None where it is none, or the report is of another epoch: it may be about an
    earlier time as a host. Who has a donor has not nothing, but may be unable to keep the shard."""
    who = (event.shard, event.group, event.incarnation)
    host = next((h for h in state.state_hosts if (h.shard, *h.member) == who and h.standing in (NEW, VOID)), None)
    if host is None or event.epoch != state.epoch or (host.donor is not None and not (event.whole or event.detail)):
        return None
    return host


def reported(state: State, host: StateHost, event: Have) -> State:
    """The state in which a new host has reported that it has its shard's state, has nothing and no donor, or cannot
    keep the shard."""
    standing = WHOLE if event.whole else UNABLE if event.detail else VOID
    known = replace(host, standing=standing, donor=None, step=-1)
    return replace(state, state_hosts=tuple(known if one is host else one for one in state.state_hosts))


def unlike_the_hosts(state: State, event: Vote) -> str:
    """In words, which shards a group counts for that its vote does not have; empty: none."""
    had = {shard for shard, _ in event.result.state}
    mine = [host.shard for host in state.state_hosts if host.group == event.group and host.counts]
    lacking = [shard for shard in mine if shard not in had]
    return f"voted for step {event.result.step} without {named(lacking)}, which it keeps" if lacking else ""


def needed(state: State, groups: Iterable[int]) -> frozenset[int]:
    """Those of the ``groups``, which are to leave, that count for a shard of which those who stay have not copies
    enough."""
    if not state.state_hosts:
        return frozenset()
    able, unable, short = _able(state), unable_groups(state), set[int]()
    counting = [host for host in state.state_hosts if host.counts]
    for shard in range(state.job.state_shards):
        enough = max(1, min(state.job.state_copies, len(able.difference(unable[shard]))))
        if _number(counting, shard, able) < enough:  # at least one, where no able group has room for it
            short.add(shard)
    return frozenset(groups) & {host.group for host in counting if host.shard in short}


def unable_groups(state: State) -> defaultdict[int, set[int]]:
    """Shard -> the members that have reported that they cannot keep it."""
    found = defaultdict[int, set[int]](set)
    for host in state.state_hosts:
        if host.standing == UNABLE:
            found[host.shard].add(host.group)
    return found


def named(shards: list[int]) -> str:
    """'state shard 1', or 'state shards 1, 2'."""
    return f"state shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}"


def _able(state: State) -> frozenset[int]:
    """The members that may be hosts: all but those that are to leave and can."""
    return frozenset(state.live) - leaving(state, state.live)


def _number(hosts: Iterable[StateHost], shard: int, able: Collection[int]) -> int:
    return sum(host.shard == shard and host.group in able for host in hosts)


def _burden(state: State, hosts: list[StateHost], shard: int) -> Callable[[int], tuple[int, int, int]]:
    """A key by which groups are named: those that copy least come first, then those with the fewest shards."""
    copying = Counter(host.group for host in hosts if host.is_new)
    kept = Counter(host.group for host in hosts if host.standing != UNABLE)
    return lambda group: (copying[group], kept[group], (group - shard) % state.job.num_groups)


def _counting(host: StateHost) -> StateHost:
    return replace(host, standing=COUNTS, donor=None, step=-1)
