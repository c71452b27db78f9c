"""Redistributes shards over their hosts at least cost, by augmenting chains from the present owners.

This is a transportation problem with convex costs: every shard has U units to be owned by its live hosts, no group may
own more than its cap. Present ownership is kept where possible: giving up a unit that was owned costs a move; taking a
further one is free or costs a small extra. Chains are successive shortest paths (Ahuja, Magnanti, Orlin, *Network
Flows*, ch. 9.7): one vectorised Bellman-Ford gives every node's distance to a group with room, then each waiting unit
walks along arcs on which that distance is exact, and so on until nothing waits. The result has the least total cost at
these caps; or there is a certificate that they are too small (Hall's condition fails).

kernels/chains.cpp does the same, with the same result; what is written here is what it must do, and does it where there
was no compiler. So it is with the owners of single pieces, which follow from the units.

Arrays are layer-major, [L, N]. In a *shard table* entry [l, i] is about shard i on its host of layer l; in a *group
table* entry [l, g] is about group g and its shard of layer l.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import LayerTables
from spare_megatron.protocol import assign_native
from spare_megatron.protocol.assign_native import compiled_chains

IntTable = NDArray[np.int64]
_NEVER = 1 << 60


@dataclass(frozen=True)
class Shortage:
    """Why caps are too small: these shards have no other live hosts than these groups, whose caps together do not hold
    them."""

    shards: tuple[int, ...]
    groups: tuple[int, ...]
    units: int
    """Of the shards together: the groups own so many in every plan."""


class Chains:
    """One redistribution under some caps; ``run`` is called once.

    In Python distances are measured by numpy on whole tables. Chains touch single cells, for which memoryviews of the
    same tables (flat: layer * N + column) cost a third of numpy's own indexing; their names begin with an underscore.
    """

    def __init__(
        self,
        tables: LayerTables,
        live: NDArray[np.bool_],
        kept: IntTable,
        units: int,
        caps: IntTable,
        extra: IntTable | None = None,
    ) -> None:
        """``live`` [N]; ``kept`` shard table: units that live groups own now; ``units`` U; ``caps`` [N];
        ``extra`` shard table in {0, 1}: cost of a unit beyond ``kept`` (default 0)."""
        num_groups = len(live)
        self.tables, self.live, self.units, self.num_groups = tables, live, units, num_groups
        self.among, self.kept, self.caps, self.extra = tables.among(live), kept, caps, extra
        # A length is cost * hop + 1, so the shortest of the cheapest chains has the fewest hops, and no cycle has
        # length 0.
        self.hop = 4 * num_groups
        # One move outweighs all extras that a whole plan can have.
        self.move = 1 if extra is None else num_groups * units + 1

    def run(self) -> IntTable | Shortage:
        """The owned units (shard table) of least cost within the caps, or why there are none."""
        native = compiled_chains()
        if native is None:
            return self.run_in_python()
        owned, shard_far, group_far = np.empty_like(self.kept), np.empty_like(self.caps), np.empty_like(self.caps)
        tables = (self.tables.hosts, self.tables.stacks, self.among, self.live, self.kept, self.extra, self.caps)
        numbers = (self.units, self.hop, self.move)
        if assign_native.redistribute(native, numbers, tables, (owned, shard_far, group_far)):
            return owned
        self._shard_far, self._group_far = _flat(shard_far), _flat(group_far)
        return self._shortage()

    def run_in_python(self) -> IntTable | Shortage:
        """What :meth:`run` returns, by Python alone."""
        self.owned = self.kept.copy()
        taken: IntTable | int = 1 if self.extra is None else self.extra * self.hop + 1
        self.take: IntTable = np.where(self.among, taken, _NEVER)
        kept_by_group = self.kept.take(self.tables.stack_cells)
        self.give: IntTable = np.where(kept_by_group > 0, self.move * self.hop + 1, _NEVER)
        self.room: IntTable = np.where(self.live, self.caps - kept_by_group.sum(axis=0), 0)
        self.waiting: IntTable = self.units - self.kept.sum(axis=0)
        self._arcs: IntTable = np.empty_like(self.take)
        self._hosts, self._stacks, self._kept = (
            _flat(table) for table in (self.tables.hosts, self.tables.stacks, self.kept)
        )
        self._owned, self._take, self._give = (_flat(table) for table in (self.owned, self.take, self.give))
        self._room = _flat(self.room)
        self._extra = None if self.extra is None else _flat(self.extra)
        while True:
            shards = np.flatnonzero(self.waiting).tolist()
            groups = np.flatnonzero(self.room < 0).tolist()
            if not shards and not groups:
                return self.owned
            self._measure()
            far_max = _NEVER // 2
            if any(self._shard_far[i] > far_max for i in shards) or any(self._group_far[g] > far_max for g in groups):
                return self._shortage()
            self._next_arc: dict[int, int] = {}
            for shard in shards:
                wanted = int(self.waiting[shard])
                while wanted and (path := self._walk(shard)) is not None:
                    wanted -= self._move_along(path, wanted)
                self.waiting[shard] = wanted
            for group in groups:
                while self._room[group] < 0 and (path := self._walk(self.num_groups + group)) is not None:
                    self._room[group] += self._move_along(path, -self._room[group])

    def _measure(self) -> None:
        """Shortest distances of all shards and groups to a group with room (Bellman-Ford, all arcs at once)."""
        ends = np.where(self.room > 0, 0, _NEVER)
        group_far, arcs, least = ends, self._arcs, np.minimum.reduce
        shard_far = np.empty_like(ends)
        for _ in range(2 * len(ends) + 2):
            group_far.take(self.tables.hosts, out=arcs, mode="clip")
            arcs += self.take
            least(arcs, axis=0, out=shard_far)
            np.minimum(shard_far, _NEVER, out=shard_far)
            shard_far.take(self.tables.stacks, out=arcs, mode="clip")
            arcs += self.give
            further = least(arcs, axis=0)
            np.minimum(further, ends, out=further)
            if (further == group_far).all():
                self._shard_far, self._group_far = _flat(shard_far), _flat(group_far)
                return
            group_far = further
        raise AssertionError("a cycle of negative length: the plan in hand is not the cheapest for its units")

    def _walk(self, start: int) -> list[tuple[int, int]] | None:
        """A chain from ``start`` to a group with room: (node, flat cell of the arc it leaves by) ..., at the end (group
        with room, -1); None where there is none.

        Node i is shard i, node N + g is group g. The chain uses exact arcs: those over which a node has its measured
        distance. Each node goes on with the arc it used last, because an arc that led nowhere leads nowhere until
        distances are measured again (Dinic).
        """
        num_groups, following, end = self.num_groups, self._next_arc, len(self._take)
        shard_far, group_far, room = self._shard_far, self._group_far, self._room
        path: list[tuple[int, int]] = []
        node = start
        while True:
            if node < num_groups:
                at = following.get(node, node)
                far, length, to, there, base = shard_far[node], self._take, self._hosts, group_far, num_groups
            else:
                group = node - num_groups
                far = group_far[group]
                if far == 0 and room[group] > 0:
                    path.append((node, -1))
                    return path
                # Every arc has a length, so none is exact at a group that had room and is full now.
                at = following.get(node, group) if far else end
                length, to, there, base = self._give, self._stacks, shard_far, 0
            while at < end and length[at] + there[to[at]] != far:
                at += num_groups
            following[node] = at
            if at < end:
                path.append((node, at))
                node = base + to[at]
            elif path:
                node, _ = path.pop()
                following[node] += num_groups
            else:
                return None

    def _move_along(self, path: list[tuple[int, int]], wanted: int) -> int:
        """Move as many units as every arc and the room at the end allow, at most ``wanted``; returns how many."""
        num_groups, owned, kept = self.num_groups, self._owned, self._kept
        end = path[-1][0] - num_groups
        amount = min(wanted, self._room[end])
        cells: list[tuple[int, int]] = []
        for node, arc in path[:-1]:
            takes = node < num_groups
            cell = arc if takes else arc - node + num_groups + self._stacks[arc]
            above = owned[cell] - kept[cell]
            if takes and above < 0:
                amount = min(amount, -above)
            elif not takes:
                amount = min(amount, above if above > 0 else owned[cell])
            cells.append((cell, 1 if takes else -1))
        for cell, sign in cells:
            owned[cell] += sign * amount
            self._relength(cell)
        self._room[end] -= amount
        return amount

    def _relength(self, cell: int) -> None:
        """Set the lengths of the two arcs between a shard and one host. Taking a unit back refunds the cost of giving
        it up, and giving back a unit that was taken refunds the cost of taking it."""
        owned, kept = self._owned[cell], self._kept[cell]
        extra = self._extra[cell] if self._extra is not None else 0
        self._take[cell] = (-self.move if owned < kept else extra) * self.hop + 1
        give = cell - cell % self.num_groups + self._hosts[cell]
        self._give[give] = (-extra if owned > kept else self.move) * self.hop + 1 if owned else _NEVER

    def _shortage(self) -> Shortage:
        """The proof that the caps are too small: shards without a chain to room have only hosts without one, and these
        are full and own nothing but these shards."""
        far_max = _NEVER // 2
        shards = np.flatnonzero(np.asarray(self._shard_far) > far_max).tolist()
        groups = np.flatnonzero((np.asarray(self._group_far) > far_max) & self.live).tolist()
        return Shortage(tuple(shards), tuple(groups), self.units * len(shards))


def hand_over(tables: LayerTables, owner: NDArray[np.int32], before: IntTable, owned: IntTable) -> NDArray[np.int32]:
    """The owners [N, K] of all pieces when ``owned`` says how many each host has that had ``before`` (shard tables) and
    ``owner``: of each shard every host keeps its first pieces, and the freed ones go to the hosts that gain, in layer
    order."""
    native = compiled_chains()
    if native is None:
        return hand_over_in_python(tables, owner, before, owned)
    now = owner.copy()
    assign_native.hand_over(native, tables.hosts, tables.real, before, owned, now)
    return now


def hand_over_in_python(
    tables: LayerTables, owner: NDArray[np.int32], before: IntTable, owned: IntTable
) -> NDArray[np.int32]:
    """What :func:`hand_over` returns, by Python alone."""
    changed = np.flatnonzero((owned != before).any(axis=0))
    hosts = tables.hosts[:, changed].T
    rows = owner[changed]
    held = rows[:, :, None] == hosts[:, None, :]
    if tables.real is not None:
        held &= tables.real.T[changed][:, None, :]
    layer = held.argmax(axis=2)
    place = np.take_along_axis(held.cumsum(axis=1), layer[:, :, None], axis=2)[:, :, 0]
    now = owned.T[changed]
    freed = (place > np.take_along_axis(now, layer, axis=1)) | ~held.any(axis=2)
    gains = np.maximum(now - before.T[changed], 0)
    rows[freed] = np.repeat(hosts.ravel(), gains.ravel())
    owner = owner.copy()
    owner[changed] = rows
    return owner


def _flat(table: IntTable) -> memoryview:
    return table.reshape(-1).data
