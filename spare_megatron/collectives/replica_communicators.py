"""The replica communicators of one rank, which sum over the groups and outlive deaths and stops of other groups.

The ranks at one position of all live groups form a communicator for each epoch. The control thread calls
:meth:`ReplicaCommunicators.adopt` for a newer view; it first gives up what belongs to older epochs (protocol
rule 5: notify and drop first), so every peer that waits for this rank wakes within milliseconds, then forms
the new communicator in the background while the training thread may still compute. The training thread calls
:meth:`ReplicaCommunicators.reduce`, or :meth:`ReplicaCommunicators.begin` while its tensors are still being computed
(:mod:`spare_megatron.collectives.reduction_attempt`).

Promises:
- ``adopt`` and ``abandon`` never block; ``reduce`` ends when it is done, failed or its epoch is over,
  whichever is first;
- accumulators are never written, a given-up operation never writes into a buffer that is in use again;
- errors of communication are values: only what ``on_bucket`` itself raises leaves ``reduce``;
- every group that completes a reduction of an epoch has the same sums. After a death some groups may complete it and
  others not; the vote shows which.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spare_megatron.collectives.attempt import StaleError
from spare_megatron.collectives.backend import Backend, Seat
from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.buckets import BUCKET_BYTES, NCCL_BUCKET_BYTES, BufferPool
from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.gathering import Gathering, OpenGathering
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.reduction import ReduceOutcome, Reduction
from spare_megatron.collectives.reduction_attempt import OpenReduction
from spare_megatron.collectives.ring_links import RingLinks
from spare_megatron.collectives.ring_native import compiled_ring
from spare_megatron.config.errors import ConfigError

BACKENDS = ("gloo", "gloo-staged", "nccl")
"""The names of the transports. 'gloo' stands for sums on the CPU over TCP, as in torch: inside a group gloo itself does
them, between groups :mod:`spare_megatron.collectives.backend_ring`, which says why."""
CLOSE_S = 1.0
SILENCE_S = 15.0
"""Silence for so long is a failure of a link, unless the caller says otherwise."""


@dataclass(frozen=True)
class Membership:
    """The members that reduce together in one epoch."""

    epoch: int
    members: tuple[Member, ...]
    """Live members, sorted; a member's rank in the communicator is its index here."""
    right_at: str = ""
    """host:port at which the next member after this one listens, the first after the last; empty where there is no
    other."""

    def rank(self, member: Member) -> int | None:
        """The rank of ``member``; None where it is none of the members."""
        rank = bisect_left(self.members, member)
        return rank if self.members[rank : rank + 1] == (member,) else None


