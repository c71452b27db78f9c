"""Simulates the nodes of a job that break and are repaired, with the places of groups as the launcher gives them
(:mod:`spare_megatron.launch.slurm_places`): which share of the groups' time is lost, with so many spare nodes.

A node breaks only while its group trains. Those that are repaired come back to the job. Steps, redundancy and
checkpoints are not here: a group that is away costs its share of the job and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import log

import numpy as np

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


def lost_share(figures: NodeFigures, spares: int, salvage: bool, seed: int, days: float = DAYS) -> float:
    """The share of the groups' time that is lost in one trial of so many days, which begins with all nodes fit."""
    size, total = figures.nodes_per_group, figures.groups * figures.nodes_per_group + spares
    allocation = Allocation("", total, figures.groups * size, tasks_of_nodes=(1,) * total)
    places = (SlurmPlaces if salvage else WithoutSalvage)(allocation, size)
    names, rng = {node: str(node) for node in range(total)}, np.random.default_rng(seed)
    live, waiting = set(range(figures.groups)), set[int]()
    starts: dict[int, float] = {}
    """Group -> when it trains again."""
    repaired: dict[int, float] = {}
    """Broken node -> when it is back."""
    now_h, lost_h, end_h = 0.0, 0.0, 24 * days

    def look(group: int) -> None:
        found = look_at_nodes(places, group, JobNodes(names, names.keys() - repaired.keys()), lambda _: {})
        for one in {*found.moves, group} - ({group} if found.fault else set()):
            waiting.discard(one)
            starts[one] = now_h + figures.restart_h

    while now_h < end_h:
        rate = len(live) * size / figures.mtbf_h
        breaks_h = now_h + rng.exponential(1 / rate) if live else float("inf")
        next_h = min([breaks_h, end_h, *starts.values(), *repaired.values()])
        lost_h += (figures.groups - len(live)) * (next_h - now_h)
        now_h = next_h
        for group in [group for group, at_h in starts.items() if at_h <= now_h]:
            del starts[group]
            live.add(group)
        back = [node for node, at_h in repaired.items() if at_h <= now_h]
        for node in back:
            del repaired[node]
        if breaks_h == now_h:
            group = sorted(live)[rng.integers(len(live))]
            live.remove(group)
            if rng.random() < figures.taken_out:
                node = places.nodes_of(group)[rng.integers(size)]
                mean = log(figures.repair_h) - REPAIR_SIGMA**2 / 2
                repaired[node] = now_h + rng.lognormal(mean, REPAIR_SIGMA)
            waiting.add(group)
            look(group)
        if back:
            for group in sorted(waiting):
                if group in waiting:
                    look(group)
    return lost_h / (end_h * figures.groups)


def trials_for(figures: NodeFigures) -> int:
    """As many trials as take some seconds: larger jobs have more losses in each."""
    return max(3, min(20, 1500 // (figures.groups * figures.nodes_per_group)))


def mean_lost_share(figures: NodeFigures, spares: int, salvage: bool, trials: int, seed: int = 0) -> float:
    """The mean over trials with the seeds from ``seed`` on."""
    return float(np.mean([lost_share(figures, spares, salvage, seed + trial) for trial in range(trials)]))
