"""The interface between a replica communicator and what moves its bytes.

A backend object serves one epoch and is used up with it. Everything in it that can block is called from the one thread
that owns it (:mod:`spare_megatron.collectives.communicator`); ``cut``, for any thread, ends that blocking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.handshake import Member
from spare_megatron.collectives.ring import Shares
from spare_megatron.protocol.messages import Link


class BackendError(Exception):
    """This epoch's communicator failed; ``links``, between its ranks, say where something did not arrive."""

    def __init__(self, message: str, links: tuple[Link, ...] = ()) -> None:
        super().__init__(message)
        self.links = links


@dataclass(frozen=True)
class Seat:
    """One member's place in one epoch's ring."""

    epoch: int
    members: tuple[Member, ...]
    """All members, in the order of the ring."""
    rank: int
    """This member's index among them."""
    right_at: str
    """host:port at which the right neighbour listens."""

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @cached_property
    def left(self) -> Member:
        """The member from which this one receives."""
        return self.members[self.rank - 1]

    @cached_property
    def right(self) -> Member:
        """The member to which this one sends."""
        return self.members[(self.rank + 1) % self.size]

    @cached_property
    def before(self) -> Member | None:
        """The left neighbour's left neighbour; None where that is this member."""
        return self.members[self.rank - 2] if self.size > 2 else None

    @cached_property
    def after(self) -> Member | None:
        """The right neighbour's right neighbour; None where that is this member."""
        return self.members[(self.rank + 2) % self.size] if self.size > 2 else None


class Backend(Protocol):
    """What connects the members of one epoch and sums over them."""

    reads_sources: bool
    """Whether :meth:`sum` takes a ``source``."""
    converts: bool
    """Whether :meth:`sum` takes what the sum is ``converted`` into."""
    in_flight: int
    """How many sums may be begun before the first of them is complete."""
    forms_alone: bool
    """Whether :meth:`begin` is called, by whoever brings the view, and no :meth:`form`: the owner's thread is then not
    needed before the first sum, and not at all in an epoch without one. Otherwise the owner calls :meth:`form`."""
    linger_s: float
    """How long after an error :attr:`evidence` may grow, because other members report what they know. The backend is
    not released before that, unless its epoch is given up. 0: it does not grow."""

    @property
    def evidence(self) -> frozenset[Link]:
        """What is known by now of links between members, in ranks. From any thread, also after :meth:`release`."""

    @property
    def over(self) -> str:
        """Why nothing can be summed any more, as far as is known by now; empty while it can. From any thread, also
        after :meth:`release`."""

    @property
    def formed(self) -> bool:
        """Whether all members that this one needs are connected and in the epoch. From any thread."""

    def begin(self, tell: Callable[[], None]) -> None:
        """Begin to connect to the other members, in place of the backend of the epoch before, which is cut by that.
        Never waits. ``tell`` is called, by any thread, when :attr:`formed` or :attr:`over` changes."""

    def form(self) -> None:
        """Connect to the other members. Raises where that fails, or when :meth:`cut` is called."""

    def begin_sum(
        self,
        wire: torch.Tensor,
        wait_for_peers: bool,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Begin to sum ``wire`` in place over the members. With ``source`` this member contributes ``source``, which is
        only read, and ``wire`` only receives the sum. Even after an error nothing touches them once :meth:`halt`
        returns, and no byte of ``source`` leaves after :meth:`cut`.

        With ``converted`` the converted sum is written into the result of that object, and ``wire`` is only working
        memory. With ``shares`` nothing is summed: each member sends its share of ``wire`` to the others.

        With ``wait_for_peers`` it waits for members that still compute. Otherwise all members are known to take part,
        and silence is an error after the time-out.
        """

    def end_sum(self, more: Callable[[], bool]) -> bool:
        """Wait until the oldest sum that has not ended is complete, and return True. If ``more()`` becomes true before
        that, return False; the sum has then not ended."""

    def cut(self, why: str) -> None:
        """Give this communicator up: blocked calls of other threads end with an error, here and on the peers, which
        receive the reason. May be called from any thread, at any time and more than once; takes well under a
        millisecond."""

    def halt(self) -> None:
        """End what is in flight: when it returns, nothing touches a buffer that was given to :meth:`begin_sum` any
        more. The owner calls it as soon as nothing is to be summed any more, before it lingers for evidence."""

    def release(self) -> None:
        """Free everything. The owner calls it once, as its last call."""
