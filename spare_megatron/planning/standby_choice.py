"""Chooses redundancy and standby groups together: the pair of least cost, time to train times the GPUs that are paid.

More hosts to a shard cost room for data on each group, a standby group costs its GPUs while they are idle. Of the pairs
within ``choose.TIE`` of the least cost one with the fewest standbys is chosen, and of these the one with fewest hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.planning.choose import REDUNDANCY_MAX, TIE, RedundancyPlan, candidate, choose, ratio_of
from spare_megatron.planning.cluster_figures import ClusterFigures

SHARE_MAX = 0.04
"""Most standby groups that are tried, as a share of the groups that train, where no limit is given."""
ROUNDS = 4
"""How often the search goes from a number of standbys to its best r and on to the best number for it, at most."""


@dataclass(frozen=True)
class CostedPair:
    """A number of standby groups and a redundancy, and what they come to."""

    standby_groups: int
    redundancy: int
    time: float
    """Time to train / failure-free time; infinite where there is no progress."""
    cost: float
    """``time``, times the GPUs that are paid / those that train."""

    def as_json(self) -> dict[str, object]:
        """For spare-plan --json; null where there is no progress."""
        there = self.time < inf
        return {
            "standby_groups": self.standby_groups,
            "redundancy": self.redundancy if there else None,
            "time_to_train_ratio": float(f"{self.time:.6g}") if there else None,
            "cost_ratio": float(f"{self.cost:.6g}") if there else None,
        }


@dataclass(frozen=True)
class PairPlan:
    """The plan with the chosen pair."""

    cluster: ClusterFigures
    """With the chosen number of standby groups."""
    plan: RedundancyPlan
    pairs: tuple[CostedPair, ...]
    """The cheapest of each number of standby groups that was tried; of the chosen number the chosen one."""
    reason: str


def paid(cluster: ClusterFigures) -> float:
    """GPUs that are paid / those that train: 1 + price * n / N for n standby groups beside N."""
    return 1 + cluster.standby_price * cluster.standby_groups / cluster.num_groups


def choose_pair(cluster: ClusterFigures, redundancy: int | None = None, most: int | None = None) -> PairPlan:
    """The best pair for a cluster, whose own ``standby_groups`` are ignored; a given ``redundancy`` is kept.

    Args:
        cluster: figures of cluster and job.
        redundancy: hosts of a shard; None: to be chosen.
        most: the largest number of standby groups; None: ``SHARE_MAX`` of the groups.

    Raises:
        ConfigError: no pair makes progress.
    """
    limit = ceil(SHARE_MAX * cluster.num_groups) if most is None else min(most, cluster.num_groups)
    search = _Search(cluster, redundancy, limit)
    search.run()
    cheapest = min(search.pairs.values(), key=lambda each: each.cost, default=None)
    if cheapest is None or cheapest.cost == inf:
        assert search.why_none is not None
        raise search.why_none
    enough = cheapest.cost * (1 + TIE)
    found = search.having(min(each.standby_groups for each in search.pairs.values() if each.cost <= enough))
    plan = choose(found, redundancy, enough / paid(found))
    chosen = search.pair(found.standby_groups, plan.chosen.redundancy)
    best: dict[int, CostedPair] = {}
    for each in sorted(search.pairs.values(), key=lambda each: each.cost):
        best.setdefault(each.standby_groups, each)
    best[chosen.standby_groups] = chosen
    pairs = tuple(best[count] for count in sorted(best))
    return PairPlan(found, plan, pairs, _why(chosen, pairs, cluster))


class _Search:
    """At first the fastest r without standbys, of all; then the best number of standbys for this r, the best r for this
    number, and so on, in turns, until a number comes again. Numbers are left out that would cost too much even if they
    saved as much time as the largest does."""

    def __init__(self, cluster: ClusterFigures, redundancy: int | None, most: int) -> None:
        self._cluster, self._redundancy, self._most = cluster, redundancy, most
        self.pairs: dict[tuple[int, int], CostedPair] = {}
        self.why_none: ConfigError | None = None
        """Why the smallest number of standbys that was tried makes no progress."""

    def run(self) -> None:
        """Fill ``pairs``."""
        r, known = self._fastest(0), {0}
        if r is None and self._most:
            self.pairs[0, 0] = CostedPair(0, 0, inf, inf)
            r, known = self._fastest(self._most), {0, self._most}
        for _ in range(ROUNDS):
            if r is None:
                return
            before, least = self._cheapest.cost, self.pair(self._most, r).time
            for count in _numbers(self._most):
                if least * paid(self.having(count)) < before * (1 - TIE):
                    self.pair(count, r)
            count = self._cheapest.standby_groups
            if count in known:
                return
            known.add(count)
            r = self._climbed(count, r)

    def having(self, count: int) -> ClusterFigures:
        """The cluster with so many standby groups."""
        return replace(self._cluster, standby_groups=count)

    def pair(self, count: int, redundancy: int) -> CostedPair:
        """This pair, which is kept."""
        key = count, redundancy
        if key not in self.pairs:
            cluster = self.having(count)
            time = ratio_of(candidate(cluster, redundancy))
            self.pairs[key] = CostedPair(count, redundancy, time, time * paid(cluster))
        return self.pairs[key]

    @property
    def _cheapest(self) -> CostedPair:
        return min(self.pairs.values(), key=lambda each: each.cost)

    def _climbed(self, count: int, start: int) -> int:
        """The fastest redundancy near ``start`` with so many standbys."""
        if self._redundancy is not None or self._cluster.data == "shared":
            return start
        r = start
        for step in (1, -1):
            while 2 <= r + step <= min(REDUNDANCY_MAX, self._cluster.num_groups):
                if self.pair(count, r + step).time >= self.pair(count, r).time:
                    break
                r += step
        return r

    def _fastest(self, count: int) -> int | None:
        """The fastest redundancy with so many standbys; None where there is no progress."""
        cluster = self.having(count)
        try:
            plan = choose(cluster, self._redundancy)
        except ConfigError as error:
            self.why_none = self.why_none or error
            return None
        for each in plan.allowed:
            time = ratio_of(each)
            self.pairs[count, each.redundancy] = CostedPair(count, each.redundancy, time, time * paid(cluster))
        return min(plan.allowed, key=ratio_of).redundancy


def _numbers(most: int) -> Sequence[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and ``most``."""
    steps = (base << power for power in range(most.bit_length()) for base in (2, 3))
    return sorted({each for each in (1, *steps, most) if 1 <= each <= most})


def _why(chosen: CostedPair, pairs: Sequence[CostedPair], cluster: ClusterFigures) -> str:
    """Why so many standbys, in a clause."""
    if not chosen.standby_groups:
        others = [each for each in pairs if each.standby_groups]
        if not others:
            return "standby groups were not tried"
        best = min(others, key=lambda each: each.cost)
        return (
            f"standby groups do not pay: with {best.standby_groups} and r = {best.redundancy} it takes {best.time:.3f} "
            f"and costs {best.cost / chosen.cost:.3f} times as much"
        )
    share = cluster.standby_price * chosen.standby_groups / cluster.num_groups
    some = f"{counted(chosen.standby_groups, 'standby group')} beyond the others, {_more(share)}"
    none = next(each for each in pairs if not each.standby_groups)
    if none.time == inf:
        return f"{some}; without there is no progress"
    times = none.cost / chosen.cost
    return f"{some}; without it takes {none.time:.3f} (r = {none.redundancy}) and costs {times:.3f} times as much"


def _more(share: float) -> str:
    return f"{share:.2%} more to pay" if share else "which cost nothing"
