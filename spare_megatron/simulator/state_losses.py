"""Simulates how long a job lasts whose groups keep copies of state shards: losses one by one, hosts by the protocol's
own rules (:mod:`spare_megatron.protocol.state_shards`), without steps. docs/theory.md, section 11, compares it with the
formula of :mod:`spare_megatron.planning.state_copies`; ``spare-simulate --state-redundancy`` has the steps too.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from spare_megatron.planning.state_copies import copied, kept_by_all, moved, without
from spare_megatron.protocol import state_shards
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.state import State

SMALLEST = 1e-12
"""A chance below which further losses are not followed."""


def only_hosts(state: State) -> set[int]:
    """The groups that are the only ones to count for some shard."""
    counted: dict[int, set[int]] = {}
    for host in state.state_hosts:
        if host.counts:
            counted.setdefault(host.shard, set()).add(host.group)
    return {next(iter(hosts)) for hosts in counted.values() if len(hosts) == 1}


def simulated_wipe_out_s(groups: int, copies: int, mtbf_s: float, copying_s: float, chains: int, seed: int) -> float:
    """The mean time between two losses of the last copy of a shard, over so many chains of losses of groups.

    A group is lost once in ``mtbf_s``. A loss ends the copying of earlier ones, which begins anew; lost groups are back
    when it ends, and shards move to them. Wipe-outs are rare, so each chain is played twice: as it comes, for the hosts
    of the next chain, and once more for the chance of a wipe-out, in which a further loss always comes in time, is
    weighted with the chance that it does, and hits a group that is not the only host of a shard."""
    rng = np.random.default_rng(seed)
    now_s, ends = 0.0, 0.0
    whole = kept_by_all(groups, copies)

    def lose(state: State, among: Collection[int]) -> State:
        return without(state, sorted(among)[rng.integers(len(among))])

    for number in range(chains):
        first = lose(whole, whole.live)
        state, chance = first, 1.0
        while state.live and chance > SMALLEST:
            chance *= -float(np.expm1(-len(state.live) * copying_s / mtbf_s))
            last = only_hosts(state)
            ends += chance * len(last) / len(state.live)
            others = state.live.keys() - last
            chance *= len(others) / len(state.live)
            if not others:
                break
            state = lose(state, others)
        state = first
        now_s += mtbf_s / groups
        while state.live and (next_s := rng.exponential(mtbf_s / len(state.live))) < copying_s:
            now_s += next_s
            after = lose(state, state.live)
            if state_shards.uncounted(after):
                break
            state = after
        now_s += copying_s
        back = {group: number for group in range(groups) if group not in state.live}
        whole = moved(replace(copied(state), live={**state.live, **back}))
    return now_s / ends
