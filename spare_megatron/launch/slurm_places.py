"""On which nodes of a Slurm allocation each group runs, which of them are spare, and where a group moves. Pure.

Nodes have numbers, in the order of the allocation; a node has a place for each of its ranks. The first groups fill node
after node; what is left over is spare. Promises:

* A place is given to one rank at a time, and a group keeps its places until it moves, or gives one.
* A node that Slurm has out of service is taken last.
* A node that has failed LEFT_OUT_AFTER times within WITHIN_S is left out, as far as others can take its groups.
* *Salvage*: of the groups that wait for nodes, the one that misses the fewest is completed from spare nodes, then from
  fit nodes of the one that misses most (of equals, the lower number is completed and the higher one gives), and only if
  that makes it whole. Where each node has ranks of one group only, and all nodes have as many, the groups that have all
  their nodes are then min(N, fit nodes / nodes of a group), rounded down.
* Who gives a node has the lost one in its place, so it is whole again when that one is repaired. No group is both
  completed and a giver, so nodes do not go in circles.
* A group that runs with fewer pipeline stages on some of its nodes gives its other fit ones like a group that waits,
  and is not completed before it has left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.config.allocation import Allocation
from spare_megatron.launch.group_restarts import WITHIN_S

LEFT_OUT_AFTER = 3
NodePlace = tuple[int, int]
"""(node, number of the place on it)."""
_Places = dict[int, tuple[NodePlace, ...]]


@dataclass(frozen=True)
class Move:
    """One node that takes the place of another one in a group."""

    node: int
    """The one that is lost to the group."""
    other: int
    """Its replacement."""
    why: str
    """Why the group cannot go on on ``node``."""
    giver: int | None = None
    """The group that ``other`` was of; None for a spare node."""


class SlurmPlaces:
    """The places of all groups. Thread-safe."""

    def __init__(self, allocation: Allocation, size: int) -> None:
        self._rooms, self._lock = list(allocation.tasks_of_nodes), threading.Lock()
        self.racks: Mapping[int, str] = {}
        """The rack of each node, where that is known; a node near the others of a group is taken first."""
        self.last: Collection[int] = ()
        """Nodes that are taken only where no other is free: Slurm has them out of service."""
        groups = allocation.ranks // size
        self._places = {group: allocation.places_of(group, size) for group in range(groups)}
        self._failed: dict[int, list[float]] = {}
        """Node -> when groups on it were lost."""
        self.resting: frozenset[int] = frozenset()
        """Nodes that a drained group has left: nothing is started on them."""
        self._waiting: dict[int, dict[int, str]] = {}
        """Group that waits for nodes -> nodes, its own and others, on which it cannot run, and why."""
        self._used: dict[int, frozenset[int]] = {}
        """Those of them that run in a smaller shape meanwhile -> the nodes that have their ranks."""

    def of(self, group: int) -> tuple[NodePlace, ...]:
        """The places of a group's ranks, by position."""
        return self._places[group]

    def nodes_of(self, group: int) -> list[int]:
        """The nodes of a group, each once, in the order of its ranks."""
        return list(dict.fromkeys(node for node, _ in self._places[group]))

    @property
    def has_room(self) -> bool:
        """Whether any place is free on which something may be started."""
        taken = Counter(node for places in self._places.values() for node, _ in places)
        return any(room > taken[number] for number, room in enumerate(self._rooms) if number not in self.resting)

    def add_node(self, room: int) -> int:
        """A node comes, with so many free places; returns its number."""
        with self._lock:
            self._rooms.append(room)
            return len(self._rooms) - 1

    def close_node(self, node: int) -> None:
        """A node that came has left: who has places there moves or waits."""
        self._rooms[node] = 0

    def waiting(self) -> dict[int, list[int]]:
        """Groups that wait for nodes -> their nodes that cannot run them."""
        with self._lock:
            return {
                group: [node for node in self.nodes_of(group) if node in unfit]
                for group, unfit in self._waiting.items()
            }

    def lost(self, group: int, now_s: float) -> None:
        """Note that a group was lost on its nodes."""
        for node in self.nodes_of(group):
            before = [at_s for at_s in self._failed.get(node, ()) if at_s > now_s - WITHIN_S]
            self._failed[node] = [*before, now_s]

    def failing(self, nodes: Collection[int]) -> list[int]:
        """Those of the nodes that have failed too often."""
        return [node for node in nodes if len(self._failed.get(node, ())) >= LEFT_OUT_AFTER]

    def move(
        self, group: int, away: Collection[int], usable: Collection[int], rest: Collection[int] = ()
    ) -> dict[int, int]:
        """Give the ranks that a group has on the nodes ``away`` places on others of ``usable``: node -> its
        replacement. Empty, and nothing is changed, where there is not enough room. Those of ``rest`` that it leaves
        are resting from now on."""
        with self._lock:
            after = dict(self._places)
            moves: dict[int, int] = {}
            for node in self.nodes_of(group):
                if node in away:
                    other = self._to_spare(after, group, node, set(usable) - set(away) - self.resting)
                    if other is None:
                        return {}
                    moves[node] = other
            self._places = after
            self.resting |= moves.keys() & set(rest)
            return moves

    def could_move(self, group: int, away: Collection[int], usable: Collection[int]) -> bool:
        """Whether :meth:`move` would find places for them all; changes nothing."""
        with self._lock:
            after, there = dict(self._places), set(usable) - set(away) - self.resting
            return all(self._to_spare(after, group, node, there) is not None for node in away)

    # ------------------------------------------------------------------------------------------------------- salvage

    def waits(self, group: int, unfit: Mapping[int, str]) -> None:
        """A look has found nodes on which a group cannot run, and why, and has left no process of it on its others."""
        with self._lock:
            self._waiting[group] = dict(unfit)

    def waits_no_more(self, group: int) -> None:
        """A group is looked at again, is started or is given up: from now on it neither gives nor takes nodes."""
        with self._lock:
            self._waiting.pop(group, None)
            self._used.pop(group, None)

    def smaller(
        self, group: int, fit: Collection[int], shapes: Iterable[tuple[int, int]]
    ) -> tuple[int, Sequence[NodePlace]] | None:
        """Let a group that waits run in the first of ``shapes``, (pipeline stages, ranks), for which its ``fit`` nodes
        have places enough: its stages, and these places. None, and nothing is changed, where they have not."""
        with self._lock:
            there = [place for place in self._places[group] if place[0] in fit]
            for stages, needed in shapes:
                if needed <= len(there):
                    self._used[group] = frozenset(node for node, _ in there[:needed])
                    return stages, there[:needed]
        return None

    def missed_at_home(self, group: int) -> list[int]:
        """The nodes on which a group in a smaller shape has no rank, and would have one in its home shape."""
        return [node for node in self.nodes_of(group) if node not in self._used.get(group, ())]

    def still_misses(self, group: int, unfit: Mapping[int, str]) -> None:
        """Another look at what a group in a smaller shape misses: its other nodes are fit and can be given."""
        with self._lock:
            if group in self._used:
                self._waiting[group] = dict(unfit)

    def salvage(self, usable: Collection[int], drained: Collection[int] = ()) -> dict[int, list[Move]]:
        """Complete groups that wait, as many as the ``usable`` nodes allow: group -> how it is whole now. Such a group
        waits no more. ``drained`` groups neither give nor take."""
        done: dict[int, list[Move]] = {}
        with self._lock:
            while found := self._one_more(set(usable) - self.resting, drained):
                group, moves, after = found
                for move in moves:
                    if move.giver is not None:
                        self._waiting[move.giver][move.node] = move.why
                del self._waiting[group]
                self._places, done[group] = after, moves
        return done

    def _one_more(self, usable: Collection[int], drained: Collection[int]) -> tuple[int, list[Move], _Places] | None:
        """The next group to complete, how, and the places of all groups after that."""
        waiting = sorted(set(self._waiting) - set(drained), key=lambda group: (len(self._missed(group, usable)), group))
        known_bad = {node for group in waiting for node in self._waiting[group]}
        for group in [group for group in waiting if group not in self._used]:
            after, moves = dict(self._places), list[Move]()
            givers = [other for other in reversed(waiting) if other != group]
            for node in self._missed(group, usable):
                why = self._waiting[group].get(node, "it is no node of the job any more")
                other, giver = self._to_spare(after, group, node, set(usable) - known_bad), None
                if other is None:
                    other, giver = self._from_another(after, group, node, givers, usable)
                if other is None:
                    break
                moves.append(Move(node, other, why, giver))
            else:
                return group, moves, after
        return None

    def _missed(self, group: int, usable: Collection[int]) -> list[int]:
        """The nodes of a group that waits on which it cannot run."""
        return [node for node in self.nodes_of(group) if node in self._waiting[group] or node not in usable]

    def _from_another(
        self, places: _Places, group: int, node: int, givers: Collection[int], usable: Collection[int]
    ) -> tuple[int | None, int | None]:
        """Exchange the places of a group on a node with those that the first of ``givers`` that can has on a fit one,
        in ``places``; returns that node and the giver."""
        mine = _on(places[group], node)
        for giver in givers:
            for other in self._nearest(places[group], node, dict.fromkeys(one for one, _ in places[giver])):
                theirs = _on(places[giver], other)
                if (
                    other in usable
                    and not {other} & (self._waiting[giver].keys() | self._waiting[group].keys())
                    and other not in self._used.get(giver, ())
                    and len(theirs) == len(mine)
                    and not (_on(places[group], other) or _on(places[giver], node))
                    and (theirs[0] == places[giver][0] or not mine[0][1])
                    and (mine[0] == places[group][0] or not theirs[0][1])
                ):
                    places[group], places[giver] = (
                        _exchanged(places[group], mine, theirs),
                        _exchanged(places[giver], theirs, mine),
                    )
                    return other, giver
        return None, None

    # -------------------------------------------------------------------------------------------------------- spares

    def _to_spare(self, places: _Places, group: int, node: int, usable: Collection[int]) -> int | None:
        """Put the ranks that a group has on a node on a spare one, in ``places``; returns that one."""
        mine = _on(places[group], node)
        elsewhere = set(usable).difference(one for one, _ in places[group])
        begins = self._room(len(mine), mine[0] == places[group][0], places, elsewhere)
        others = self._nearest(places[group], node, sorted(begins, key=lambda one: (begins[one], one)))
        if not others:
            return None
        found = [(others[0], begins[others[0]] + index) for index in range(len(mine))]
        places[group] = _exchanged(places[group], mine, found)
        return others[0]

    def _nearest(self, places: tuple[NodePlace, ...], node: int, others: Iterable[int]) -> list[int]:
        """Nodes that could take the place of one of a group's, those in a rack of the rest of the group first, and last
        those that are out of service."""
        near = {self.racks.get(one) for one, _ in places if one != node} - {None}
        return sorted(others, key=lambda one: (one in self.last, bool(self.racks) and self.racks.get(one) not in near))

    def _room(self, count: int, first: bool, places: _Places, usable: Collection[int]) -> dict[int, int]:
        """The nodes with ``count`` free places in a row behind all that are taken -> the first of these. Only the
        ``first`` node of a group may have other ranks before it (SPARE_LOCAL_RANK_FROM)."""
        begins = dict.fromkeys(usable, 0)
        for of_one in places.values():
            for node, place in of_one:
                if begins.get(node, place) < place + 1 and node in begins:
                    begins[node] = place + 1
        rooms = self._rooms
        return {node: at for node, at in begins.items() if rooms[node] - at >= count and (first or not at)}


def _on(places: tuple[NodePlace, ...], node: int) -> list[NodePlace]:
    """Those of a group's places that are on a node; they are in a row."""
    return [place for place in places if place[0] == node]


def _exchanged(places: tuple[NodePlace, ...], old: list[NodePlace], new: list[NodePlace]) -> tuple[NodePlace, ...]:
    """``places`` with others in place of ``old``."""
    changed = dict(zip(old, new, strict=True))
    return tuple(changed.get(place, place) for place in places)