class ReplicaCommunicators:
    """One rank's communicators, at most one of them current. Thread-safe; ``reduce`` is for one thread at a time."""

    def __init__(
        self,
        me: Identity,
        backend: str,
        device: torch.device | str = "cpu",
        timeout_s: float = SILENCE_S,
        bucket_bytes: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """
        Args:
            me: who this rank is.
            backend: 'gloo' (CPU tensors), 'nccl' (CUDA tensors) or 'gloo-staged' (tensors of any device, summed in
                pinned host memory).
            device: the device of accumulators and results.
            timeout_s: until the neighbours in a new epoch are there, and for silence after that. Waiting for members
                that still compute has no limit here: the control plane finds those that hang.
            bucket_bytes: largest piece of a tensor that is summed at once; None: what suits the backend.
            host: the address of this machine at which other ranks reach this one.

        Raises:
            ConfigError: there is no such backend, or no such address, or the compiled ring is of another version.
        """
        if backend not in BACKENDS:
            raise ConfigError(
                f"the replica communicators know no backend {backend!r}; use one of {', '.join(BACKENDS)}"
            )
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigError("this torch has no NCCL; use --spare-comm gloo, or a torch that is built for CUDA")
        compiled_ring()  # refused here, where somebody learns of it
        self._me = me
        self._kind = backend
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes or (NCCL_BUCKET_BYTES if backend == "nccl" else BUCKET_BYTES)
        try:
            self._links = RingLinks(me, host, timeout_s)
        except OSError as error:
            raise ConfigError(
                f"this rank cannot listen at {host} for the other groups: {error.strerror}; give --spare-interface "
                "with the name or the network of an interface of this machine"
            ) from None
        self._changed = threading.Condition()
        self._epoch = 0
        """The newest epoch that was adopted."""
        self._over = 0
        """Epochs up to this one are over for this rank."""
        self._adopting = threading.Lock()
        """Held during an adoption, so that :meth:`close` knows every communicator that was started."""
        self._closed = False
        self._current: Communicator | None = None
        self._given_up: list[Communicator] = []
        self._suspects: frozenset[int] = frozenset()
        """Groups whose link to this one was silent in the epoch before."""
        self._wire_device = self._device if backend == "nccl" else torch.device("cpu")
        self._pool = BufferPool(self._wire_device, self._device, staged=backend == "gloo-staged")
        _close_at_exit(self)

    @property
    def address(self) -> str:
        """host:port at which other ranks of this position call this one."""
        return self._links.address

    @property
    def calls(self) -> int:
        """How often this rank has called another for an epoch that waited for it; each call makes two connections."""
        return self._links.calls

    @property
    def ready(self) -> bool:
        """Whether the loss of one neighbour costs no call."""
        return self._links.ready

    @property
    def ready_calls(self) -> int:
        """How often this rank has called another to be ready."""
        return self._links.ready_calls

    @property
    def formed(self) -> bool:
        """Whether the present epoch's communicator can sum."""
        with self._changed:
            return self._current is not None and self._current.ready

    @property
    def lingering(self) -> int:
        """The number of communicators that were given up and still hold threads, connections or buffers."""
        with self._changed:
            return sum(not communicator.gone for communicator in self._given_up)

    @property
    def failure(self) -> str:
        """Why the present epoch's communicator failed; empty while it has not."""
        with self._changed:
            return self._current.error if self._current is not None else ""

    def adopt(self, membership: Membership) -> None:
        """Move to a newer epoch; one that is not newer changes nothing. For the control thread. Never blocks."""
        with self._adopting:
            if not self._closed:
                self._adopt(membership)

    def _adopt(self, membership: Membership) -> None:
        rank = membership.rank(self._me.member)
        with self._changed:
            if membership.epoch <= self._epoch:
                return
            self._epoch = membership.epoch
            self._over = membership.epoch - (rank is not None)
        old = self._set_aside()
        if rank is None:
            if old is not None:
                old.give_up()
            return
        backend = self._backend(membership, rank)
        if old is not None:
            old.give_up(replaced=backend is not None and backend.forms_alone)
        new = Communicator(membership.epoch, membership.members, rank, backend, self._changed)
        with self._changed:
            wanted = self._over < new.epoch
            if wanted:
                self._current = new
            else:
                self._given_up.append(new)
            self._changed.notify_all()
        if not wanted:
            new.give_up()

    def abandon(self) -> None:
        """End the present epoch and its operations, here and on its peers. From any thread. Never blocks."""
        with self._changed:
            self._over = self._epoch
        old = self._set_aside()
        if old is not None:
            old.give_up()

    def reduce(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> ReduceOutcome:
        """Sum ``request`` over the groups of ``epoch``. For the training thread.

        Waits for the epoch to be adopted and for its communicator to form. Returns as soon as the sums are
        there or the epoch is over (a newer ``adopt``, ``abandon``, or ``stale()``), and about VIEW_GRACE_S after a
        failure. After an outcome that is not ok, nothing can be reduced in this epoch any more.
        """
        return self._open(epoch, request, stale).finish(request.tensors, request.scalars)

    def gather(self, epoch: int, request: Gathering, stale: Callable[[], bool]) -> ReduceOutcome:
        """Gather ``request`` from the groups of ``epoch``; as :meth:`reduce` in all else, and not beside it."""
        return OpenGathering(
            epoch, request, stale, lambda: self._find(epoch), changed=self._changed, device=self._wire_device
        ).finish()

    def begin(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> OpenReduction:
        """Begin a reduction of tensors that are not final yet: the caller says which parts are, then calls
        :meth:`OpenReduction.finish`. Never waits.

        ``request`` must be overlapped; its scalars are not used. Only one reduction runs at a time, and the results of
        the one before are no longer valid.
        """
        assert request.overlapped, "only an overlapped reduction can begin before everything is computed"
        reduction = self._open(epoch, request, stale)
        reduction.advance()
        return reduction

    def _open(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> OpenReduction:
        return OpenReduction(
            epoch,
            request,
            stale,
            lambda: self._find(epoch),
            pool=self._pool,
            changed=self._changed,
            bucket_bytes=self._bucket_bytes,
        )

    def close(self) -> None:
        """Give all communicators up, adopt no more, and wait up to CLOSE_S for them to be freed. A thread that still
        hangs in a library after that is a daemon, which does not keep the process alive."""
        with self._adopting:
            self._closed = True
        self.abandon()
        until_s = time.monotonic() + CLOSE_S
        with self._changed:
            given_up = list(self._given_up)
        for communicator in given_up:
            communicator.join(until_s)
        self._links.close()

    def _backend(self, membership: Membership, rank: int) -> Backend | None:
        if len(membership.members) == 1:
            return None
        seat = Seat(membership.epoch, membership.members, rank, membership.right_at)
        suspects: frozenset[int] = frozenset()
        if self._suspects:
            suspects = frozenset(at for at, member in enumerate(membership.members) if member.group in self._suspects)
        ring = RingBackend(seat, self._links, self._timeout_s, suspects)
        if self._kind != "nccl":
            return ring
        from spare_megatron.collectives.backend_nccl import NcclBackend

        return NcclBackend(ring, rank, seat.size, self._timeout_s, self._device)

    def _find(self, epoch: int) -> Communicator | None:
        """The communicator of ``epoch``; None before it is adopted. Raises StaleError when the epoch is over."""
        with self._changed:
            if epoch <= self._over:
                raise StaleError
            return self._current if self._current is not None and self._current.epoch == epoch else None

    def _set_aside(self) -> Communicator | None:
        """The communicator that was the current one, which the caller gives up at once."""
        with self._changed:
            old, self._current = self._current, None
            if old is not None:
                self._given_up = [given_up for given_up in self._given_up if not given_up.gone]
                self._given_up.append(old)
        if old is not None:
            self._suspects = frozenset(
                link.sender for link in old.links if link.silent and link.receiver == self._me.member.group
            )
        return old


def _close_at_exit(replicas: ReplicaCommunicators) -> None:
    """Close ``replicas`` before the interpreter exits: a thread that returns from C++ after that can abort the
    process."""
    weak = weakref.ref(replicas)

    def close() -> None:
        alive = weak()
        if alive is not None:
            alive.close()

    atexit.register(close)
