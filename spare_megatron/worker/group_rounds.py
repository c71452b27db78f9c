"""How the ranks of a group agree on what they see before they do together what depends on it.

A member needs none of this: what its ranks do together follows from its ticket stream and commits, which never change
for it. A learner's offers and a joiner's membership can end at any moment, and ranks learn of it at different times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders

Gather = Callable[[tuple[int, ...]], list[tuple[int, ...]]]
"""What each rank of the group gave, by position. Collective in the group."""


def alone(mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The :data:`Gather` of a group of one rank."""
    return [mine]


def gather_in_group(size: int, device: torch.device) -> Gather:
    """A :data:`Gather` over the group's own world of ``size`` ranks, by way of ``device``."""
    if size == 1:
        return alone

    def gather(mine: tuple[int, ...]) -> list[tuple[int, ...]]:
        given = torch.tensor(mine, dtype=torch.int64, device=device)
        there = [torch.empty_like(given) for _ in range(size)]
        dist.all_gather(there, given)
        return [tuple(one.tolist()) for one in there]

    return gather


def same_orders(session: Session, gather: Gather) -> Orders:
    """The newest orders, once those of all ranks of the group have the same epoch, last commit, end and tickets."""
    orders = session.orders
    while True:
        seen = gather(_mark(orders))
        newest = max(seen)
        if min(seen) == newest:
            return orders
        while _mark(orders) < newest:
            orders = session.wait(orders.version)
        orders = session.orders


def _mark(orders: Orders) -> tuple[int, ...]:
    """A mark that grows with the orders of a rank. All ranks of a group reach the same marks in the end."""
    return (int(orders.over), orders.view.epoch, *orders.view.committed, orders.stream.end)
