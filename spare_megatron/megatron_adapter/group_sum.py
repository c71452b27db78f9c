"""Sums over those ranks of a group that share a buffer's parameters (context and inner data ranks), out of place."""

from __future__ import annotations

import torch
import torch.distributed as dist


class GroupSum:
    """A flat tensor of this rank, which is never written, and its sum over ``group``."""

    def __init__(self, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.mine, self.group = mine, group
        self._sum = torch.empty_like(mine) if group.size() > 1 else None

    def over_ranks(self) -> torch.Tensor:
        """The sum, in memory that the next call uses again; the tensor itself where no other rank shares it.
        Collective in the group."""
        if self._sum is None:
            return self.mine
        self._sum.copy_(self.mine)
        dist.all_reduce(self._sum, group=self.group)
        return self._sum
