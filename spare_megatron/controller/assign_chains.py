"""Least-cost re-distribution of shards over their hosts, by augmenting chains from the present owners.

The problem is a transport with convex costs: every shard has U units to be owned by its live hosts, no group may own
more than a cap. Present ownership is kept where possible: giving up a unit that was owned costs a move; taking a
further one is free or costs a small extra. Chains are successive shortest paths (Ahuja, Magnanti, Orlin, *Network
Flows*, ch. 9.7): one vectorised Bellman-Ford gives every node's distance to a group with room, then each waiting unit
walks along arcs on which that distance is exact, and so on until nothing waits. The result has the least total cost at
that cap; or there is a certificate that the cap is too small (Hall's condition fails).

Arrays are layer-major, [r, N]. In a *shard table* entry [l, i] is about shard i on its host of layer l; in a *group
table* entry [l, g] is about group g and its shard of layer l.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntTable = NDArray[np.int64]
_NEVER = 1 << 60


@dataclass(frozen=True)
class Shortage:
    """Why a cap is too small: these shards have no live hosts but these groups, whose caps do not hold them."""

    shards: tuple[int, ...]
    groups: tuple[int, ...]
    least_cap: int
    """No plan has a smaller largest load: units of the shards / number of the groups, rounded up."""


class Chains:
    """One re-distribution at one cap: call ``run`` once."""

    def __init__(
        self,
        hosts: NDArray[np.int32],
        stacks: NDArray[np.int32],
        live: NDArray[np.bool_],
        kept: IntTable,
        units: int,
        cap: int,
        extra: IntTable | None = None,
    ) -> None:
        """``hosts`` shard table, ``stacks`` group table, ``live`` [N]; ``kept`` shard table: units that live groups
        own now; ``units`` U; ``extra`` shard table in {0, 1}: cost of a unit beyond ``kept`` (default 0)."""
        redundancy, num_groups = hosts.shape
        self.hosts, self.stacks, self.live, self.kept = hosts, stacks, live, kept
        self.units, self.cap = units, cap
        self.owned = kept.copy()
        # A length is cost * hop + 1: among the cheapest chains the one of fewest hops, and no cycle of length 0.
        self.hop = 4 * num_groups
        # One move outweighs all extras that a whole plan can have.
        self.move = 1 if extra is None else num_groups * units + 1
        self.extra = np.zeros_like(kept) if extra is None else extra
        self.take: IntTable = np.where(live[hosts], self.extra * self.hop + 1, _NEVER)
        give = np.where(kept > 0, self.move * self.hop + 1, _NEVER)
        self.give: IntTable = give[np.arange(redundancy)[:, None], stacks]
        load = np.bincount(hosts.ravel(), weights=kept.ravel(), minlength=num_groups).astype(np.int64)
        self.room: IntTable = np.where(live, cap - load, 0)
        self.waiting: IntTable = units - kept.sum(axis=0)
        # [2 N, r] in bytes: whether a node's distance is that over its arc of a layer (shards first, then groups).
        self._exact = bytearray()

    def run(self) -> IntTable | Shortage:
        """The owned units (shard table) of least cost within the cap."""
        while True:
            shards = np.flatnonzero(self.waiting).tolist()
            groups = np.flatnonzero(self.room < 0).tolist()
            if not shards and not groups:
                return self.owned
            self._measure()
            if any(self.shard_far[i] == _NEVER for i in shards) or any(self.group_far[g] == _NEVER for g in groups):
                return self._shortage()
            self._next_layer: dict[int, int] = {}
            for shard in shards:
                while self.waiting[shard] and (path := self._walk(shard)) is not None:
                    self.waiting[shard] -= self._move_along(path, int(self.waiting[shard]))
            for group in groups:
                while self.room[group] < 0 and (path := self._walk(len(self.room) + group)) is not None:
                    self.room[group] += self._move_along(path, -int(self.room[group]))

    def _measure(self) -> None:
        """Shortest distances of all shards and groups to a group with room (Bellman-Ford, all arcs at once)."""
        ends = np.where(self.room > 0, 0, _NEVER)
        group_far = ends
        for _ in range(2 * len(ends) + 2):
            shard_far = (self.take + group_far[self.hosts]).min(axis=0)
            shard_far[shard_far > _NEVER // 2] = _NEVER
            further = np.minimum(ends, (self.give + shard_far[self.stacks]).min(axis=0))
            further[further > _NEVER // 2] = _NEVER
            if np.array_equal(further, group_far):
                self.shard_far, self.group_far = shard_far, group_far
                over_takes = self.take + group_far[self.hosts] == shard_far
                over_gives = self.give + shard_far[self.stacks] == group_far
                self._exact = bytearray(np.hstack([over_takes, over_gives]).T.tobytes())
                return
            group_far = further
        raise AssertionError("a cycle of negative length: the plan in hand is not the cheapest for its units")

    def _walk(self, start: int) -> list[tuple[int, int]] | None:
        """A chain from ``start`` to a group with room along exact arcs: (node, layer of the arc it leaves by) ..., at
        the end (group with room, -1). Nodes: shard i is i, group g is N + g. Each node goes on with the arc it used
        last, as arcs once found useless stay so until distances are measured again (Dinic)."""
        redundancy, num_groups = self.hosts.shape
        following, exact = self._next_layer, self._exact
        path: list[tuple[int, int]] = []
        node = start
        while True:
            group = node - num_groups
            if group >= 0 and self.group_far[group] == 0 and self.room[group] > 0:
                path.append((node, -1))
                return path
            arcs = node * redundancy
            at = exact.find(1, arcs + following.get(node, 0), arcs + redundancy)
            if at >= 0:
                layer = following[node] = at - arcs
                path.append((node, layer))
                node = num_groups + int(self.hosts[layer, node]) if group < 0 else int(self.stacks[layer, group])
            elif path:
                following[node] = redundancy
                node, _ = path.pop()
                following[node] += 1
            else:
                return None

    def _move_along(self, path: list[tuple[int, int]], wanted: int) -> int:
        """Move as many units as every arc and the room at the end allow, at most ``wanted``; returns how many."""
        num_groups = len(self.room)
        end = path[-1][0] - num_groups
        amount = min(wanted, int(self.room[end]))
        arcs: list[tuple[int, int, int]] = []
        for node, layer in path[:-1]:
            takes = node < num_groups
            shard = node if takes else int(self.stacks[layer, node - num_groups])
            above = int(self.owned[layer, shard] - self.kept[layer, shard])
            if takes and above < 0:
                amount = min(amount, -above)
            elif not takes:
                amount = min(amount, above if above > 0 else int(self.owned[layer, shard]))
            arcs.append((layer, shard, 1 if takes else -1))
        for layer, shard, sign in arcs:
            self.owned[layer, shard] += sign * amount
            self._relength(layer, shard)
        self.room[end] -= amount
        return amount

    def _relength(self, layer: int, shard: int) -> None:
        """Lengths of the two arcs between a shard and one host: a unit given up comes home for what it cost."""
        owned, kept = int(self.owned[layer, shard]), int(self.kept[layer, shard])
        extra = int(self.extra[layer, shard])
        take = (-self.move if owned < kept else extra) * self.hop + 1
        give = (-extra if owned > kept else self.move) * self.hop + 1 if owned else _NEVER
        group, redundancy = int(self.hosts[layer, shard]), len(self.hosts)
        self.take[layer, shard], self.give[layer, group] = take, give
        far, group_far = int(self.shard_far[shard]), int(self.group_far[group])
        self._exact[shard * redundancy + layer] = take + group_far == far
        self._exact[(len(self.room) + group) * redundancy + layer] = give + far == group_far

    def _shortage(self) -> Shortage:
        """Shards that cannot reach room have only hosts that cannot, and those own nothing else and are full."""
        shards = np.flatnonzero(self.shard_far == _NEVER).tolist()
        groups = np.flatnonzero((self.group_far == _NEVER) & self.live).tolist()
        return Shortage(tuple(shards), tuple(groups), -(-self.units * len(shards) // len(groups)))
