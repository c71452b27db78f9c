"""When lost groups are back whose nodes are repaired one by one, and in which shape, as the launcher decides it
(:mod:`spare_megatron.simulator.node_losses`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np

from spare_megatron.simulator.cluster import Cluster
from spare_megatron.simulator.node_losses import BrokenNodes, NodeFigures
from spare_megatron.simulator.policy_trial import Returns


class NodeReturns(Returns):
    """The nodes of a trial whose groups have several, and the groups that start on theirs."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(0)
        self._cluster, self._rng = cluster, np.random.default_rng((seed, 6))
        self._figures = NodeFigures(
            groups=cluster.num_groups,
            nodes_per_group=cluster.nodes_per_group,
            mtbf_h=cluster.mtbf_s * cluster.num_groups * cluster.nodes_per_group / 3600,
            repair_h=cluster.node_repair_h,
            taken_out=cluster.node_share,
            stages=cluster.stages,
            shapes=cluster.shapes,
            layers=cluster.layers,
        )
        self.reset()

    @property
    def next_s(self) -> float:
        """The time at which the next node is repaired, or the next group has started on its nodes."""
        return min(self._nodes.next, *(at_s for at_s, _ in self._starts.values()), inf)

    def strikes(self, group: int) -> bool:
        """Whether a failure of a group hits one of the nodes that it uses."""
        used = len(self._nodes.used(group)) / self._cluster.nodes_per_group
        return used == 1 or self._rng.random() < used

    def died(self, group: int, at_s: float, rejoin_s: float | None, struck: bool = True) -> int | None:
        """Note that a group died, and break one of its nodes, or none; nobody takes its place at once."""
        self._gone(group)
        starts = self._nodes.struck(group, at_s) if struck else {group: self._stages[group]}
        self._start(starts, at_s)
        return None

    def repaired(self, until_s: float) -> list[int]:
        """The groups that have started up to a time on nodes that were repaired, spare or another group's."""
        self._start(self._nodes.back(until_s), until_s)
        started = sorted((at_s, group) for group, (at_s, _) in self._starts.items() if at_s <= until_s)
        for _, group in started:
            self._stages[group] = self._starts.pop(group)[1]
            self.slowness[group] = 1 / self._figures.speed_with(self._stages[group])
            self._running.add(group)
        return [group for _, group in started]

    def left(self, group: int, at_s: float) -> None:
        """Note that a group has left with a commit to start in its home shape."""
        self._gone(group)
        self._begin(group, at_s, self._figures.stages)

    def reset(self) -> None:
        """Note a restart of the whole job, which gets fit nodes."""
        repair_s = 3600 * self._cluster.node_repair_h
        one = self._cluster
        self._nodes = BrokenNodes(self._figures, one.spare_nodes, repair_s, self._rng, salvage=one.salvage)
        self._starts: dict[int, tuple[float, int]] = {}
        """Group -> when it has started, and with how many stages."""
        self._stages = [self._figures.stages] * self._cluster.num_groups
        self.slowness = np.ones(self._cluster.num_groups)
        self.go_home = set()
        self._running = set(range(self._cluster.num_groups))

    def _gone(self, group: int) -> None:
        self.go_home.discard(group)
        self._running.discard(group)

    def _start(self, starts: Mapping[int, int], at_s: float) -> None:
        for group, stages in starts.items():
            if group in self._running:  # it has other nodes now, and leaves for them with a commit
                self.go_home.add(group)
            else:
                self._begin(group, at_s, stages)

    def _begin(self, group: int, at_s: float, stages: int) -> None:
        self._starts[group] = at_s + (self._cluster.rejoin_s or 0.0), stages
