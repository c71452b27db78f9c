"""The times at which groups fail: from a trace, or from failure clocks of groups, of the cluster or of domains.

A failure clock is a renewal process; its *rings* are the failures. Nothing in the simulation changes the times of
rings, so every policy meets the same failures. A ring of a group that is already dead has no effect. ``due`` returns
each ring once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gamma

import numpy as np
from numpy.typing import NDArray

from spare_megatron.simulator.cluster import Cluster

BLOCK = 32
"""Number of rings that are drawn at once for every clock."""

Ring = tuple[float, int]
"""(time in seconds, group)."""


class Rings:
    """Base class: a table of coming rings, one row for each clock."""

    def __init__(self, clocks: int) -> None:
        self._table = np.zeros((clocks, 1))
        self._at = np.zeros(clocks, dtype=np.int64)
        self.next: NDArray[np.float64] = np.zeros(clocks)
        self.first = 0.0

    def _start(self) -> None:
        self._table = self._more(np.zeros(len(self._at)))
        self.next = self._table[:, 0].copy()
        self.first = float(self.next.min()) if len(self.next) else np.inf

    def _more(self, after: NDArray[np.float64]) -> NDArray[np.float64]:
        """[clocks, n]: the n rings of each clock that follow its time in ``after``, ascending."""
        raise NotImplementedError

    def _members(self, clock: int) -> Sequence[int]:
        raise NotImplementedError

    def due(self, until_s: float) -> list[Ring]:
        """Every ring up to ``until_s`` that was not returned before, in order of time."""
        rings: list[Ring] = []
        while self.first <= until_s:
            for clock in np.flatnonzero(self.next <= until_s).tolist():
                while self.next[clock] <= until_s:
                    at = float(self.next[clock])
                    rings += [(at, group) for group in self._members(clock)]
                    self._advance(clock)
            self.first = float(self.next.min())
        rings.sort()
        return rings

    def restart(self, at_s: float) -> None:
        """Reset every clock at this time."""
        self._table = self._more(np.full(len(self._at), at_s))
        self._at[:] = 0
        self.next = self._table[:, 0].copy()
        self.first = float(self.next.min())

    def _advance(self, clock: int) -> None:
        self._at[clock] += 1
        if self._at[clock] == self._table.shape[1]:
            self._extend()
        self.next[clock] = self._table[clock, self._at[clock]]

    def _extend(self) -> None:
        """Draw further rings of every clock, and drop the columns that all clocks have passed."""
        passed = int(self._at.min())
        self._table = np.hstack([self._table[:, passed:], self._more(self._table[:, -1])])
        self._at -= passed


class WeibullRings(Rings):
    """Independent Weibull renewal processes with the same mean and shape."""

    def __init__(self, groups: Sequence[Sequence[int]], mean_s: float, shape: float, rng: np.random.Generator) -> None:
        """``groups[c]`` are the groups that die when clock c rings."""
        super().__init__(len(groups))
        self._groups, self._shape, self._rng = groups, shape, rng
        self._scale = mean_s / gamma(1 + 1 / shape)
        self._start()

    def _more(self, after: NDArray[np.float64]) -> NDArray[np.float64]:
        draws = self._scale * self._rng.weibull(self._shape, (BLOCK, len(after))).T
        times: NDArray[np.float64] = after[:, None] + np.cumsum(draws, axis=1)
        return times

    def _members(self, clock: int) -> Sequence[int]:
        return self._groups[clock]


class SystemRings(WeibullRings):
    """One clock for the cluster; each ring hits a group drawn at random."""

    def __init__(self, num_groups: int, mean_s: float, shape: float, rng: np.random.Generator) -> None:
        super().__init__([()], mean_s, shape, rng)
        self._num_groups = num_groups

    def _members(self, clock: int) -> Sequence[int]:
        return (int(self._rng.integers(self._num_groups)),)


class TraceRings(Rings):
    """Failures at given times."""

    def __init__(self, num_groups: int, rings: Sequence[Ring]) -> None:
        super().__init__(num_groups)
        times: list[list[float]] = [[] for _ in range(num_groups)]
        for at, group in rings:
            times[group].append(at)
        width = max(map(len, times), default=0) + 1
        self._times = np.full((num_groups, width), np.inf)
        for group, row in enumerate(times):
            self._times[group, : len(row)] = sorted(row)
        self._start()

    def restart(self, at_s: float) -> None:
        """Do nothing: the times are given."""

    def _more(self, after: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._times if not after.any() else np.full((len(after), 1), np.inf)

    def _members(self, clock: int) -> Sequence[int]:
        return (clock,)


class Failures:
    """All causes of failure of one trial."""

    def __init__(self, sources: Sequence[Rings]) -> None:
        self._sources = tuple(sources)
        self._scripted: list[Ring] = []
        self.first = min((source.first for source in self._sources), default=np.inf)

    def restart(self, at_s: float) -> None:
        """Reset every clock at this time."""
        for source in self._sources:
            source.restart(at_s)
        self.first = min([source.first for source in self._sources] + [at for at, _ in self._scripted])

    def due(self, until_s: float) -> list[Ring]:
        """Every ring up to ``until_s`` that was not returned before, in order of time."""
        if self.first > until_s:
            return []
        rings = sorted([*self._scripted, *(ring for source in self._sources for ring in source.due(until_s))])
        self._scripted = [ring for ring in rings if ring[0] > until_s]
        self.first = min([source.first for source in self._sources] + [at for at, _ in self._scripted])
        return [ring for ring in rings if ring[0] <= until_s]

    def script(self, rings: Sequence[Ring]) -> None:
        """Add rings at given times."""
        self._scripted += rings
        self.first = min([self.first, *(at for at, _ in rings)])


def failures_of(
    cluster: Cluster, seed: int, trace: Sequence[Ring] | None = None, domains: Mapping[str, Sequence[int]] | None = None
) -> Failures:
    """The failures of ``cluster`` in the trial with this seed. A ``trace`` replaces drawn failures; ``domains`` (name
    -> groups) fail as a whole every ``domain_mtbf_s`` on average, in addition to single groups."""
    if trace is not None:
        return Failures([TraceRings(cluster.num_groups, trace)])
    rng = np.random.default_rng((seed, 1))
    sources: list[Rings] = []
    if cluster.clocks == "system":
        sources.append(SystemRings(cluster.num_groups, cluster.mtbf_s, cluster.weibull_shape, rng))
    else:
        singles = [(group,) for group in range(cluster.num_groups)]
        sources.append(WeibullRings(singles, cluster.mtbf_s * cluster.num_groups, cluster.weibull_shape, rng))
    if domains and cluster.domain_mtbf_s:
        members = [tuple(domains[name]) for name in sorted(domains)]
        domain_rng = np.random.default_rng((seed, 3))
        sources.append(WeibullRings(members, cluster.domain_mtbf_s, cluster.weibull_shape, domain_rng))
    return Failures(sources)


def record(cluster: Cluster, seed: int, until_s: float) -> list[Ring]:
    """The drawn failures up to a time, for a trace that other simulators can read."""
    return failures_of(cluster, seed).due(until_s)
