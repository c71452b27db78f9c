"""Simulates the nodes of a job that break and are repaired, with the places of groups as the launcher gives them
(:mod:`spare_megatron.launch.slurm_places`): which share of the groups' time is lost, with so many spare nodes.

A node breaks only while it trains. Those that are repaired come back to the job. In :func:`lost_share` steps,
redundancy and checkpoints are left out: a group that is away costs its share of the job and nothing else, and one with
fewer pipeline stages costs what its largest stage has more layers than at home, as where relief gives each group as
much work as it can do. Where the number of layers is not given, each of s stages has 1 / s of the model.
:func:`restarted_lost_share` is the job without this framework: each interruption restarts it from its checkpoint, with
as many groups as there are fit nodes for.

Trials begin with all nodes fit, and are counted from ``WARM_UP`` mean repairs on, so the shares are those of long jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import ceil, inf, log, sqrt

import numpy as np
from numpy.random import Generator

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.launch.node_looks import JobNodes, look_at_nodes
from spare_megatron.launch.slurm_places import Move, SlurmPlaces

REPAIR_SIGMA = 1.0
"""Of the logarithm of a repair's time: one in forty takes four times the mean or longer."""
DAYS = 30.0
WARM_UP = 5.0
"""After so many mean repairs as many nodes are away as in the long run: of a lognormal repair of this sigma the mean
time that is left at a random moment is exp(sigma^2) / 2 = 1.4 means."""


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
    stages: int = 1
    """Pipeline stages of a group."""
    shapes: tuple[int, ...] = ()
    """Stages with which a group may come back that misses nodes, the most first; empty: it waits."""
    layers: int | None = None
    """Of the model, which cannot be divided further."""

    def __post_init__(self) -> None:
        for name in ("groups", "nodes_per_group", "mtbf_h", "repair_h"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be a finite number above 0")
        if not 0 <= self.taken_out <= 1 or not 0 <= self.restart_h < float("inf"):
            raise ConfigError(
                f"the share of interruptions that take a node out is {self.taken_out:g} and a group's restart takes "
                f"{self.restart_h:g} h; give a share from 0 to 1 and a time of at least 0"
            )

    def at_home(self) -> NodeFigures:
        """The same job where groups that miss nodes wait for them."""
        return replace(self, shapes=())

    def speed_with(self, stages: int) -> float:
        """The speed of a group with so many pipeline stages, as a share of that at home."""
        if self.layers is None:
            return stages / self.stages
        return ceil(self.layers / self.stages) / ceil(self.layers / stages)

    def nodes_with(self, stages: int) -> int:
        """The nodes that a group needs with so many pipeline stages."""
        return ceil(self.nodes_per_group * stages / self.stages)


class WithoutSalvage(SlurmPlaces):
    """Groups that wait give nothing to each other."""

    def salvage(self, usable: Collection[int], drained: Collection[int] = ()) -> dict[int, list[Move]]:
        """Nobody is completed."""
        return {}


Starts = dict[int, int]
"""Group -> the pipeline stages with which it is started now, having left before where it trained."""


class BrokenNodes:
    """The nodes of a job of which some are under repair, and the groups that miss them. Times in the unit of a
    repair."""

    def __init__(self, figures: NodeFigures, spares: int, repair: float, rng: Generator, *, salvage: bool) -> None:
        """``repair`` is the mean time of a repair."""
        self._figures, self._repair, self._rng, self._spares = figures, repair, rng, spares
        total = figures.groups * figures.nodes_per_group + spares
        ranks = figures.groups * figures.nodes_per_group
        allocation = Allocation("", total, ranks, tasks_of_nodes=(1,) * total)
        self._places = (SlurmPlaces if salvage else WithoutSalvage)(allocation, figures.nodes_per_group)
        self._shapes = [(one, figures.nodes_with(one)) for one in figures.shapes]
        self._names = {node: str(node) for node in range(total)}
        self._waiting: set[int] = set()
        self._smaller: set[int] = set()
        self._repaired: dict[int, float] = {}
        """Broken node -> when it is back."""

    @property
    def next(self) -> float:
        """When the next node is back; infinite where none is away."""
        return min(self._repaired.values(), default=inf)

    def used(self, group: int) -> list[int]:
        """The nodes on which a group that does not wait runs."""
        nodes = self._places.nodes_of(group)
        missed = self._places.missed_at_home(group) if group in self._smaller else ()
        return [node for node in nodes if node not in missed]

    def struck(self, group: int, now: float) -> Starts:
        """A group is interrupted that trained, or learned; returns who is started now."""
        if self._rng.random() < self._figures.taken_out:
            nodes = self.used(group)
            mean = log(self._repair) - REPAIR_SIGMA**2 / 2
            self._repaired[nodes[self._rng.integers(len(nodes))]] = now + self._rng.lognormal(mean, REPAIR_SIGMA)
        self._smaller.discard(group)
        self._waiting.add(group)
        return self._look([group, *sorted(self._waiting - {group})])

    def back(self, now: float) -> Starts:
        """Nodes come back whose repair is over by now; returns who is started now."""
        for node in [node for node, at in self._repaired.items() if at <= now]:
            del self._repaired[node]
        return self._look(sorted(self._waiting)) | self._go_home()

    def _look(self, groups: Iterable[int]) -> Starts:
        """What the launcher does for groups that wait."""
        here, starts = self._names.keys() - self._repaired.keys(), Starts()
        for group in groups:
            if group not in self._waiting:
                continue
            found = look_at_nodes(self._places, group, JobNodes(self._names, here), lambda _: {})
            whole = {*found.moves, group} - ({group} if found.fault else set())
            starts |= dict.fromkeys(sorted(whole), self._figures.stages)
            if found.fault is not None and (shape := self._places.smaller(group, found.fit, self._shapes)):
                starts[group] = shape[0]
                self._smaller.add(group)
                whole.add(group)
            self._waiting -= whole
        return starts

    def _go_home(self) -> Starts:
        """What the launcher does for groups in smaller shapes whose other nodes are fit, or can be replaced."""
        here, starts = self._names.keys() - self._repaired.keys(), Starts()
        for group in sorted(self._smaller):
            away = {node: "" for node in self._places.missed_at_home(group) if node not in here}
            if not away or (self._spares and self._places.could_move(group, away.keys(), here)):
                self._smaller.discard(group)
                self._waiting.add(group)
                starts |= self._look([group])
            else:
                self._places.still_misses(group, away)
        return starts


def lost_share(figures: NodeFigures, spares: int, salvage: bool, seed: int, days: float = DAYS) -> float:
    """The share of the groups' time that is lost in one trial of so many days."""
    rng = np.random.default_rng(seed)
    nodes = BrokenNodes(figures, spares, figures.repair_h, rng, salvage=salvage)
    speeds, sizes = np.ones(figures.groups), np.full(figures.groups, figures.nodes_per_group)
    starts = dict[int, tuple[float, int]]()
    """Group -> when it trains, and with how many stages."""
    now_h, lost_h, from_h = 0.0, 0.0, WARM_UP * figures.repair_h
    end_h = from_h + 24 * days
    while now_h < end_h:
        used = int(sizes.sum())
        breaks_h = now_h + rng.exponential(figures.mtbf_h / used) if used else inf
        back_h = nodes.next
        next_h = min([breaks_h, back_h, end_h, *(at_h for at_h, _ in starts.values())])
        lost_h += float((1 - speeds).sum()) * max(0.0, next_h - max(now_h, from_h))
        now_h = next_h
        for group in [group for group, (at_h, _) in starts.items() if at_h <= now_h]:
            stages = starts.pop(group)[1]
            speeds[group], sizes[group] = figures.speed_with(stages), figures.nodes_with(stages)
        begun = nodes.back(now_h) if back_h <= now_h else {}
        if breaks_h == now_h:
            group = int(np.searchsorted(sizes.cumsum(), rng.integers(used), side="right"))
            begun |= nodes.struck(group, now_h)
            speeds[group] = sizes[group] = 0
        for group, stages in begun.items():
            speeds[group] = sizes[group] = 0
            starts[group] = now_h + figures.restart_h, stages
    return lost_h / (24 * days * figures.groups)


@dataclass(frozen=True)
class CheckpointRestarts:
    """A job whose groups all restart from the last checkpoint at each interruption. Times in hours."""

    restart_h: float
    save_h: float
    """Time for which training waits for a save."""
    interval_h: float
    """Training time between two saves."""

    @staticmethod
    def at_best(figures: NodeFigures, restart_h: float, save_h: float) -> CheckpointRestarts:
        """With Young's interval, (2 save m)^0.5, where m is the mean time between two interruptions of the job (J. W.
        Young, Commun. ACM 17, 1974)."""
        mtbf_h = figures.mtbf_h / (figures.groups * figures.nodes_per_group)
        return CheckpointRestarts(restart_h, save_h, sqrt(2 * save_h * mtbf_h))


def restarted_lost_share(
    figures: NodeFigures, spares: int, costs: CheckpointRestarts, seed: int, days: float = DAYS
) -> float:
    """The share of the groups' time that is lost in one trial of a job without this framework. It trains with as many
    groups as it finds fit nodes for, wherever they are, and saves and restarts when there are enough for one more."""
    rng = np.random.default_rng(seed)
    total, size = figures.groups * figures.nodes_per_group + spares, figures.nodes_per_group
    mean = log(figures.repair_h) - REPAIR_SIGMA**2 / 2
    backs: list[float] = []
    from_h = WARM_UP * figures.repair_h
    now_h, done_h, end_h = 0.0, 0.0, from_h + 24 * days

    def possible() -> int:
        while backs and backs[0] <= now_h:
            heapq.heappop(backs)
        return min(figures.groups, (total - len(backs)) // size)

    while now_h < end_h:
        running, began_h = possible(), now_h
        breaks_h = now_h + rng.exponential(figures.mtbf_h / (running * size)) if running else inf
        while now_h < min(breaks_h, end_h) and possible() <= running:
            now_h = min(breaks_h, end_h, backs[0] if backs else inf)
        trained_h = now_h - max(began_h, from_h)
        if now_h == breaks_h:
            if rng.random() < figures.taken_out:
                heapq.heappush(backs, now_h + rng.lognormal(mean, REPAIR_SIGMA))
            trained_h -= min(now_h - began_h, costs.interval_h * rng.random())
        done_h += running * max(0.0, trained_h) / (1 + costs.save_h / max(costs.interval_h, 1e-9))
        now_h += costs.restart_h if running else 0.0
    return 1 - done_h / (24 * days * figures.groups)


def trials_for(figures: NodeFigures) -> int:
    """As many trials as have some 600 interruptions together, at most 100: repairs are so unlike that the mean is then
    known to 8%."""
    each = 24 * DAYS * figures.groups * figures.nodes_per_group / figures.mtbf_h
    return max(3, min(100, ceil(600 / each)))


def mean_lost_share(figures: NodeFigures, spares: int, salvage: bool, trials: int, days: float = DAYS) -> float:
    """The mean over trials with the seeds from 0 on."""
    return float(np.mean([lost_share(figures, spares, salvage, seed, days) for seed in range(trials)]))


def mean_restarted_lost_share(figures: NodeFigures, spares: int, costs: CheckpointRestarts, trials: int) -> float:
    """The mean over trials with the seeds from 0 on."""
    return float(np.mean([restarted_lost_share(figures, spares, costs, seed) for seed in range(trials)]))
