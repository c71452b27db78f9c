"""How long a job lasts whose groups keep copies of state shards, before all copies of one shard are lost.

Each of N groups is lost at rate x, and each of S = N shards is on r of them. A loss begins a *chain*: until its shards
have r copies again, w later, further losses hit groups that may be their other hosts; each loss ends the copying, which
begins anew. With k groups lost in a chain, one of the other N - k is lost within w with probability

    a(k) = 1 - exp(-(N - k) x w).

The hosts of shards are D different ones of the C(N, r) sets of r groups, each choice equally often. While the job goes
on, none of the C(k, r) sets of lost groups is among them, which leaves C(N, r) - C(k, r). Of these m = C(k, r - 1)
consist of the next group to be lost and r - 1 that are lost. It takes the last copy of a shard with probability

    q(k) = 1 - product over i < D of (1 - m / (C(N, r) - C(k, r) - i)).

D is the mean number of different sets in a job of many losses: some shards have the same hosts, as the rules that name
new hosts and move shards (``protocol.state_shards``, ``protocol.state_levelling``) look only at how many a group has.
It is found by playing losses with these rules; in jobs of more than ``PLAYED_MAX`` groups it is S within 2 %.

The job ends in a chain in which k groups are lost with probability f(k) = a(k) (q(k) + (1 - q(k)) f(k + 1)), and the
chain goes on for d(k) = a(k) / ((N - k) x) + a(k) (1 - q(k)) d(k + 1). A chain begins 1 / (N x) after the last one, so
the mean time to the loss of all copies of a shard is

    (1 / (N x) + d(1)) / f(1).

For r = 2 and rare losses that is 1 / (2 D x^2 w), the time to data loss of D mirrored pairs of disks with repairs of w
(Patterson, Gibson, Katz, A Case for Redundant Arrays of Inexpensive Disks, SIGMOD 1988).

May assume: lost groups are back long before the next chain, and losses are independent; groups that fail together, as
those of one power supply do, are lost more often.
"""

from __future__ import annotations

from functools import cache
from math import comb, exp, expm1, inf, log1p

import numpy as np

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.timeouts import Timeouts
from spare_megatron.protocol import state_levelling, state_shards
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.protocol.state import State
from spare_megatron.protocol.view import COUNTS

PLAYED_MAX = 24
"""Groups of the largest job whose losses are played."""
PLAYED = 10_000
"""Losses, times groups: D is known to 2 % then."""


def seconds_to_wipe_out(groups: int, copies: int, mtbf_s: float, copying_s: float, sets: float | None = None) -> float:
    """The mean time until no copy of some shard is left, of a job of so many groups, and as many shards, of which each
    is lost once in ``mtbf_s``; a loss is made good in ``copying_s``. ``sets``: D; None: as :func:`host_sets` finds.

    Raises ConfigError where a figure is impossible."""
    if not 1 <= copies <= groups:
        raise ConfigError(f"{copies} copies of each state shard do not fit {groups} groups; give 1 to {groups}")
    if mtbf_s <= 0 or copying_s < 0:
        raise ConfigError(
            f"a group is lost every {mtbf_s:g} s and its state copied in {copying_s:g} s; give times above 0"
        )
    if copies == 1:  # the first loss takes the last copy
        return mtbf_s / groups
    sets = host_sets(groups, copies) if sets is None else sets
    ends, lasts_s = 0.0, 0.0
    for lost in range(groups - 1, 0, -1):
        rate = (groups - lost) / mtbf_s
        another = 1.0 - exp(-rate * copying_s)
        last_copy = _takes_last(groups, copies, lost, sets)
        ends = another * (last_copy + (1 - last_copy) * ends)
        lasts_s = another / rate + another * (1 - last_copy) * lasts_s
    return (mtbf_s / groups + lasts_s) / ends if ends else inf


def copying_s(weights: float, kept: float, bytes_per_s: float) -> float:
    """The time from a loss until all copies are there: it is noticed (at worst when heartbeats stop), and the epoch
    begins with a gather (protocol rule 25).

    Args:
        weights: bytes of a GPU's weights, all of which it receives.
        kept: bytes of the optimizer's state that it keeps, and on average the lost group kept: as many are received.
        bytes_per_s: what one GPU takes from others. All three may be in GiB instead.
    """
    return Timeouts.heartbeat_timeout_s + (weights + kept) / bytes_per_s


@cache
def host_sets(groups: int, copies: int) -> float:
    """D: the mean number of different sets of hosts in a job that has had many losses."""
    if groups > PLAYED_MAX or copies == groups:
        return float(min(groups, comb(groups, copies)))
    rng = np.random.default_rng(0)
    state, found = kept_by_all(groups, copies), []
    for incarnation in range(1, PLAYED // groups + 1):
        group = int(rng.integers(groups))
        state = copied(without(state, group))
        state = moved(replace(state, live={**state.live, group: incarnation}))
        of_shards: dict[int, set[int]] = {}
        for host in state.state_hosts:
            of_shards.setdefault(host.shard, set()).add(host.group)
        found.append(len({frozenset(one) for one in of_shards.values()}))
    return float(np.mean(found[groups:]))


def kept_by_all(groups: int, copies: int) -> State:
    """The hosts of all shards at the start of a job, as the protocol has them."""
    spec = JobSpec(
        num_groups=groups,
        pieces_per_shard=1,
        offsets=(0,),
        granularity="microbatch",
        first_step=0,
        last_step=1,
        min_groups=1,
        fingerprint="",
        state_shards=groups,
        state_copies=copies,
    )
    return state_shards.drawn(State(spec=spec, live=dict.fromkeys(range(groups), 0)))


def without(state: State, group: int) -> State:
    """The hosts after the loss of a group, with those that the protocol names instead."""
    left = replace(state, live={one: known for one, known in state.live.items() if one != group})
    return state_shards.renewed(state_shards.remaining(left))


def copied(state: State) -> State:
    """The hosts when new ones have their copies."""
    hosts = tuple(
        replace(host, standing=COUNTS, donor=None, step=-1) if host.is_new else host for host in state.state_hosts
    )
    return replace(state, state_hosts=hosts)


def moved(state: State) -> State:
    """The hosts when shards have moved until groups keep as many as each other."""
    while True:
        after, moves = state_levelling.levelled(state)
        if not moves:
            return state
        state = copied(after)


def _takes_last(groups: int, copies: int, lost: int, sets: float) -> float:
    """q(k), between whole numbers of sets in proportion."""
    whole = int(sets)
    if whole < sets:
        more = sets - whole
        return (1 - more) * _takes_last(groups, copies, lost, whole) + more * _takes_last(
            groups, copies, lost, whole + 1
        )
    possible, taken = comb(groups, copies) - comb(lost, copies), comb(lost, copies - 1)
    if possible - taken < sets:  # fewer sets than shards are left without the lost groups
        return 1.0
    return -expm1(sum(log1p(-taken / (possible - shard)) for shard in range(whole)))
