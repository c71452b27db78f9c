"""How long a job lasts whose groups keep copies of state shards, before all copies of one shard are lost.

Each of N groups is lost at rate x, and each of S shards is on r of them. A loss begins a *chain*: until its shards have
r copies again, w later, further losses hit groups that may be their other hosts; each loss ends the copying, which
begins anew. With k groups lost in a chain, one of the other N - k is lost within w with probability

    a(k) = 1 - exp(-(N - k) x w).

Shards are spread evenly: their hosts are S of the C(N, r) sets of r groups, no two alike, each choice equally often.
While the job goes on, none of the C(k, r) sets of lost groups is among them, which leaves C(N, r) - C(k, r). Of these
m = C(k, r - 1) consist of the next group to be lost and r - 1 that are lost. It takes the last copy of a shard with
probability

    q(k) = 1 - product over i < S of (1 - m / (C(N, r) - C(k, r) - i)).

The job ends in a chain in which k groups are lost with probability f(k) = a(k) (q(k) + (1 - q(k)) f(k + 1)), and the
chain goes on for d(k) = a(k) / ((N - k) x) + a(k) (1 - q(k)) d(k + 1). A chain begins 1 / (N x) after the last one, so
the mean time to the loss of all copies of a shard is

    (1 / (N x) + d(1)) / f(1).

May assume: lost groups are back long before the next chain, and losses are independent; groups that fail together, as
those of one power supply do, are lost more often.
"""

from __future__ import annotations

from math import comb, exp, expm1, inf, log1p

from spare_megatron.config.errors import ConfigError


def seconds_to_wipe_out(groups: int, copies: int, mtbf_s: float, copying_s: float) -> float:
    """The mean time until no copy of some shard is left, of a job of so many groups, and as many shards, of which each
    is lost once in ``mtbf_s``; a loss is made good in ``copying_s``.

    Raises ConfigError where a figure is impossible."""
    if not 1 <= copies <= groups:
        raise ConfigError(f"{copies} copies of each state shard do not fit {groups} groups; give 1 to {groups}")
    if mtbf_s <= 0 or copying_s < 0:
        raise ConfigError(
            f"a group is lost every {mtbf_s:g} s and its state copied in {copying_s:g} s; give times above 0"
        )
    ends, lasts_s = 0.0, 0.0
    for lost in range(groups - 1, 0, -1):
        rate = (groups - lost) / mtbf_s
        another = 1.0 - exp(-rate * copying_s)
        last_copy = _takes_last(groups, copies, lost)
        ends = another * (last_copy + (1 - last_copy) * ends)
        lasts_s = another / rate + another * (1 - last_copy) * lasts_s
    if copies == 1:  # the first loss takes the last copy
        ends, lasts_s = 1.0, 0.0
    return (mtbf_s / groups + lasts_s) / ends if ends else inf


def _takes_last(groups: int, copies: int, lost: int) -> float:
    """q(k)."""
    possible, taken = comb(groups, copies) - comb(lost, copies), comb(lost, copies - 1)
    if possible - taken < groups:  # fewer sets than shards are left without the lost groups
        return 1.0
    return -expm1(sum(log1p(-taken / (possible - shard)) for shard in range(groups)))
