"""On which nodes of a Slurm allocation each group runs, which of them are spare, and where a group moves. Pure.

Nodes have numbers, in the order of the allocation; a node has a place for each of its ranks. The first groups fill node
after node; what is left over is spare. Promises:

* A place is given to one rank at a time, and a group keeps its places until it moves.
* A node that has failed LEFT_OUT_AFTER times within WITHIN_S is left out, as far as others can take its groups.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from spare_megatron.config.allocation import Allocation
from spare_megatron.launch.group_restarts import WITHIN_S

LEFT_OUT_AFTER = 3
NodePlace = tuple[int, int]
"""(node, number of the place on it)."""


class SlurmPlaces:
    """The places of all groups. Thread-safe."""

    def __init__(self, allocation: Allocation, size: int) -> None:
        self._rooms, self._lock = allocation.tasks_of_nodes, threading.Lock()
        groups = allocation.ranks // size
        self._places = {group: allocation.places_of(group, size) for group in range(groups)}
        self._failed: dict[int, list[float]] = {}
        """Node -> when groups on it were lost."""

    def of(self, group: int) -> tuple[NodePlace, ...]:
        """The places of a group's ranks, by position."""
        return self._places[group]

    def nodes_of(self, group: int) -> list[int]:
        """The nodes of a group, each once, in the order of its ranks."""
        return list(dict.fromkeys(node for node, _ in self._places[group]))

    @property
    def has_room(self) -> bool:
        """Whether any place is free."""
        return sum(self._rooms) > sum(map(len, self._places.values()))

    def lost(self, group: int, now_s: float) -> None:
        """Note that a group was lost on its nodes."""
        for node in self.nodes_of(group):
            before = [at_s for at_s in self._failed.get(node, ()) if at_s > now_s - WITHIN_S]
            self._failed[node] = [*before, now_s]

    def failing(self, nodes: Collection[int]) -> list[int]:
        """Those of the nodes that have failed too often."""
        return [node for node in nodes if len(self._failed.get(node, ())) >= LEFT_OUT_AFTER]

    def move(self, group: int, away: Collection[int], usable: Collection[int]) -> dict[int, int]:
        """Give the ranks that a group has on the nodes ``away`` places on others of ``usable``: node -> its
        replacement. Empty, and nothing is changed, where there is not enough room."""
        with self._lock:
            old = self._places[group]
            others = [place for other, places in self._places.items() if other != group for place in places]
            taken = {*others, *(place for place in old if place[0] not in away)}
            moves: dict[int, int] = {}
            places = list(old)
            for node in dict.fromkeys(node for node, _ in old if node in away):
                mine = [index for index, place in enumerate(old) if place[0] == node]
                found = self._room(len(mine), mine[0] == 0, taken, set(usable) - set(away))
                if found is None:
                    return {}
                for index, place in zip(mine, found, strict=True):
                    places[index] = place
                taken |= set(found)
                moves[node] = found[0][0]
            self._places[group] = tuple(places)
            return moves

    def _room(
        self, count: int, first: bool, taken: Collection[NodePlace], usable: Collection[int]
    ) -> list[NodePlace] | None:
        """``count`` free places in a row on one node, where most are free. Only the ``first`` node of a group may have
        other ranks before it (SPARE_LOCAL_RANK_FROM)."""
        free = {}
        for node in sorted(usable):
            begin = 1 + max([place for other, place in taken if other == node], default=-1)
            if self._rooms[node] - begin >= count and (first or not begin):
                free[node] = begin
        if not free:
            return None
        node = min(free, key=lambda one: (free[one], one))
        return [(node, free[node] + number) for number in range(count)]
