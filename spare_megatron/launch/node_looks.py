"""Looks at the nodes of a lost group and finds others for those that cannot run it: spare ones, or fit ones of groups
that wait for nodes too. Pure but for the check of nodes that it is given.

Promises: a group has a fault, or each of its nodes has passed the check of this look. The check kills what is left of
the group there, so what a group that waits gives to another one is free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.slurm_places import Move, SlurmPlaces

CheckNodes = Callable[[Collection[int]], Mapping[int, HealthFault]]
"""Sweeps nodes and checks them; returns why some cannot run the group."""


@dataclass(frozen=True)
class JobNodes:
    """What is known of the nodes of a job, which are numbered, before any is asked."""

    names: Mapping[int, str]
    here: Collection[int]
    """Those that are the job's now."""
    drained: Collection[int] = ()
    """Groups that are drained."""
    lent: Collection[int] = ()
    """Those that were lent to the job."""
    left: Collection[int] = ()
    """Where the group that is looked at must not be again: it was drained there, or its results were wrong."""
    wrong: str = ""
    """How they were wrong; empty: it was drained."""

    def gone(self, node: int) -> HealthFault:
        """Why nothing can be started on a node that is not ``here``."""
        name = self.names[node]
        if node in self.lent:
            return HealthFault("gone", f"the lent node {name} has left")
        return HealthFault("gone", f"Slurm does not name {name} as a node of the job")


@dataclass
class NodesLook:
    """What a look has found and changed."""

    fault: HealthFault | None = None
    """Why the group cannot be started now."""
    moves: dict[int, list[Move]] = field(default_factory=dict)
    """How groups, this one or others that waited, have other nodes than before."""
    fit: Collection[int] = ()
    """With a fault: the group's nodes that can run it."""


def look_at_nodes(places: SlurmPlaces, group: int, nodes: JobNodes, check: CheckNodes) -> NodesLook:
    """Look at the nodes of a group that has no live process, and change ``places`` where that makes it whole, or
    another one that waits."""
    places.waits_no_more(group)
    usable, names = set(nodes.here) - places.resting, nodes.names
    left = set(nodes.left)
    look, fit, unfit = NodesLook(), set[int](), dict[int, HealthFault]()

    def checked(some: Collection[int]) -> None:
        if some:
            found = check(some)
            unfit.update(found)
            fit.update(set(some) - found.keys())

    while True:
        mine = places.nodes_of(group)
        for node in set(mine) - usable:
            unfit[node] = nodes.gone(node)
        for node in left.intersection(mine):
            why = f"its results were wrong on {names[node]}: {nodes.wrong}" if nodes.wrong else ""
            unfit[node] = HealthFault("node", why or f"{names[node]} is drained")
        for node in places.failing(set(mine) - unfit.keys() - fit):
            unfit[node] = HealthFault("node", f"{names[node]} has failed too often")
        checked([node for node in mine if node not in unfit.keys() | fit])
        away = [node for node in mine if node in unfit]
        moves = places.move(group, unfit.keys(), usable, left) if away else {}
        if moves:
            reported = [Move(node, other, unfit[node].sentence) for node, other in moves.items()]
            look.moves[group] = [*look.moves.get(group, ()), *reported]
            continue
        # nothing is spare for nodes that fail often, so they are used as long as they are fit
        often = [node for node in places.failing(away) if node in usable - left]
        for node in often:
            del unfit[node]
        checked(often)
        away = [node for node in mine if node in unfit]
        if not away:
            return look
        if not left:
            places.waits(group, {node: fault.sentence for node, fault in unfit.items()})
        # nor is a node spare that this look has found unfit, though the group has left it
        whole = places.salvage(usable - unfit.keys(), nodes.drained)
        for one, changes in whole.items():
            look.moves[one] = [*look.moves.get(one, ()), *changes]
        if group not in whole:
            look.fault = unfit[away[0]]
            look.fit = fit.intersection(places.nodes_of(group))
            return look
