"""A replica communicator on gloo, with the abort that gloo lacks.

What torch's gloo does when a member dies or stops: only ring neighbours of a *dead* member see an error,
everybody else waits out the timeout; ``abort()`` and ``shutdown()`` of the process group change nothing;
dropping a group with an operation in flight blocks. What ends every operation within a millisecond is that
the group's connections end. So this module knows its connections (:mod:`spare_megatron.comm.sockets`) and
shuts them down: :meth:`GlooBackend.cut`.

How it knows them. Each communicator has a gloo device, hence a listening port, of its own, and the address of
a device stands in the store under the member's rank. A connection belongs to this communicator exactly if its
local end is this device's address (it was accepted) or its remote end is the address of a ring neighbour's
device (it was made).

Connections are made on first use (``lazy_init``), so a member of N has 2 connections, not N - 1, and reads 2
addresses. The first use is part of forming: a sum that shows every member the epoch and the members it
reached.

A connection that a neighbour was to make and never will has no socket that could be shut down: its waiter is
released by connecting to the own device in the neighbour's stead and hanging up. Only abandoned communicators
do that.

May assume: Linux (/proc/self/fd), torch 2.13's gloo rendezvous records. Promises: what
:class:`~.backend.Backend` says.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.comm.backend import BackendError, Meeting, Seat
from spare_megatron.comm.sockets import Address, OwnSocket, address_towards, connected, shut
from spare_megatron.comm.store import StoreClients

IN_FLIGHT = 2
"""Worker threads of the group: buckets that are summed at the same time."""
PATIENCE = timedelta(days=1)
"""While members still compute, the control plane alone decides who is late. And while they connect: a gloo that has
timed out while connecting ends the whole process when the connection comes late."""
CLOSING = timedelta(milliseconds=1)
_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")


class GlooBackend:
    """See :class:`~spare_megatron.comm.backend.Backend`."""

    def __init__(self, seat: Seat, clients: StoreClients, timeout_s: float) -> None:
        self._seat = seat
        self._clients = clients
        self._timeout_s = timeout_s
        self._cut = threading.Event()
        self._meeting: Meeting | None = None
        self._group: Any = None
        self._scanning = threading.Lock()
        self._own: Address | None = None
        """This device's address; None before it listens."""
        self._released = False
        """The device may be gone. Guarded by ``_scanning``, like everything that touches its sockets."""
        self._closing = threading.Lock()
        self._closed = False
        self._neighbours: dict[Address, int] = {}
        self._foreign: Collection[Address] = ()
        self._sockets: tuple[OwnSocket, ...] = ()
        """Set once, when all connections stand."""

    @property
    def addresses(self) -> frozenset[Address]:
        return frozenset(self._neighbours)

    def form(self) -> None:
        seat = self._seat
        meeting = self._meeting = Meeting(seat, self._clients, self._timeout_s)
        self._group = dist.ProcessGroupGloo(meeting.store, seat.rank, seat.size, self._options())
        own = _device_address(meeting.store, seat.rank)
        self._own = own
        self._go_on()
        meeting.arrive()
        ring = {(seat.rank + 1) % seat.size, (seat.rank - 1) % seat.size}
        self._neighbours = {_device_address(meeting.store, rank): rank for rank in ring}
        self._go_on()
        self._prove_membership()
        self._sockets = tuple(connected(self._is_ours))
        self._go_on()
        meeting.part(f"0/{seat.rank}")

    def start(self, wire: torch.Tensor, patient: bool) -> Any:
        return self._sum(wire, PATIENCE if patient else timedelta(seconds=self._timeout_s))

    def wait(self, handle: Any) -> None:
        try:
            handle.wait()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise BackendError(text, self._suspects(text)) from None

    def cut(self) -> None:
        self._cut.set()
        if self._scanning.acquire(blocking=False):
            try:
                if self._sockets and not self._released:
                    self._shut_all()
            finally:
                self._scanning.release()

    def unblock(self, foreign: Collection[Address]) -> None:
        if self._meeting is not None:
            self._meeting.leave()
        with self._scanning:
            if self._own is None or self._released:
                return
            self._foreign = foreign
            self._shut_all()
            if not self._sockets:
                self._hang_up_all()
        if self._sockets:
            self._close()

    def release(self) -> None:
        """Close every connection through gloo's own doors, then free the group."""
        with self._scanning:
            if self._neighbours and not self._sockets:
                self._hang_up_all()
            self._shut_all()
        if self._neighbours:
            self._close()
        with self._scanning:
            self._released = True
        with self._closing:
            self._group = None
        self._meeting = None

    def _shut_all(self) -> None:
        for own in self._sockets or connected(self._is_ours):
            shut(own)

    def _hang_up_all(self) -> None:
        assert self._own is not None
        for rank in self._neighbours.values():
            _hang_up(self._own, rank)

    def _close(self) -> None:
        """Make gloo itself close all connections.

        A receive whose operation has failed leaves gloo's event loop on a message that has no buffer any more: it spins
        on it, never sees that the connection has ended, and the group's destructor waits for it for ever. Only an
        operation that times out closes such a connection. Posting one blocks until its connection is made or ended, and
        the time-out may only come when that holds for all of them (a connection that ends twice ends the process).
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            posted = []
            for rank in self._neighbours.values():
                with contextlib.suppress(RuntimeError):
                    posted.append(self._group.recv([torch.zeros(1)], rank, 0))
            for work in posted:
                with contextlib.suppress(RuntimeError):
                    work.wait(CLOSING)

    def _options(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = PATIENCE
        options._threads = IN_FLIGHT
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        place = (
            {"interface": interface}
            if interface
            else {"hostname": address_towards(self._seat.store_host, self._seat.store_port)}
        )
        options._devices = [dist.ProcessGroupGloo.create_device(**place, lazy_init=True)]
        return options

    def _sum(self, wire: torch.Tensor, timeout: timedelta) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timeout
        return self._group.allreduce([wire], options)

    def _prove_membership(self) -> None:
        """Connects to the ring neighbours, and fails unless every rank is there once, in this epoch: a
        connection could otherwise come from a process that was stopped in an older epoch and found the port
        in use again."""
        seat = self._seat
        seen = torch.zeros(seat.size + 1, dtype=torch.int64)
        seen[seat.rank], seen[seat.size] = seat.rank + 1, seat.epoch
        self.wait(self._sum(seen, PATIENCE))
        if seen.tolist() != [*range(1, seat.size + 1), seat.epoch * seat.size]:
            raise BackendError(f"connected to members of another epoch: {seen.tolist()[:8]}...")

    def _go_on(self) -> None:
        if self._cut.is_set():
            self.cut()  # sockets that were found after the first call
            raise BackendError("given up while forming")

    def _is_ours(self, local: Address, remote: Address) -> bool:
        return local == self._own or (remote in self._neighbours and remote not in self._foreign)

    def _suspects(self, text: str) -> tuple[int, ...]:
        """Ranks that an error of gloo may be about: it names an address, or nobody."""
        found = _PEER.search(text)
        if not found:
            return ()
        remote = (found[1], int(found[2]))
        if remote in self._neighbours:
            return (self._neighbours[remote],)
        made = {own.remote for own in self._sockets}
        return tuple(sorted(rank for address, rank in self._neighbours.items() if address not in made))


def _device_address(store: dist.Store, rank: int) -> Address:
    """The address in gloo's rendezvous record of ``rank`` (gloo/transport/tcp/context.cc, ``Rank::bytes``):
    length and text of the host name, length and bytes of a sockaddr_storage."""
    record = store.get(f"0/{rank}")
    (name_bytes,) = struct.unpack_from("=Q", record)
    at = 8 + name_bytes + 8
    (family,) = struct.unpack_from("=H", record, at)
    (port,) = struct.unpack_from("!H", record, at + 2)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, record[at + 4 : at + 8]), port
    return socket.inet_ntop(socket.AF_INET6, record[at + 8 : at + 24]), port


def _hang_up(device: Address, rank: int) -> None:
    """Be the connection that ``rank`` owes ``device`` (gloo/transport/tcp/listener.cc reads a ssize_t that
    says for whom it is), and end."""
    with contextlib.suppress(OSError), socket.create_connection(device, timeout=1.0) as stand_in:
        stand_in.sendall(struct.pack("=q", rank))
