"""Simulates the nodes of a job that break and are repaired, with the places of groups as the launcher gives them
(:mod:`spare_megatron.launch.slurm_places`): which share of the groups' time is lost, with so many spare nodes.

A node breaks only while its group trains. Those that are repaired come back to the job. In :func:`lost_share` steps,
redundancy and checkpoints are left out: a group that is away costs its share of the job and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil, inf, log

import numpy as np
from numpy.random import Generator

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.launch.node_looks import JobNodes, look_at_nodes
from spare_megatron.launch.slurm_places import Move, SlurmPlaces

REPAIR_SIGMA = 1.0
"""Of the logarithm of a repair's time: one in forty takes four times the mean or longer."""
DAYS = 30.0


@dataclass(frozen=True)
class NodeFigures:
    """The job's nodes, and how they fail. Times in hours."""

    groups: int
    nodes_per_group: int
    mtbf_h: float
    """Mean time between two interruptions of one node that trains."""
    repair_h: float = 24.0
    """Mean time until a node is back that was taken out."""
    taken_out: float = 0.7
    """Share of the interruptions that take the node out; after the others the group starts again on it."""
    restart_h: float = 300 / 3600
    """From an interruption, or from the moment in which all its nodes are fit, until a group trains."""

    def __post_init__(self) -> None:
        for name in ("groups", "nodes_per_group", "mtbf_h", "repair_h"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be a finite number above 0")
        if not 0 <= self.taken_out <= 1 or not 0 <= self.restart_h < float("inf"):
            raise ConfigError(
                f"the share of interruptions that take a node out is {self.taken_out:g} and a group's restart takes "
                f"{self.restart_h:g} h; give a share from 0 to 1 and a time of at least 0"
            )


class WithoutSalvage(SlurmPlaces):
    """Groups that wait give nothing to each other."""

    def salvage(self, usable: Collection[int], drained: Collection[int] = ()) -> dict[int, list[Move]]:
        """Nobody is completed."""
        return {}


class BrokenNodes:
    """The nodes of a job of which some are under repair, and the groups that wait for them. Times in any one unit."""

    def __init__(
        self, groups: int, size: int, spares: int, repair: float, *, taken_out: float, salvage: bool, rng: Generator
    ) -> None:
        """``size`` nodes a group; ``repair`` is a repair's mean time, ``taken_out`` the share of interruptions after
        which a node is repaired."""
        total = groups * size + spares
        allocation = Allocation("", total, groups * size, tasks_of_nodes=(1,) * total)
        self._places = (SlurmPlaces if salvage else WithoutSalvage)(allocation, size)
        self._names = {node: str(node) for node in range(total)}
        self._repair, self._taken_out, self._rng = repair, taken_out, rng
        self._waiting: set[int] = set()
        self._repaired: dict[int, float] = {}
        """Broken node -> when it is back."""

    @property
    def next(self) -> float:
        """When the next node is back; infinite where none is away."""
        return min(self._repaired.values(), default=inf)

    def struck(self, group: int, now: float) -> list[int]:
        """A group is interrupted that trained, or learned, with all its nodes; returns the groups that have all of
        theirs again, and had not before."""
        if self._rng.random() < self._taken_out:
            nodes = self._places.nodes_of(group)
            mean = log(self._repair) - REPAIR_SIGMA**2 / 2
            self._repaired[nodes[self._rng.integers(len(nodes))]] = now + self._rng.lognormal(mean, REPAIR_SIGMA)
        self._waiting.add(group)
        return self._look(group)

    def back(self, now: float) -> list[int]:
        """Nodes come back whose repair is over by now; returns the groups that have all of theirs again."""
        for node in [node for node, at in self._repaired.items() if at <= now]:
            del self._repaired[node]
        return [whole for group in sorted(self._waiting) if group in self._waiting for whole in self._look(group)]

    def _look(self, group: int) -> list[int]:
        here = self._names.keys() - self._repaired.keys()
        found = look_at_nodes(self._places, group, JobNodes(self._names, here), lambda _: {})
        whole = {*found.moves, group} - ({group} if found.fault else set())
        self._waiting -= whole
        return sorted(whole)


def lost_share(figures: NodeFigures, spares: int, salvage: bool, seed: int, days: float = DAYS) -> float:
    """The share of the groups' time that is lost in one trial of so many days, which begins with all nodes fit."""
    rng = np.random.default_rng(seed)
    size, repair = figures.nodes_per_group, figures.repair_h
    nodes = BrokenNodes(figures.groups, size, spares, repair, taken_out=figures.taken_out, salvage=salvage, rng=rng)
    live, starts = set(range(figures.groups)), dict[int, float]()
    now_h, lost_h, end_h = 0.0, 0.0, 24 * days
    while now_h < end_h:
        breaks_h = now_h + rng.exponential(figures.mtbf_h / (len(live) * size)) if live else inf
        back_h = nodes.next
        next_h = min([breaks_h, back_h, end_h, *starts.values()])
        lost_h += (figures.groups - len(live)) * (next_h - now_h)
        now_h = next_h
        for group in [group for group, at_h in starts.items() if at_h <= now_h]:
            del starts[group]
            live.add(group)
        whole = nodes.back(now_h) if back_h <= now_h else []
        if breaks_h == now_h:
            group = sorted(live)[rng.integers(len(live))]
            live.remove(group)
            whole += nodes.struck(group, now_h)
        starts |= dict.fromkeys(whole, now_h + figures.restart_h)
    return lost_h / (end_h * figures.groups)


def trials_for(figures: NodeFigures) -> int:
    """As many trials as have some 1500 interruptions together, at most 200: repairs are so unlike that the mean is then
    known to 5%."""
    each = 24 * DAYS * figures.groups * figures.nodes_per_group / figures.mtbf_h
    return max(3, min(200, ceil(1500 / each)))


def mean_lost_share(figures: NodeFigures, spares: int, salvage: bool, trials: int, days: float = DAYS) -> float:
    """The mean over trials with the seeds from 0 on."""
    return float(np.mean([lost_share(figures, spares, salvage, seed, days) for seed in range(trials)]))
