"""The interface between a replica communicator and what moves its bytes, and how the members of an epoch meet.

A backend object serves one epoch and is used up with it. Everything in it that can block is called from the
one thread that owns it (:mod:`spare_megatron.collectives.communicator`), except ``cut`` and ``unblock``, whose task
is to end that blocking.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from spare_megatron.collectives.store import StoreClients
from spare_megatron.controller.messages import Link


class BackendError(Exception):
    """This epoch's communicator failed; ``links``, between its ranks, say where something did not arrive."""

    def __init__(self, message: str, links: tuple[Link, ...] = ()) -> None:
        super().__init__(message)
        self.links = links


@dataclass(frozen=True)
class Seat:
    """One member's place in one epoch's communicator."""

    store_host: str
    store_port: int
    prefix: str
    """Begins all store keys of this communicator; differs for each job, fencing number, epoch and rank position."""
    rank: int
    size: int
    epoch: int


class Backend(Protocol):
    """What connects the members of one epoch and sums over them."""

    reads_sources: bool
    """Whether :meth:`sum` takes a ``source``."""
    linger_s: float
    """How long after an error :attr:`evidence` may grow, because other members say what they know. The backend is not
    released before that, unless its epoch is given up. 0: it does not grow."""

    @property
    def evidence(self) -> frozenset[Link]:
        """What is known by now of links between members, in ranks. From any thread, also after :meth:`release`."""

    @property
    def over(self) -> str:
        """Why nothing can be summed any more, as far as is known by now; empty while it can. From any thread, also
        after :meth:`release`."""

    def form(self) -> None:
        """Meet the other members and connect. Raises where that fails, or when :meth:`cut` is called."""

    def sum(self, wire: torch.Tensor, patient: bool, source: torch.Tensor | None = None) -> None:
        """Sum ``wire`` in place over the members, or write the sum of what they give as ``source``, which is only read,
        into it. Even after an error nothing touches them once :meth:`release` returns, and no byte of ``source`` leaves
        after :meth:`cut`.

        With ``patient`` it waits for members that still compute. Otherwise all members are known to take part, and
        silence is an error after the time-out.
        """

    def cut(self, why: str) -> None:
        """Give this communicator up: blocked calls of other threads end with an error, here and on the peers, who are
        told why. May be called from any thread, at any time and more than once; takes well under a millisecond."""

    def unblock(self) -> None:
        """Do the part of giving up that may take a while; called once, after :meth:`cut`, from a thread of its own."""

    def release(self) -> None:
        """Free everything. The owner calls it once, as its last call."""


class Meeting:
    """The barrier at which all members of one communicator meet: the last one to arrive releases all.

    It costs each member six store operations, and the last one N more. Nobody polls: each member waits for a key of its
    own, and :meth:`leave` sets that key to end the wait.
    """

    GO, LEFT = b"go", b"left"

    def __init__(
        self, seat: Seat, clients: StoreClients, timeout_s: float, suspects: frozenset[int] = frozenset()
    ) -> None:
        """``suspects``: ranks for which the others wait only half of ``timeout_s``."""
        self._seat = seat
        self._suspects = suspects
        self._clients = clients
        self._timeout_s = timeout_s
        self._parted = False
        self._client = clients.take(seat.store_host, seat.store_port)
        self.store: dist.Store = dist.PrefixStore(seat.prefix, self._client)

    def arrive(self, place: str) -> str:
        """Block until all members are here. Raises BackendError after the time-out, or when :meth:`leave` was called.

        ``place`` is this member's address for its left neighbour; returns that of the right one.
        """
        seat, store = self._seat, self.store
        store.set(f"at/{seat.rank}", place)
        if store.add("arrived", 1) == seat.size:
            for rank in range(seat.size):
                store.set(f"go/{rank}", self.GO)
        if not self._let_go(self._timeout_s / 2):
            missing = self._missing()
            patient = self._suspects.isdisjoint(missing)
            if not patient or not self._let_go(self._timeout_s / 2):
                missing = self._missing()
                waited_s = self._timeout_s if patient else self._timeout_s / 2
                raise BackendError(
                    f"{seat.size - len(missing)} of {seat.size} members came within {waited_s:g} s",
                    tuple(Link(rank, seat.rank) for rank in missing),
                )
        if store.get(f"go/{seat.rank}") != self.GO:
            raise BackendError("given up while the members met")
        return str(store.get(f"at/{(seat.rank + 1) % seat.size}").decode())

    def _let_go(self, wait_s: float) -> bool:
        try:
            self.store.wait([f"go/{self._seat.rank}"], timedelta(seconds=wait_s))
        except dist.DistStoreError:
            return False
        return True

    def _missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self._seat.size) if not self.store.check([f"at/{rank}"]))

    def leave(self) -> None:
        """End :meth:`arrive` from another thread, even if it is called later. Its store client is locked, so this uses
        another one."""
        seat = self._seat
        if not self._parted:
            with contextlib.suppress(ConnectionError, dist.DistError):
                client = self._clients.take(seat.store_host, seat.store_port)
                dist.PrefixStore(seat.prefix, client).set(f"go/{seat.rank}", self.LEFT)
                self._clients.give(seat.store_host, seat.store_port, client)

    def part(self) -> None:
        """After all members have met and connected: remove this member's keys, of which a large job would leave
        millions behind, and return the store client."""
        self._parted = True
        own = [f"at/{self._seat.rank}", f"go/{self._seat.rank}"]
        with contextlib.suppress(dist.DistError):
            for key in own if self._seat.rank else [*own, "arrived"]:
                self.store.delete_key(key)
        self._clients.give(self._seat.store_host, self._seat.store_port, self._client)

    def end(self) -> None:
        """Return the store client, however far the meeting came. The keys stay, for peers may still read them."""
        if not self._parted:
            self._parted = True
            self._clients.give(self._seat.store_host, self._seat.store_port, self._client)
