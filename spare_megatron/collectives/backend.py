"""What a replica communicator needs of a communication library, and how its members meet.

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
    """Something of this epoch's communicator failed; ``links``, in ranks of it, say what did not arrive."""

    def __init__(self, message: str, links: tuple[Link, ...] = ()) -> None:
        super().__init__(message)
        self.links = links


@dataclass(frozen=True)
class Seat:
    """One member's place in one epoch's communicator."""

    store_host: str
    store_port: int
    prefix: str
    """Of all keys of this communicator; differs for each job, fencing number, epoch and rank position."""
    rank: int
    size: int
    epoch: int


class Backend(Protocol):
    """One epoch's communicator."""

    linger_s: float
    """After an error :attr:`evidence` may grow for so long, as the other members say what they know: no earlier is it
    released, unless nobody asks any more. 0: it does not grow."""

    @property
    def evidence(self) -> frozenset[Link]:
        """What is known by now of links between members, in ranks. Any thread, any time, also after :meth:`release`."""

    @property
    def over(self) -> str:
        """Why nothing can be summed any more, as far as it is known by now; empty while it can. As ``evidence``."""

    def form(self) -> None:
        """Meet the other members and connect. Raises what went wrong, or because of :meth:`cut`."""

    def sum(self, wire: torch.Tensor, patient: bool) -> None:
        """Sum ``wire`` in place over the members; nothing touches it any more after :meth:`release`, whatever happened.

        ``patient`` waits for members that still compute; otherwise all members are known to be there, and silence is an
        error after the time-out.
        """

    def cut(self, why: str) -> None:
        """Give this communicator up: blocked calls of other threads end with an error, here and on the peers, who are
        told why. Any thread, any time, more than once; well under a millisecond, never blocks."""

    def unblock(self) -> None:
        """The part of giving up that may take a while; called once, after :meth:`cut`, from a thread of its own."""

    def release(self) -> None:
        """Free everything. Called once, by the owner, last."""


class Meeting:
    """All members of one communicator arrive; the last one to arrive lets everybody go.

    Costs each member six store operations and the last one N more. Nobody polls: each member waits for a key of its
    own, which is also how :meth:`leave` ends the wait.
    """

    GO, LEFT = b"go", b"left"

    def __init__(
        self, seat: Seat, clients: StoreClients, timeout_s: float, suspects: frozenset[int] = frozenset()
    ) -> None:
        """``suspects``: ranks that are waited for half as long."""
        self._seat = seat
        self._suspects = suspects
        self._clients = clients
        self._timeout_s = timeout_s
        self._parted = False
        self._client = clients.take(seat.store_host, seat.store_port)
        self.store: dist.Store = dist.PrefixStore(seat.prefix, self._client)

    def arrive(self, place: str) -> str:
        """Block until all members are here. BackendError after the time-out, or when :meth:`leave` was called.

        ``place`` is told to the left neighbour; returns that of the right one.
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
        """End :meth:`arrive` from another thread, now or when it comes (its client is locked: this takes another)."""
        seat = self._seat
        if not self._parted:
            with contextlib.suppress(ConnectionError, dist.DistError):
                client = self._clients.take(seat.store_host, seat.store_port)
                dist.PrefixStore(seat.prefix, client).set(f"go/{seat.rank}", self.LEFT)
                self._clients.give(seat.store_host, seat.store_port, client)

    def part(self) -> None:
        """All members have met and connected: remove this one's keys (an epoch change of a large job would leave
        millions behind), and let somebody else use the connection."""
        self._parted = True
        own = [f"at/{self._seat.rank}", f"go/{self._seat.rank}"]
        with contextlib.suppress(dist.DistError):
            for key in own if self._seat.rank else [*own, "arrived"]:
                self.store.delete_key(key)
        self._clients.give(self._seat.store_host, self._seat.store_port, self._client)

    def end(self) -> None:
        """The owner is done with it, however far it came. Peers may still read this member's keys."""
        if not self._parted:
            self._parted = True
            self._clients.give(self._seat.store_host, self._seat.store_port, self._client)
