"""The planner's results: an assignment of all pieces, a patch for lost ones, or a wipe-out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

USUAL = 16
"""The slowness of a group that is not slow: slowness and ends are counted in sixteenths of the time that a usual group
takes for a piece."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """Names one live host for every piece. Only ``first_assignment`` and ``assign`` make one; all arrays are
    read-only."""

    owner: NDArray[np.int32]
    """[N, K]: the group that computes piece (i, j)."""
    load_max: int
    """Pieces of the most loaded group; where no group is slow, the least possible for ``live``."""
    moves: int
    """Pieces whose owner differs from the previous assignment's although that owner still lives."""
    reason: str
    live: tuple[int, ...]
    """The groups it was made for, ascending."""
    granularity: str
    """'microbatch' or 'shard'."""
    units: NDArray[np.int64]
    """[L, N]: how many pieces of shard i its layer-l host owns; in shard granularity whether it owns the shard (0 or
    1). There are no rows where 64 or more groups all host every shard (microbatch granularity)."""
    slots: NDArray[np.int32] | None
    """[L, N] in shard granularity: the slot (0 = top) that layer l has in the present stack order of group g. The
    shards that a group owns are among its top ``depth`` slots."""
    loads: NDArray[np.int64]
    """[N]: pieces of every group."""
    slowness: NDArray[np.int64]
    """[N]: how long a piece takes every group, in sixteenths of a usual group's time: ``USUAL``, or more for those of
    ``live`` that are slow for long."""

    @property
    def pieces_per_shard(self) -> int:
        """K."""
        return int(self.owner.shape[1])

    @property
    def end(self) -> int:
        """When the last group is done, in sixteenths of a usual group's piece; the least possible for ``live`` and
        ``slowness``."""
        return int((self.loads * self.slowness).max())

    @property
    def depth(self) -> int:
        """S: the load of the most loaded group in shards, load_max / K rounded up."""
        return -(-self.load_max // self.pieces_per_shard)

    def pieces_of(self, group: int) -> tuple[int, ...]:
        """The group's pieces i * K + j in execution order: ascending global microbatch index j * N + i."""
        return self._pieces[group]

    def pieces_of_one(self, group: int) -> tuple[int, ...]:
        """The same as :meth:`pieces_of`, without making out the pieces of every other group first."""
        if "_pieces" in self.__dict__:
            return self._pieces[group]
        places = np.flatnonzero(self._owners == group)
        return tuple((places % len(self.owner) * self.pieces_per_shard + places // len(self.owner)).tolist())

    @cached_property
    def _owners(self) -> NDArray[np.int32]:
        """[K * N]: owners in execution order."""
        return self.owner.T.ravel()

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """[N]: whether the group is in ``live``."""
        alive = np.zeros(len(self.owner), dtype=np.bool_)
        alive[list(self.live)] = True
        return alive

    @cached_property
    def _pieces(self) -> tuple[tuple[int, ...], ...]:
        """The pieces of every group at once: a stable sort by owner keeps the execution order inside a group."""
        num_groups, per_shard = self.owner.shape
        owners = self._owners
        order = np.argsort(owners, kind="stable")
        pieces = (order % num_groups * per_shard + order // num_groups).tolist()
        ends = np.cumsum(np.bincount(owners, minlength=num_groups)).tolist()
        return tuple(tuple(pieces[low:high]) for low, high in zip([0, *ends[:-1]], ends, strict=True))


@dataclass(frozen=True)
class Patch:
    """Lost pieces of the step in flight, given to groups that can still compute them."""

    added: Mapping[int, tuple[int, ...]]
    """Group -> its additional pieces, in execution order; groups that get none are left out."""
    load_max: int
    """The largest remaining load of a group once the patch is added."""
    reason: str


@dataclass(frozen=True)
class WipeOut:
    """Some shards have no live host."""

    shards: tuple[int, ...]
    reason: str
