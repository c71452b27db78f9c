"""When lost groups are back whose nodes are repaired one by one, with the places that the launcher gives them
(:mod:`spare_megatron.simulator.node_losses`)."""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from spare_megatron.simulator.cluster import Cluster
from spare_megatron.simulator.node_losses import BrokenNodes
from spare_megatron.simulator.policy_trial import Returns


class NodeReturns(Returns):
    """The nodes of a trial whose groups have several, and the groups that start on theirs."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(0)
        self._cluster, self._rng = cluster, np.random.default_rng((seed, 6))
        self.reset()

    @property
    def next_s(self) -> float:
        """The time at which the next node is repaired, or the next group has started on its nodes."""
        return min(self._starts[0][0] if self._starts else inf, self._nodes.next)

    def died(self, group: int, at_s: float, rejoin_s: float | None, struck: bool = True) -> int | None:
        """Note that a group died, and break one of its nodes, or none; nobody takes its place at once."""
        self._start(self._nodes.struck(group, at_s) if struck else [group], at_s)
        return None

    def repaired(self, until_s: float) -> list[int]:
        """The groups that have started up to a time on nodes that were repaired, spare or another group's."""
        self._start(self._nodes.back(until_s), until_s)
        started = []
        while self._starts and self._starts[0][0] <= until_s:
            started.append(heapq.heappop(self._starts)[1])
        return started

    def reset(self) -> None:
        """Note a restart of the whole job, which gets fit nodes."""
        one, repair_s = self._cluster, 3600 * self._cluster.node_repair_h
        self._nodes = BrokenNodes(
            *(one.num_groups, one.nodes_per_group, one.spare_nodes, repair_s),
            taken_out=one.node_share,
            salvage=one.salvage,
            rng=self._rng,
        )
        self._starts: list[tuple[float, int]] = []

    def _start(self, groups: list[int], at_s: float) -> None:
        for group in groups:
            heapq.heappush(self._starts, (at_s + (self._cluster.rejoin_s or 0.0), group))
